"""What bench_serving is told to send, and what is read from what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radix_pages_sglang.experiments.chat.load import BLOCK_PROMPT_TOKENS, PROMPT_ENDS_TOKENS, Chats, Replay, measured
from radix_pages_sglang.serve import CommandError


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def chats(conversations: int = 24, rate: float | None = None) -> Chats:
    return Chats(
        conversations,
        system_prompts=8,
        turns=3,
        system_tokens=256,
        question_tokens=64,
        answer_tokens=32,
        concurrency=4,
        rate=rate,
    )


def trace(folder: Path, *requests: tuple[int, int, int]) -> Path:
    """A Mooncake trace of requests that come after so many ms, with so many blocks and so many tokens to answer."""
    path = folder / "conversations.jsonl"
    with path.open("w") as file:
        for at, blocks, output in requests:
            record = {"timestamp": at, "input_length": 512 * blocks, "output_length": output}
            file.write(json.dumps({**record, "hash_ids": list(range(blocks))}) + "\n")
    return path


def replay(path: Path, requests: int, pairs: int, room_tokens: int = 8192, rate: float | None = None) -> Replay:
    return Replay(
        path, requests, pairs, answer_tokens=32, room_tokens=room_tokens, concurrency=4, rate=rate, skip_bad=False
    )


def sent(load: Replay, pair: int, folder: Path) -> list[dict]:
    path = option(load.arguments(pair, folder), "--dataset-path")
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_conversations_are_dealt_evenly_to_their_system_prompts(tmp_path):
    arguments = chats(24).arguments(0, tmp_path)
    assert option(arguments, "--gsp-num-groups") == "8"
    assert option(arguments, "--gsp-prompts-per-group") == "3"


def test_a_warm_up_is_a_part_of_a_burst_but_never_nothing(tmp_path):
    assert option(chats(64).arguments(0, tmp_path, share=4), "--gsp-prompts-per-group") == "2"
    assert option(chats(8).arguments(0, tmp_path, share=4), "--gsp-prompts-per-group") == "1"


def test_conversations_that_cannot_be_dealt_evenly_are_refused():
    with pytest.raises(CommandError, match="--conversations 20 cannot share --system-prompts 8 evenly"):
        chats(20)


def test_a_rate_is_passed_on_and_its_absence_is_no_bound(tmp_path):
    assert option(chats(rate=2.5).arguments(0, tmp_path), "--request-rate") == "2.5"
    assert "--request-rate" not in chats().arguments(0, tmp_path)


def test_each_pair_replays_the_next_stretch_of_the_trace(tmp_path):
    load = replay(trace(tmp_path, (0, 1, 9), (10, 2, 9), (20, 3, 9), (30, 4, 9)), requests=2, pairs=2)
    assert [len(record["hash_ids"]) for record in sent(load, 0, tmp_path)] == [1, 2]
    assert [len(record["hash_ids"]) for record in sent(load, 1, tmp_path)] == [3, 4]


def test_a_trace_that_ends_begins_anew(tmp_path):
    load = replay(trace(tmp_path, (0, 1, 9), (10, 2, 9), (20, 3, 9)), requests=2, pairs=2)
    again = sent(load, 1, tmp_path)
    assert [len(record["hash_ids"]) for record in again] == [3, 1]
    assert [record["timestamp"] for record in again] == [0, 0]


def test_requests_too_long_for_the_pool_are_left_out_and_counted(tmp_path):
    room = 2 * BLOCK_PROMPT_TOKENS + PROMPT_ENDS_TOKENS + 9
    load = replay(trace(tmp_path, (0, 3, 9), (10, 2, 9), (20, 1, 9)), requests=2, pairs=1, room_tokens=room)
    assert [len(record["hash_ids"]) for record in sent(load, 0, tmp_path)] == [2, 1]
    assert load.left_out == 1


def test_a_trace_of_too_long_requests_alone_is_refused(tmp_path):
    with pytest.raises(CommandError, match=r"no request of .* fits into 100 tokens: give more with --pool-tokens"):
        replay(trace(tmp_path, (0, 3, 9)), requests=1, pairs=1, room_tokens=100)


def test_answers_end_early_where_the_trace_has_long_ones(tmp_path):
    load = replay(trace(tmp_path, (0, 1, 500), (1, 1, 7)), requests=2, pairs=1)
    assert [record["output_length"] for record in sent(load, 0, tmp_path)] == [32, 7]


def test_a_rate_scales_the_traces_own_pace(tmp_path):
    """Two requests took half a second; at one a second they take two."""
    path = trace(tmp_path, (0, 1, 9), (500, 1, 9))
    assert option(replay(path, 2, 1, rate=1.0).arguments(0, tmp_path), "--mooncake-slowdown-factor") == "4.0"
    assert option(replay(path, 2, 1).arguments(0, tmp_path), "--mooncake-slowdown-factor") == "0.0"


def test_a_trace_that_bench_serving_cannot_replay_is_refused(tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n')
    with pytest.raises(CommandError, match="is a trace of tokens, and bench_serving replays Mooncake's alone"):
        replay(path, 1, 1)


WRITTEN = {
    "completed": 2,
    "duration": 4.0,
    "total_output_tokens": 12,
    "output_throughput": 3.0,
    "median_ttft_ms": 30.0,
    "p90_ttft_ms": 40.0,
    "p99_ttft_ms": 50.0,
    "median_itl_ms": 10.0,
    "p99_itl_ms": 20.0,
    "cache_report": {"total_prompt_tokens": 400, "total_cached_tokens": 300},
    "errors": ["", "refused", ""],
    "itls": [[0.01, 0.25], [], [0.1, 0.02]],
    "generated_texts": ["a", "", "b"],
    "input_lens": [10, 20, 30],
}


def test_what_clients_saw_is_read_from_what_bench_serving_wrote():
    seen = measured(WRITTEN, stall_ms=50)
    assert (seen.requests, seen.failed) == (3, 1)
    assert seen.hit_rate == 0.75
    assert seen.longest_gap_ms == 250
    assert seen.gaps == 2
    assert seen.answers == ("a", "", "b")
