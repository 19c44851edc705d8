"""Replays of traces: what a hit is, who is in use, which frames come free, and what the command refuses."""

import json
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.runtime_context import restore_context, snapshot_context
from typer.testing import CliRunner

from radix_pages_sglang.cli import Commands
from radix_pages_sglang.experiments import cores
from radix_pages_sglang.experiments.prefix_sharing import spool as spool_module
from radix_pages_sglang.experiments.prefix_sharing.command import prefix_sharing
from radix_pages_sglang.experiments.prefix_sharing.frontier import RULES, Pool, lend
from radix_pages_sglang.experiments.prefix_sharing.replay import CacheServer, FarthestServer, LastingCountServer
from radix_pages_sglang.experiments.prefix_sharing.running import Peak, pinned_peak, serve
from radix_pages_sglang.experiments.prefix_sharing.spool import NEVER, Spool
from radix_pages_sglang.experiments.prefix_sharing.sweep import Case, Row, default_sizes, row_of
from radix_pages_sglang.experiments.traces import open_trace
from radix_pages_sglang.serve import CommandError

BLOCK = 512

APP = typer.Typer(cls=Commands)
APP.command("prefix-sharing")(prefix_sharing)
APP.command("another")(lambda: None)


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    """SGLang's configuration and threads as they were, afterwards."""
    state, threads = snapshot_context(), torch.get_num_threads()
    cores.prepare()
    yield
    restore_context(state)
    torch.set_num_threads(threads)


def line(ids, seconds=0.0, output=0):
    """The last block of a prompt has room for 100 tokens of the answer."""
    tokens = {"input_length": max(BLOCK * len(ids) - 100, 0), "output_length": output}
    return json.dumps({"timestamp": 1000 * seconds, **tokens, "hash_ids": ids})


def write(path, *requests):
    """Requests as lists of ids, or as (ids, seconds, output tokens), into a Mooncake trace."""
    lines = [line(*request) if isinstance(request, tuple) else line(request) for request in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def spooled(*requests, **options):
    with tempfile.TemporaryDirectory() as folder:
        return Spool(open_trace(write(Path(folder) / "trace.jsonl", *requests)), **options)


def hits_of(spool, server, ms_per_token=0.0):
    """Hits of each request."""
    found, before = [], 0
    for _ in serve(spool, server, ms_per_token):
        found.append(server.work.hits - before)
        before = server.work.hits
    return found


def cached(name, num_blocks, policy="lru", frame_blocks=2):
    return CacheServer(cores.framed_cache(name, num_blocks, frame_blocks, policy))


# -- spools --


def test_a_spool_knows_next_uses_and_how_often_a_block_was_asked():
    with spooled([1, 2], [1, 3], [1, 2]) as spool:
        seen = [(one.blocks.tolist(), one.next_uses.tolist(), one.uses.tolist()) for one in spool]
        assert seen == [([1, 2], [1, 2], [1, 1]), ([1, 3], [2, NEVER], [2, 1]), ([1, 2], [NEVER, NEVER], [3, 2])]
        assert (spool.num_asked, spool.num_distinct, spool.longest) == (6, 3, 2)
        assert spool.endless_hit_rate == 0.5


def test_a_spool_that_is_indexed_in_parts_says_the_same(monkeypatch):
    requests = [[0, 1, 2], [0, 3], [4], [0, 1], [4, 5]]
    with spooled(*requests) as at_once:
        monkeypatch.setattr(spool_module, "_PART", 3)
        with spooled(*requests) as in_parts:
            for one, other in zip(at_once, in_parts, strict=True):
                assert np.array_equal(one.next_uses, other.next_uses)
                assert np.array_equal(one.uses, other.uses)
            assert in_parts.num_distinct == at_once.num_distinct


@pytest.mark.parametrize("wrong", [[[1, 2], [3, 2]], [[1, 2], [2]], [[1, 1]]])
def test_ids_that_name_no_prefixes_are_refused(wrong):
    with pytest.raises(CommandError, match="follows two different blocks: hash_ids must name a block together with"):
        spooled([7], *wrong)


def test_a_spool_can_be_cut_after_so_many_blocks():
    with spooled([1, 2], [1, 3], [1, 2], most_blocks=5) as spool:
        assert (len(spool), spool.is_whole) == (2, False)


def test_requests_without_a_prompt_are_left_out_and_counted():
    with spooled([], [1], []) as spool:
        assert (len(spool), spool.num_blank) == (1, 2)


def test_a_trace_of_nothing_but_empty_prompts_is_refused():
    with pytest.raises(CommandError, match="has a prompt: give a trace with at least one"):
        spooled([], [])


def test_the_folder_of_a_spool_goes_with_it():
    with spooled([1]) as spool:
        folder = Path(spool._folder.name)
        assert folder.is_dir()
    assert not folder.exists()


def test_arrivals_never_go_back():
    with spooled(([1], 0), ([2], 5), ([3], 4)) as spool:
        assert [one.seconds for one in spool] == [0, 5, 5]


# -- hits --


@pytest.mark.parametrize("core", ["ours", "rust", "python"])
def test_a_prompt_hits_as_far_as_it_is_cached_and_as_a_whole(core):
    with spooled([1, 2, 3], [1, 2, 4], [1, 2, 3], [5]) as spool:
        assert hits_of(spool, cached(core, 10)) == [0, 2, 3, 0]


def test_ours_evicts_what_is_lacking_and_sglang_whole_leaves():
    # Room for six: the last request lacks one block, and the oldest leaf has four.
    requests = [[1, 2, 3, 4], [5], [6, 7]]
    with spooled(*requests) as spool:
        ours, stock = cached("ours", 6), cached("rust", 6)
        hits_of(spool, ours)
        hits_of(spool, stock)
    assert (ours.work.lacking, ours.work.evicted, ours.work.evictions) == (1, 1, 1)
    assert (stock.work.lacking, stock.work.evicted, stock.work.evictions) == (1, 4, 1)


def test_lfu_forgets_the_uses_of_evicted_blocks_and_lasting_counts_do_not():
    # Block 1 was used three times before it went; when it comes back and 4 wants room, 3 was used twice.
    requests = [[1], [1], [1], [2], [2], [2], [2], [3], [3], [3], [3], [1], [4], [1]]
    with spooled(*requests) as spool:
        assert hits_of(spool, cached("ours", 2, "lfu"))[-1] == 0
        assert hits_of(spool, LastingCountServer(2))[-1] == 1


PATHS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 4)),
    min_size=1,
    max_size=40,
)


def requests_of(drawn):
    """Paths as requests whose ids name prefixes, at growing times, each with its number of output tokens."""
    ids, now, requests = {}, 0, []
    for path, gap, duration in drawn:
        now += gap
        blocks = [ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path))]
        requests.append((blocks, now, duration))
    return requests


class LeafLru:
    """LRU over single blocks, by looking at all of them: of those without a child and not in use the oldest goes."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.parent, self.used, self.running = {}, {}, []

    def serve(self, number, blocks, now, end):
        self.running = [one for one in self.running if one[0] > now]
        hits = next((depth for depth, block in enumerate(blocks) if block not in self.parent), len(blocks))
        self.running.append((end, blocks))
        while len(self.parent) + len(blocks) - hits > self.num_blocks:
            in_use = {block for _, others in self.running for block in others}
            ends = self.parent.keys() - set(self.parent.values()) - in_use
            gone = min(ends, key=self.used.get)
            del self.parent[gone]
        for depth, block in enumerate(blocks):
            self.parent[block] = blocks[depth - 1] if depth else None
            self.used[block] = number
        if end <= now:
            self.running.pop()
        return hits


@given(PATHS, st.integers(5, 30))
def test_lru_in_our_cache_hits_as_a_model_that_looks_at_every_block(drawn, num_blocks):
    requests = [(blocks, now, 0) for blocks, now, _ in requests_of(drawn)]
    model = LeafLru(num_blocks)
    expected = [model.serve(number, blocks, now, now) for number, (blocks, now, _) in enumerate(requests)]
    with spooled(*requests) as spool:
        assert hits_of(spool, cached("ours", num_blocks)) == expected


@given(PATHS, st.integers(0, 10))
def test_it_does_so_too_where_requests_last(drawn, spare):
    requests = requests_of(drawn)
    with spooled(*requests) as spool:
        num_blocks = pinned_peak(spool, 1000).all + spare
        # Answers are so short that only prompts take room.
        model = LeafLru(num_blocks)
        expected = [
            model.serve(number, blocks, now, now + duration)
            for number, (blocks, now, duration) in enumerate(requests)
        ]
        assert hits_of(spool, cached("ours", num_blocks), 1000) == expected


@given(PATHS, st.integers(5, 30))
def test_no_policy_hits_more_than_an_endless_cache(drawn, num_blocks):
    with spooled(*requests_of(drawn)) as spool:
        most = spool.num_asked - spool.num_distinct
        for server in (FarthestServer(num_blocks), LastingCountServer(num_blocks), cached("rust", num_blocks)):
            assert sum(hits_of(spool, server)) <= most
        assert sum(hits_of(spool, FarthestServer(spool.num_distinct + 5))) == most


# -- who is in use --


def test_requests_that_last_are_in_use_until_they_end_and_their_answers_take_room():
    # At 1 s a token: both prompts together, five blocks with one in common; the second answer needs two more.
    requests = [([1, 2, 3], 0, 10), ([1, 4, 5], 5, 1000), ([6], 2000, 0)]
    with spooled(*requests) as spool:
        assert pinned_peak(spool, 0) == Peak(3, 3)
        assert pinned_peak(spool, 1000) == Peak(5, 7)


def test_a_pool_of_the_peak_serves_and_a_smaller_one_is_infeasible():
    requests = [([1, 2, 3], 0, 10), ([1, 4, 5], 5, 1000), ([6], 2000, 0)]
    with spooled(*requests) as spool:
        peak = pinned_peak(spool, 1000)
        rows = [
            row_of("t", spool, Case(blocks, policy, core, 1000), 2, peak, lambda: None)
            for blocks in (7, 6)
            for policy, core in (("lru", "ours"), ("lru", "rust"), ("farthest-next-use", "bound"))
        ]
    assert [(row.infeasible, row.hit_rate, row.note) for row in rows] == [
        *[(False, 1 / 7, "")] * 3,
        *[(True, None, "running requests need 7 blocks at once")] * 3,
    ]


@given(PATHS)
def test_when_all_have_ended_nothing_is_locked_and_answers_are_free(drawn):
    requests = requests_of(drawn)
    with spooled(*[(blocks, now, 400 * duration) for blocks, now, duration in requests], ([999], 1e6)) as spool:
        server = cached("ours", pinned_peak(spool, 10).all)
        hits_of(spool, server, 10)
    assert server.cache.protected_size() == 1  # the last prompt, after whose arrival nobody ended
    assert server.allocator.ledger().num_held == server.cache.evictable_size() + server.cache.protected_size()


# -- frames --


@pytest.mark.parametrize("core", ["ours", "rust"])
def test_frames_are_those_of_the_slots_that_are_held(core):
    # Frames of two blocks: [padding, 1], [2, 3], [4, 5]. The second prompt needs all of the pool.
    with spooled([1, 2, 3], [4, 5, 6, 7, 8]) as spool:
        row = row_of("t", spool, Case(5, "lru", core, 0.0), 2, Peak(5, 5), lambda: None)
    assert (row.frames_held, row.reclaimed_frames, row.evicted_blocks, row.evicted_per_asked) == (3, 1, 3, 1.0)


def breathing(num_requests):
    """Prompts that share beginnings in a seeded order."""
    rng = np.random.default_rng(0)
    requests = []
    for number in range(num_requests):
        family = int(rng.integers(12))
        depth = 1 + int(rng.integers(4))
        requests.append([1000 * family + place for place in range(depth)] + [100_000 + 10 * number])
    return requests


def test_with_moves_a_trim_returns_all_but_the_packed_floor_and_keeps_every_hit():
    with spooled(*breathing(600)) as spool:
        points = {rule.name: lend(spool, Pool(60, 4, 0.0), 20, rule, by_turns=True) for rule in RULES}
    stock, placed, moved = points.values()
    assert stock.hit_rate == placed.hit_rate == moved.hit_rate
    assert moved.returned_share_after_trims == moved.floor_share
    assert moved.moved > 0
    assert stock.moved == placed.moved == 0
    assert stock.returned_share_after_trims < moved.floor_share


def test_a_cap_as_large_as_the_pool_returns_nothing_once_the_pool_is_full():
    with spooled(*breathing(600)) as spool:
        point = lend(spool, Pool(60, 4, 0.0), 60, RULES[1], by_turns=False)
    assert (point.returned_frames, point.floor_share) == (0.0, 0.0)


# -- the command --


@pytest.fixture
def ask(tmp_path):
    """Run the command with a small trace, or the one that is named, and return what it said."""
    trace = write(tmp_path / "small.jsonl", *((blocks, number) for number, blocks in enumerate(breathing(60))))

    def run(*arguments, path=trace):
        return CliRunner().invoke(APP, ["prefix-sharing", "--trace", str(path), *arguments])

    return run


def test_a_run_writes_its_documented_keys_and_one_row_a_replay(ask, tmp_path):
    done = ask("--blocks", "20,60", "--policy", "lru,lfu", "--ms-per-token", "0,5", "--json", str(tmp_path / "found"))
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found").read_text())
    cases = [(row["blocks"], row["policy"], row["core"], row["ms_per_token"]) for row in found["rows"]]
    assert len(cases) == len(set(cases)) == 2 * 2 * (2 * 2 + 2)
    assert all(set(row) == {field.name for field in fields(Row)} for row in found["rows"])
    assert {row["trace"] for row in found["rows"]} == {"small"}
    assert {(point["rule"], point["lent"]) for point in found["frontier"]} == {
        (rule.name, lent) for rule in RULES for lent in ("always", "by turns")
    }


def test_bad_lines_are_told_in_the_result(ask, tmp_path):
    path = write(tmp_path / "bad.jsonl", [1], [2])
    path.write_text(path.read_text() + "{\n")
    done = ask("--skip-bad", "--quick", "--json", str(tmp_path / "found"), path=path)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "found").read_text())["traces"][0]["skipped_lines"] == 1


def test_sizes_by_default_are_shares_of_what_is_distinct():
    with spooled(*breathing(600)) as spool:
        assert spool.num_distinct == 648
        assert default_sizes(spool) == [6, 32, 64]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--blocks", "0"], "--blocks 0: '0' is not a whole number from 1"),
        (["--blocks", "ten,20"], "--blocks ten,20: 'ten' is not a whole number from 1"),
        (["--policy", "arc"], "--policy arc: 'arc' is none of lru, lfu, slru, tlru, fifo, filo, mru"),
        (["--policy", "priority"], "--policy priority: 'priority' is none of lru"),
        (["--core", "java"], "--core java: 'java' is none of ours, rust, python"),
        (["--ms-per-token", "-1"], "--ms-per-token -1: '-1' is not a number of milliseconds from 0"),
        (["--ms-per-token", "nan"], "--ms-per-token nan: 'nan' is not a number of milliseconds from 0"),
        (["--frame-tokens", "600"], "--frame-tokens 600 is no whole number of small's blocks of 512 tokens"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_one_line(ask, arguments, told):
    done = ask(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"radix-pages: {told}")
    assert done.stderr.count("\n") == 1


def test_without_a_trace_the_formats_are_named():
    done = CliRunner().invoke(APP, ["prefix-sharing", "--quick"])
    assert done.exit_code == 2
    assert done.stderr.startswith("radix-pages: no trace to replay: none comes with this package; give --trace FILE")
    assert "Qwen-Bailian" in done.stderr


def test_durations_need_arrivals(ask, tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n{"tokens": [1, 2, 4]}\n')
    done = ask("--ms-per-token", "20", path=path)
    assert done.exit_code == 2
    assert "arrive at the same time: --ms-per-token above 0 needs timestamps" in done.stderr


def test_all_traces_are_read_before_any_is_replayed(ask, tmp_path, monkeypatch):
    bad = write(tmp_path / "bad.jsonl", [1])
    bad.write_text(bad.read_text() + "{\n")
    monkeypatch.setattr(cores, "prepare", lambda: pytest.fail("a cache was made"))
    done = ask("--trace", str(bad))
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{bad}, line 2: " in done.stderr
