"""Servers that give memory back: ceilings, failing commits, SGLang's own controls and two ranks, seen from outside.

What a server occupies is read by this process from /proc; SGLang's strictest memory checks are on throughout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from urllib.error import HTTPError

import pytest

from radix_pages_sglang.cpu_engine.checkpoints import tiny_llama
from radix_pages_sglang.knobs import MAX_CACHED_TOKENS, MAX_RESIDENT_BYTES, MODE, NO_BOUND, TRIM
from radix_pages_sglang.local_server import Server, repeating, serving
from radix_pages_sglang.resident import resident_bytes
from tests.engine.load import chat_load, chat_loads, talk, wait_until
from tests.engine.test_absent import plugin
from tests.engine.test_frames import POOL_TOKENS, SLOT_BYTES, STRICT, arguments, complaints, state

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RETURN = {**STRICT, "RADIX_PAGES_MODE": "return", "RADIX_PAGES_IDLE_TRIM_SECONDS": "0"}
QUARTER_TOKENS = POOL_TOKENS // 4
QUARTER = QUARTER_TOKENS * SLOT_BYTES


def resident(server: Server) -> int:
    """Bytes of the KV mapping in memory, counted from here."""
    memory = state(server)["memory"]
    return resident_bytes(*memory["region"], pid=memory["pid"])


def set_knob(server: Server, name: str, value: float) -> None:
    assert server.request("/set_internal_state", {"server_args": {name: value}}) == "[true]"


@contextmanager
def sampled(server: Server, hertz: float = 10.0) -> Iterator[list[int]]:
    """What the KV mapping occupies, read that often while the block runs."""
    memory = state(server)["memory"]
    samples: list[int] = []

    def sample() -> None:
        samples.append(resident_bytes(*memory["region"], pid=memory["pid"]))

    with repeating(sample, every_seconds=1 / hertz):
        yield samples


@pytest.fixture(scope="module")
def bounded() -> Iterator[Server]:
    """A server whose memory is bounded to a quarter of its pool."""
    environment = {**RETURN, "RADIX_PAGES_MAX_RESIDENT_BYTES": str(QUARTER)}
    with serving(tiny_llama(), *arguments(16), "--sleep-on-idle", env=environment) as server:
        yield server


def test_under_a_ceiling_no_request_fails_and_the_system_never_counts_more(bounded):
    def is_enough() -> bool:
        return len(samples) > 20 and state(bounded)["memory"]["ceiling_refusals"] > 0

    with sampled(bounded) as samples:
        replies = chat_loads(bounded, 32, until=is_enough)
    assert {len(turns) for turns in replies} == {4}
    assert max(samples) <= QUARTER
    assert max(samples) > QUARTER // 2  # the load did want it
    assert state(bounded)["evictions"] > 50
    assert complaints(bounded) == []


def test_the_longest_prompt_for_a_pool_of_the_ceilings_size_is_served_and_a_longer_one_is_refused(bounded):
    """Stock SGLang takes prompts up to the pool less one page; of this pool one page is the padding's."""
    longest = QUARTER_TOKENS - 2 * 16 - 1
    assert bounded.generate([7] * longest, 8)["meta_info"]["prompt_tokens"] == longest
    with pytest.raises(HTTPError) as refused:
        bounded.generate([7] * (longest + 1), 8)
    assert refused.value.code == 400
    assert bounded.generate([7] * longest, 8)["meta_info"]["finish_reason"]["type"] == "length"
    assert complaints(bounded) == []


def test_a_ceiling_that_is_lifted_and_lowered_under_load_is_kept_again_when_requests_end(bounded):
    set_knob(bounded, MAX_RESIDENT_BYTES, NO_BOUND)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(chat_load, bounded, talks=24)
        deadline = time.monotonic() + 60
        while resident(bounded) <= QUARTER and time.monotonic() < deadline:
            time.sleep(0.1)
        assert resident(bounded) > QUARTER
        set_knob(bounded, MAX_RESIDENT_BYTES, QUARTER)
        assert [len(turns) for turns in load.result()] == [4] * 24
    assert state(bounded)["memory"]["over_ceiling_frames"] == 0
    assert resident(bounded) <= QUARTER
    assert complaints(bounded) == []


def test_requests_that_a_lowered_ceiling_leaves_no_room_for_end_with_an_error_and_block_nobody(bounded):
    """They were let in before: some wait, one is being prefilled chunk by chunk."""
    set_knob(bounded, MAX_RESIDENT_BYTES, NO_BOUND)

    def outcome(first: int) -> int:
        try:
            bounded.generate([1_000 + first] * 3_500, 64)
        except HTTPError as error:
            return error.code
        return 200

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(outcome, first) for first in range(6)]
        wait_until(lambda: state(bounded)["running_requests"])
        set_knob(bounded, MAX_RESIDENT_BYTES, QUARTER)
        codes = [future.result(timeout=60) for future in running]
    assert set(codes) - {200} <= {400, 500, 503}
    assert codes.count(200) < 6
    assert bounded.generate("who is next?", 4)["text"]
    assert complaints(bounded) == []


FAILING = """
import os
import random

dice = random.Random(0)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("radix_pages_sglang.pool.MmapBacking.commit", commit, HookType.AROUND)


def commit(original, backing, frames):
    from radix_pages.backing import CommitError

    try:
        share = float(open(os.environ["FAILING_COMMITS"]).read() or 0)
    except FileNotFoundError:
        share = 0.0
    if dice.random() < share:
        with open(os.environ["FAILED_COMMITS"], "a") as failed:
            failed.write("x")
        raise CommitError("no memory, says the test")
    return original(backing, frames)
"""


def test_failing_commits_slow_requests_down_and_do_nothing_else(tmp_path):
    """1% of commits fail, then all of them for seconds, while memory is returned all the time."""
    share, failed = tmp_path / "share", tmp_path / "failed"
    failed.touch()
    files = {"FAILING_COMMITS": str(share), "FAILED_COMMITS": str(failed)}
    environment = {**RETURN, **plugin(tmp_path, "failing_commits", FAILING), **files}
    with serving(tiny_llama(), *arguments(16), "--sleep-on-idle", env=environment) as server:
        answers = [talk(server, seed, turns=3, max_tokens=8) for seed in range(8)]
        assert state(server)["memory"]["commit_failures"] == 0
        set_knob(server, MAX_CACHED_TOKENS, 256)

        shares = cycle(("1", "0.01"))

        def shake() -> None:
            """All commits fail for a while, then few, again and again; memory goes back in between."""
            share.write_text(next(shares))
            set_knob(server, TRIM, 1)

        shake()
        with repeating(shake, every_seconds=1.0):
            said = [talk(server, seed, turns=3, max_tokens=8) for seed in range(8)]
            together = chat_loads(server, 16, until=lambda: len(failed.read_text()) > 10)
        share.write_text("0")
        failures = len(failed.read_text())
        assert said == answers
        assert {len(turns) for turns in together} == {4}
        assert state(server)["memory"]["commit_failures"] == failures
        assert complaints(server) == []
        # With memory to be had again nothing is left of it.
        assert talk(server, 0, turns=3, max_tokens=8) == answers[0]
        metrics = server.request("/metrics")
        counted = [line for line in metrics.splitlines() if line.startswith("radix_pages:commit_failures_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in counted) == failures


@pytest.fixture(scope="module")
def idle_trimming() -> Iterator[Server]:
    """A server that gives back what is empty after a second without work."""
    environment = {**RETURN, "RADIX_PAGES_IDLE_TRIM_SECONDS": "1"}
    with serving(tiny_llama(), *arguments(16), "--sleep-on-idle", env=environment) as server:
        yield server


def test_an_idle_server_gives_back_what_is_empty_and_keeps_what_is_cached(idle_trimming):
    server = idle_trimming
    chat_load(server, talks=4)
    before = state(server)["memory"]["trims"]
    wait_until(lambda: state(server)["memory"]["trims"] > before)
    now = state(server)
    assert now["memory"]["committed_frames"] == now["held_frames"]
    assert resident(server) == now["memory"]["committed_bytes"]
    assert now["cached_tokens"] > 0
    trims = now["memory"]["trims"]
    time.sleep(3)
    assert state(server)["memory"]["trims"] == trims  # once for each time without work
    assert complaints(server) == []


def test_flush_pause_and_release_keep_working_and_let_memory_go(idle_trimming):
    server = idle_trimming
    for mode in ("in_place", "retract", "abort"):
        chat_load(server, talks=2)
        server.request("/pause_generation", {"mode": mode})
        server.request("/continue_generation", {})
        assert server.generate("still there?", 4)["text"]
    server.request("/flush_cache?timeout=60", {})
    wait_until(lambda: state(server)["memory"]["committed_frames"] == 1)
    chat_load(server, talks=2)
    assert resident(server) > state(server)["memory"]["frame_bytes"]
    server.request("/release_memory_occupation", {})
    assert state(server)["memory"]["committed_frames"] == 1
    assert resident(server) == state(server)["memory"]["frame_bytes"]
    server.request("/resume_memory_occupation", {})
    assert server.generate("and now?", 4)["text"]
    assert complaints(server) == []


def test_a_lowered_mode_returns_nothing_more_and_can_be_raised_again(idle_trimming):
    server = idle_trimming
    for mode in (1, 0):
        set_knob(server, MODE, mode)
        trims = state(server)["memory"]["trims"]
        chat_load(server, talks=2)
        time.sleep(3)
        assert state(server)["memory"]["trims"] == trims
    set_knob(server, MODE, 2)
    set_knob(server, MAX_CACHED_TOKENS, 0)
    assert state(server)["memory"]["committed_frames"] == 1
    set_knob(server, MAX_CACHED_TOKENS, NO_BOUND)
    assert complaints(server) == []
