"""A real server under load, eviction and SGLang's strictest memory checks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.error import HTTPError

import pytest
from typer.testing import CliRunner

from radix_pages_sglang import cli
from radix_pages_sglang.counts import STATE_KEY
from radix_pages_sglang.cpu_engine.checkpoints import tiny_llama
from radix_pages_sglang.local_server import Server, serving
from tests.engine.load import chat_load, chatting, talk, wait_until
from tests.engine.test_control import refused, said

pytestmark = pytest.mark.engine

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
POOL_TOKENS = 4096
COMPLAINTS = ("leak", "Leak", "double free", "Traceback", "AssertionError", "pool memory", "disagree")


@pytest.fixture(scope="module")
def server():
    arguments = (
        *("--load-format", "dummy", "--dtype", "float32", "--page-size", "16"),
        *("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "16", "--enable-metrics"),
        *("--chunked-prefill-size", "256"),
    )
    with serving(tiny_llama(), *arguments, env=STRICT) as running:
        running.chat("warm up", max_tokens=4)
        yield running


def state(server: Server) -> dict:
    return json.loads(server.request("/server_info"))["internal_states"][0][STATE_KEY]


def complaints(server: Server) -> list[str]:
    """Lines of the log in which SGLang, or we, found something wrong."""
    lines = server.log_text().splitlines()
    return [line for line in lines if "server_args=" not in line and any(word in line for word in COMPLAINTS)]


def flush_is_refused(server: Server) -> bool:
    try:
        server.request("/flush_cache", {})
    except HTTPError as error:
        if error.code != 400:
            raise
        return True
    return False


def flush_when_idle(server: Server) -> None:
    """Wait until no request is left, then empty the cache; SGLang answers 400 when that takes a minute."""
    server.request("/flush_cache?timeout=60", {})


def test_hundreds_of_turns_under_eviction_raise_no_complaint(server):
    before = state(server)
    replies = chat_load(server, talks=64)
    after = state(server)
    assert all(len(turns) == 4 for turns in replies)
    assert after["evictions"] - before["evictions"] > 50
    assert complaints(server) == []


def test_every_eviction_took_what_was_asked_and_no_page_more(server):
    counts = state(server)
    assert counts["evicted_tokens"] == counts["asked_page_rounded"] - counts["unmet_tokens"]
    assert counts["pages_reclaimed"] * 16 == counts["evicted_tokens"]


def test_the_same_conversation_gets_the_same_answers_again_from_the_cache(server):
    assert talk(server, seed=7, turns=4, max_tokens=12) == talk(server, seed=7, turns=4, max_tokens=12)


def test_a_flush_while_busy_is_refused_and_harms_nothing(server):
    with chatting(server, 16):
        wait_until(lambda: flush_is_refused(server))
    assert complaints(server) == []


def test_an_idle_flush_empties_the_cache(server):
    flush_when_idle(server)
    first = server.generate("one two three four five six seven eight " * 8, max_tokens=2)
    assert first["meta_info"]["cached_tokens"] == 0
    again = server.generate("one two three four five six seven eight " * 8, max_tokens=2)
    assert again["meta_info"]["cached_tokens"] > 0


def test_aborting_everything_while_running_leaves_no_page_behind(server):
    with ThreadPoolExecutor(17) as pool:
        running = [pool.submit(server.generate, f"count {i} " * 40, 400, ignore_eos=True) for i in range(16)]
        wait_until(lambda: state(server)["running_requests"] > 4)
        server.request("/abort_request", {"abort_all": True})
        reasons = [job.result()["meta_info"]["finish_reason"]["type"] for job in running]
    assert "abort" in reasons
    flush_when_idle(server)
    assert complaints(server) == []


def test_a_client_that_hangs_up_mid_answer_leaves_no_page_behind(server):
    sampling = {"max_new_tokens": 400, "ignore_eos": True}
    body = json.dumps({"text": "go on " * 60, "sampling_params": sampling, "stream": True})
    for _ in range(4):
        connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        connection.getresponse().read(64)
        connection.close()
    flush_when_idle(server)
    assert complaints(server) == []


def test_a_prompt_longer_than_the_pool_is_refused_and_the_server_goes_on(server):
    with pytest.raises(HTTPError) as refused:
        server.generate(list(range(100, 100 + POOL_TOKENS + 64)), max_tokens=4)
    assert refused.value.code == 400
    assert server.generate("still there?", max_tokens=4)["text"]


def test_sglangs_own_eviction_metrics_count_what_we_evicted(server):
    metrics = server.request("/metrics")
    evicted = sum(
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("sglang:evicted_tokens_total{")
    )
    assert evicted == state(server)["evicted_tokens"] > 0


def test_the_server_is_still_healthy_after_all_this(server):
    assert server.process.poll() is None
    server.request("/health_generate")
    assert complaints(server) == []


def test_a_server_that_only_observes_says_which_setting_returns_memory(server):
    assert said(server, "status")
    assert "this server has no backing: start it with RADIX_PAGES_MODE=return" in refused(server, "trim")
    assert "observe" in refused(server, "mode", "return")
    top = CliRunner().invoke(cli.app, ["top", "--url", server.url, "--once"])
    assert "no backing: no memory is returned" in top.stdout
    assert said(server, "cap", "0") == "rank 0: cap 0 tokens (was off)"
    assert state(server)["cached_tokens"] == 0
    assert said(server, "cap", "off") == "rank 0: cap off (was 0 tokens)"
