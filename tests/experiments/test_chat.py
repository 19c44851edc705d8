"""The chat experiment without its servers: order of the bursts, what they come to, and what is refused at once."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from radix_pages_sglang import cli
from radix_pages_sglang.experiments.chat.command import chat
from radix_pages_sglang.experiments.chat.compare import result, summary
from radix_pages_sglang.experiments.chat.found import Burst, Found, values
from radix_pages_sglang.experiments.chat.load import Measured, measured
from radix_pages_sglang.experiments.chat.plan import Plan, run
from radix_pages_sglang.experiments.chat.sides import OURS, STOCK, Side, running
from tests.client.fake_server import FakeServer, listening, observing
from tests.experiments.test_chat_load import WRITTEN, chats

SEEN = measured(WRITTEN, stall_ms=50)
COUNTS = {"evictions": 4, "asked_tokens": 90, "asked_page_rounded": 100, "evicted_tokens": 125}
COUNTS |= {"eviction_seconds": 0.002, "pages_reclaimed": 5}


def burst(side: str, pair: int, start: int, seen: Measured = SEEN, **counts: float) -> Burst:
    return Burst(side, pair, start, seen, {**COUNTS, **counts})


def found(*throughputs: tuple[float, float]) -> Found:
    """A pair a start, with these throughputs of ours and stock's."""
    bursts = []
    for pair, (ours, stock) in enumerate(throughputs):
        bursts += [burst(OURS, pair, pair, replace(SEEN, throughput=ours), evicted_tokens=100, frames_emptied=3)]
        bursts += [burst(STOCK, pair, pair, replace(SEEN, throughput=stock))]
    return Found(bursts, page_bytes=1000)


# -- which burst when --


class Recorder:
    """Stands for the process of bench_serving: notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def wait(self) -> None:
        pass

    def burst(self, url: str, load: Any, pair: int, seed: int, share: int = 1) -> dict[str, Any]:
        if share == 1:
            self.asked.append((url, pair, seed))
        return WRITTEN


class ChatServer(FakeServer):
    """Has evicted 16 tokens more each time it is asked."""

    def reply(self, path: str, authorization: str, body: Any) -> tuple[int, str]:
        if path.startswith("/flush_cache"):
            return 200, ""
        for state in self.states:
            state["evicted_tokens"] = state.get("evicted_tokens", 0) + 16
        return super().reply(path, authorization, body)


@pytest.fixture
def servers():
    with listening(ChatServer(observing())) as ours, listening(ChatServer({"evictions": 1})) as stock:
        yield running(ours.url, stock.url)


def planned(servers: dict[str, Side], pairs: int, starts: int = 1) -> Plan:
    return Plan(chats(8), pairs, starts, seed=5, stall_ms=50, servers=servers)


def test_the_sides_take_turns_and_so_does_who_is_first(servers):
    recorder = Recorder()
    run(planned(servers, 3), recorder)
    names = {servers[name].url: name for name in servers}
    assert [(names[url], pair) for url, pair, _ in recorder.asked] == [
        (STOCK, 0),
        (OURS, 0),
        (OURS, 1),
        (STOCK, 1),
        (STOCK, 2),
        (OURS, 2),
    ]


def test_both_bursts_of_a_pair_have_the_same_seed_and_no_other_pair_has_it(servers):
    recorder = Recorder()
    run(planned(servers, 3), recorder)
    assert [seed for _, _, seed in recorder.asked] == [5, 5, 6, 6, 7, 7]


def test_a_burst_counts_what_was_evicted_between_its_start_and_its_end(servers):
    assert [burst.counts["evicted_tokens"] for burst in run(planned(servers, 1), Recorder()).of(OURS)] == [16]


def test_starts_share_the_pairs_as_evenly_as_can_be(servers):
    assert list(planned(servers, 8, starts=3).blocks()) == [(0, range(0, 2)), (1, range(2, 5)), (2, range(5, 8))]


def test_counts_are_those_of_all_ranks_together():
    with listening(FakeServer(observing(), observing())) as server:
        assert running(server.url, None)[OURS].counts()["evicted_tokens"] == 192


def test_a_server_that_does_not_count_is_loaded_all_the_same():
    with listening(FakeServer({})) as server:
        assert running(server.url, None)[STOCK].counts() == {}


# -- what it comes to --


def test_over_eviction_is_what_was_evicted_for_each_token_asked_for():
    assert values(found((1.0, 1.0), (1.0, 1.0)))["over_eviction"] == {OURS: 1.0, STOCK: 1.25}


def test_time_and_bytes_are_those_of_all_bursts():
    said = values(found((1.0, 1.0), (1.0, 1.0)))
    assert said["eviction_ms"] == {OURS: 4.0, STOCK: 4.0}
    assert said["eviction_us"] == {OURS: 500.0, STOCK: 500.0}
    assert said["reclaimed_bytes"] == {OURS: 10_000, STOCK: None}
    assert said["emptied_frames"] == {OURS: 6, STOCK: None}


def test_a_difference_has_its_interval_over_the_starts():
    entry = values(found((2.0, 1.0), (2.0, 1.0), (2.0, 1.0)))["throughput"]
    assert entry == {
        **{"ours": 2.0, "stock": 1.0, "ours_range": [2.0, 2.0], "stock_range": [1.0, 1.0]},
        **{"difference_percent": 100.0, "low": 100.0, "high": 100.0},
    }


def test_an_interval_above_the_bound_is_told_from_one_that_is_not():
    assert "it lies above -3%" in "".join(line for line in summary(found((1, 1), (1, 1))) if "output tokens" in line)
    assert "it lies NOT above -3%" in "".join(
        line for line in summary(found((9, 10), (10, 10))) if "output tokens" in line
    )


def test_answers_that_differ_are_counted():
    ours, stock = burst(OURS, 0, 0), burst(STOCK, 0, 0, replace(SEEN, answers=("a", "", "other")))
    assert values(Found([ours, stock]))["answers_equal"] == {"equal": 2, "total": 3}


def test_one_side_alone_is_reported_without_differences():
    alone = result(Found([burst(STOCK, 0, 0), burst(STOCK, 1, 0)]), {}, {}, [])
    assert alone.values["pairs"] == 0
    assert alone.values["hit_rate"]["stock"] == 0.75
    assert alone.values["hit_rate"]["difference_percent"] is None
    assert alone.tables[0].columns == ["", "stock"]


def test_every_key_of_the_json_is_told_in_the_help():
    words = set(re.findall(r"\w+", chat.__doc__ or ""))
    assert set(values(found((1, 1), (1, 1)))) <= words


# -- what is refused --


def refused(*arguments: str) -> str:
    """The one line with which `radix-pages experiment chat` ends."""
    ended = CliRunner().invoke(cli.app, ["experiment", "chat", *arguments])
    assert ended.exit_code == 2
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_a_port_in_use_is_refused_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} is in use: leave --port out" in refused("--port", str(port))


def test_a_model_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert f"--model {tmp_path} has no weights" in refused("--model", str(tmp_path))


def test_a_model_that_is_no_folder_is_refused():
    assert "--model nowhere is no folder with a config.json: give one, or tiny" in refused("--model", "nowhere")


def test_nobody_at_the_address_is_said_so():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert f"no server answers at {url}" in refused("--url", url)


def test_a_server_that_is_not_sglangs_is_refused():
    server = FakeServer()
    server.answer = (200, json.dumps({"hello": "world"}))
    with listening(server):
        assert "answers, but not as an SGLang server" in refused("--url", server.url)


def test_an_address_without_a_scheme_is_refused():
    assert "localhost:30000 needs http:// or https:// in front" in refused("--url", "localhost:30000/")


def test_stock_in_place_of_ours_is_refused():
    with listening(FakeServer({"evictions": 1})) as stock:
        assert "does not run this cache" in refused("--url", stock.url, "--stock-url", stock.url)


def test_ours_in_place_of_stock_is_refused():
    with listening(FakeServer(observing())) as ours:
        assert "runs this cache, not stock's" in refused("--url", ours.url, "--stock-url", ours.url)


def test_an_option_of_servers_it_starts_is_refused_for_one_that_runs():
    assert "--pool-tokens is for servers this starts" in refused("--url", "http://127.0.0.1:1", "--pool-tokens", "99")


def test_a_stock_server_alone_is_refused():
    assert "give its address, too" in refused("--stock-url", "http://127.0.0.1:1")


def test_a_setting_that_the_mode_does_not_have_is_refused():
    assert "ours cannot start: RADIX_PAGES_IDLE_TRIM_SECONDS=3.0 needs" in refused("--idle-trim", "3")


def test_a_frame_of_broken_pages_is_refused():
    assert "--frame-tokens 24 is not a multiple of --page-size 16" in refused("--frame-tokens", "24")


def test_a_trace_line_that_does_not_parse_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n{"timestamp": 1\n')
    with listening(FakeServer({})) as server:
        assert f"{path}, line 2: it is not JSON" in refused("--url", server.url, "--trace", str(path))
