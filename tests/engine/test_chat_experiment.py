"""The chat experiment as a user runs it, with both servers, as short as it can be."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from radix_pages_sglang import cli

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """One pair of bursts, each of 24 conversations on a pool of 2,048 tokens."""
    folder = tmp_path_factory.mktemp("chat")
    load = ("--pairs", "1", "--conversations", "24", "--concurrency", "4", "--pool-tokens", "2048")
    ended = CliRunner().invoke(cli.app, ["experiment", "chat", *load, "--json", str(folder / "chat.json")])
    assert ended.exit_code == 0, ended.output
    return json.loads((folder / "chat.json").read_text())


def test_ours_evicts_what_was_asked_for_and_stock_more(reported):
    assert reported["evictions"]["ours"] > 20
    assert reported["evicted_tokens"]["ours"] == reported["asked_page_rounded"]["ours"]
    assert reported["over_eviction"]["stock"] > reported["over_eviction"]["ours"] == 1


def test_both_sides_read_the_same_prompts_and_give_the_same_answers(reported):
    assert reported["failed_requests"] == {"ours": 0, "stock": 0}
    assert reported["prompt_lengths_equal"] == {"equal": 72, "total": 72}
    assert reported["answers_equal"] == {"equal": 72, "total": 72}


def test_times_hit_rates_and_memory_are_measured_on_both_sides(reported):
    for side in ("ours", "stock"):
        assert 0 < reported["hit_rate"][side] < 1
        assert 0 < reported["ttft_p50_ms"][side] <= reported["ttft_p90_ms"][side] <= reported["ttft_p99_ms"][side]
        assert reported["resident_bytes"][side]["most"] > 100 * 1024**2
