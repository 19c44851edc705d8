"""Memory returned and had again under real caches and requests: bounds, modes, trims, knobs (`returning.py`)."""

from __future__ import annotations

import time
from types import SimpleNamespace

import prometheus_client
import pytest
import torch
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

from radix_pages_sglang import control as control_module
from radix_pages_sglang import scheduler_hooks
from radix_pages_sglang.config import MODES
from radix_pages_sglang.control import IdleTrim, MemoryControl, OwnershipError
from radix_pages_sglang.knobs import (
    IDLE_TRIM_SECONDS,
    MAX_CACHED_TOKENS,
    MAX_RESIDENT_BYTES,
    MODE,
    NO_BOUND,
    RESERVE_FRAMES,
    TRIM,
    Knob,
)
from radix_pages_sglang.metrics import MemoryMetrics
from radix_pages_sglang.page_store import HostPages
from tests.adapter import caches
from tests.adapter.caches import OURS, Request, run
from tests.adapter.framed import framed
from tests.adapter.returning import (
    FRAME,
    admits,
    assert_sound,
    budget,
    control_of,
    evicted,
    frames,
    residency,
    returning,
    trimmed,
)

pytestmark = pytest.mark.usefixtures("published_config")

A16, B16, C16 = run(1000, 16), run(2000, 16), run(3000, 16)
OBSERVE, PLACE, RETURN = (MODES.index(mode) for mode in ("observe", "place", "return"))


# what SGLang sees


@pytest.mark.parametrize("pretended", [True, False])
def test_returned_pages_are_free_pages_to_sglang(pretended):
    c = returning(pretended=pretended)
    assert frames(c) == " ".join(["#.", *["--"] * 15])
    assert c.sizes == (124, 0, 0)
    assert (c.allocator.committed_size(), c.allocator.withheld_size()) == (4, 0)
    assert sorted(c.allocator.free_pages.tolist()) == list(range(1, 32))
    assert_sound(c)


@pytest.mark.parametrize("pretended", [True, False])
def test_an_allocation_commits_before_it_evicts(pretended):
    c = returning(pool_tokens=60, pretended=pretended)
    c.insert(A16)
    assert frames(c) == "## ## #. -- -- -- -- --"
    c.insert(B16)
    assert (evicted(c), frames(c)) == (0, "## ## ## ## #. -- -- --")
    c.insert(run(3000, 24))
    assert (evicted(c), frames(c)) == (0, "## ## ## ## ## ## ## #.")
    c.insert(run(4000, 8))
    assert evicted(c) == 4
    assert c.holds_computed_kv(B16)
    assert_sound(c, 60)


def test_under_a_ceiling_an_allocation_evicts_what_the_ceiling_withholds():
    c = returning(max_resident_bytes=4 * FRAME)
    c.insert(run(1000, 24))
    assert (frames(c).count("--"), evicted(c)) == (12, 0)
    assert (c.sizes.available, c.allocator.committed_size(), c.allocator.withheld_size()) == (100, 4, 96)
    c.insert(B16)
    assert evicted(c) == 12
    assert frames(c).count("--") == 12
    assert residency(c).counts.ceiling_refusals == 1
    assert_sound(c)


def test_where_memory_cannot_be_had_an_allocation_evicts():
    c = returning()
    c.insert(A16)
    residency(c).backing.fail_next(1000)
    c.insert(B16)
    assert evicted(c) == 12
    assert residency(c).counts.commit_failures == 1
    assert_sound(c)


def test_where_nothing_can_be_had_or_evicted_an_allocation_gets_nothing_and_holds_nothing():
    c = returning()
    residency(c).backing.fail_next(1000)
    assert c.allocator.alloc(8) is None
    assert frames(c).startswith("#. --")
    residency(c).backing.fail_next(0)
    assert c.allocator.alloc(8) is None  # one call is spared the attempt
    assert len(c.allocator.alloc(8)) == 8


def test_a_decode_step_commits_too():
    c = returning()
    request = Request(c, run(1, 4)).admit().prefill()
    assert frames(c).startswith("## --")
    request.decode([50, 51])
    assert frames(c).startswith("## #. --")
    assert evicted(c) == 0
    assert c.allocator.check_decode_capacity(num_tokens=12, tree_cache=c.tree)
    assert frames(c).startswith("## #. .. --")
    request.finish()
    assert_sound(c)


def test_a_flush_leaves_returned_what_was_returned():
    c = returning()
    c.insert(A16)
    c.reset()
    assert frames(c) == " ".join(["#.", "..", "..", *["--"] * 13])
    assert c.sizes == (124, 0, 0)
    assert_sound(c)


def test_a_backed_pool_cannot_change_its_size():
    c = returning()
    c.allocator.size, c.allocator.num_pages = 60, 15
    with pytest.raises(RuntimeError, match="cannot change its size"):
        c.allocator.clear()


# the cap


def test_the_cap_keeps_the_cache_small_from_step_to_step():
    c = returning(max_cached_tokens=16)
    for first in range(1000, 6000, 1000):
        c.insert(run(first, 16))
        control_of(c).step()
        assert c.sizes.evictable == 16
    assert control_of(c).capped_tokens == 64
    assert evicted(c) == 0  # no allocation lacked anything
    assert_sound(c)


def test_what_requests_hold_is_not_capped():
    c = returning(max_cached_tokens=0)
    request = Request(c, A16).admit().prefill().publish()
    control_of(c).step()
    assert c.sizes.protected == 16
    request.decode([1]).finish()
    control_of(c).step()
    assert c.sizes == (124, 0, 0)


def test_a_cap_set_at_run_time_evicts_and_returns_at_once():
    c = returning(pretended=False)
    for tokens in (A16, B16, C16):
        c.insert(tokens)
    control_of(c).set(MAX_CACHED_TOKENS, 16)
    assert c.holds_computed_kv(C16)
    assert c.cached(C16) == 16
    assert (c.sizes.evictable, control_of(c).capped_tokens) == (16, 32)
    assert residency(c).committed_frames == 1 + 3
    assert_sound(c)
    control_of(c).set(MAX_CACHED_TOKENS, NO_BOUND)
    c.insert(A16)
    control_of(c).step()
    assert c.sizes.evictable == 32


def test_the_cap_holds_without_a_backing():
    c = framed(page_size=4, pool_tokens=64)
    control_of(c).set(MAX_CACHED_TOKENS, 8)
    c.insert(A16)
    control_of(c).step()
    assert c.sizes.evictable == 8
    assert c.tree.recount() == []


# the ceiling


@pytest.mark.parametrize("pretended", [True, False])
def test_a_lowered_ceiling_returns_empty_frames_before_it_evicts(pretended):
    c = returning(pretended=pretended)
    c.insert(run(1000, 40))
    c.evict(20)
    cached = c.sizes.evictable
    assert residency(c).committed_frames == 6
    control_of(c).set(MAX_RESIDENT_BYTES, 4 * residency(c).backing.frame_bytes)
    assert residency(c).committed_frames <= 4
    assert c.sizes.evictable == cached
    assert control_of(c).capped_tokens == 0
    assert_sound(c)


def test_a_lowered_ceiling_evicts_until_enough_frames_are_empty():
    c = returning(pretended=False)
    for tokens in (A16, B16, C16, run(4000, 16)):
        c.insert(tokens)
    assert residency(c).committed_frames == 9
    control_of(c).set(MAX_RESIDENT_BYTES, 3 * residency(c).backing.frame_bytes)
    assert (residency(c).committed_frames, residency(c).over_ceiling_frames) == (3, 0)
    assert 0 < c.sizes.evictable <= 20
    assert control_of(c).capped_tokens == 64 - c.sizes.evictable
    assert_sound(c)
    control_of(c).set(MAX_RESIDENT_BYTES, NO_BOUND)
    assert residency(c).max_frames is None
    assert control_of(c).knobs()[MAX_RESIDENT_BYTES].value == NO_BOUND


def test_a_lowered_ceiling_stops_at_what_requests_hold_and_goes_on_when_they_end():
    c = returning()
    request = Request(c, run(1, 32)).admit().prefill().publish()
    c.insert(B16)
    control_of(c).set(MAX_RESIDENT_BYTES, 2 * FRAME)
    assert c.sizes == (92, 0, 32)
    assert residency(c).over_ceiling_frames == 3
    assert control_of(c).state()["memory"]["over_ceiling_frames"] == 3
    control_of(c).step()
    assert residency(c).over_ceiling_frames == 3
    assert not admits(budget(c), 8)[0]
    request.decode([1]).finish()
    control_of(c).step()
    assert residency(c).over_ceiling_frames == 0
    assert c.sizes.evictable <= 12
    assert_sound(c)


def test_the_reserve_gives_way_to_a_lowered_ceiling():
    c = returning(reserve_frames=4)
    assert residency(c).committed_frames == 5
    residency(c).max_frames = 2
    control_of(c).step()
    assert residency(c).committed_frames == 2


# trims and the reserve


@pytest.mark.parametrize("pretended", [True, False])
def test_a_trim_returns_what_is_empty_and_kept_pages_keep_what_they_hold(pretended):
    c = returning(pretended=pretended)
    for tokens in (A16, B16, C16):
        c.insert(tokens)
    c.evict(16)
    assert trimmed(c) > 0
    assert c.holds_computed_kv(B16)
    assert c.holds_computed_kv(C16)
    assert (c.cached(B16), c.cached(C16)) == (16, 16)
    assert control_of(c).trims == 1
    assert control_of(c).trim_seconds > 0
    assert_sound(c)
    c.insert(A16)
    assert c.holds_computed_kv(A16)
    assert_sound(c)


def test_a_trim_of_an_empty_cache_leaves_frame_0():
    c = returning(pretended=False)
    c.insert(run(1000, 100))
    c.reset()
    assert trimmed(c) == 12
    assert residency(c).backing.resident_bytes() == residency(c).backing.frame_bytes
    assert_sound(c)


def test_the_reserve_is_refilled_between_batches_a_frame_at_a_time_and_survives_trims():
    c = returning()
    control_of(c).set(RESERVE_FRAMES, 3)
    assert frames(c).startswith("#. .. -- -- --")
    while control_of(c).is_working:  # which keeps an idle server awake
        control_of(c).step()
    assert frames(c).startswith("#. .. .. .. --")
    c.insert(A16)
    for _ in range(3):
        control_of(c).step()
    assert frames(c).startswith("## ## #. .. .. .. --")
    assert trimmed(c) == 0
    control_of(c).set(RESERVE_FRAMES, 1)
    assert trimmed(c) == 2
    assert_sound(c)


def test_a_reserve_that_cannot_be_had_is_missed_and_nothing_else():
    c = returning()
    residency(c).backing.fail_next(1000)
    control_of(c).set(RESERVE_FRAMES, 3)
    control_of(c).step()
    assert residency(c).counts.commit_failures == 1
    assert_sound(c)


# idleness


@pytest.fixture
def clock(monkeypatch):
    """The control's clock, which tests move."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(
        control_module,
        "time",
        SimpleNamespace(monotonic=lambda: now.seconds, perf_counter=time.perf_counter, thread_time=time.thread_time),
    )
    return now


def test_an_idle_server_trims_once_after_its_seconds(clock):
    c = returning(idle_trim_seconds=5.0)
    due = []
    for second in range(12):
        clock.seconds = 1000.0 + second
        due.append(control_of(c).is_idle_trim_due(True))
    assert [second for second, is_due in enumerate(due) if is_due] == [5]


def test_work_in_between_starts_the_wait_anew(clock):
    control = control_of(returning(idle_trim_seconds=5.0))
    assert not control.is_idle_trim_due(True)
    clock.seconds += 4
    assert not control.is_idle_trim_due(False)
    clock.seconds += 4
    assert not control.is_idle_trim_due(True)
    clock.seconds += 4.9
    assert not control.is_idle_trim_due(True)
    clock.seconds += 0.1
    assert control.is_idle_trim_due(True)
    clock.seconds += 100
    assert not control.is_idle_trim_due(True)
    control.is_idle_trim_due(False)
    control.is_idle_trim_due(True)
    clock.seconds += 5
    assert control.is_idle_trim_due(True)


def test_a_new_number_of_seconds_counts_for_the_idleness_there_is(clock):
    control = control_of(returning(idle_trim_seconds=5.0))
    control.is_idle_trim_due(True)
    clock.seconds += 5
    assert control.is_idle_trim_due(True)
    control.set(IDLE_TRIM_SECONDS, 2.5)
    assert control.idle_trim_seconds == 2.5
    assert control.is_idle_trim_due(True)


def test_idleness_is_watched_where_memory_can_be_returned():
    control = control_of(returning(idle_trim_seconds=5.0))
    assert control.watches_idleness
    control.set(MODE, PLACE)
    assert not control.watches_idleness
    control.set(MODE, RETURN)
    control.set(IDLE_TRIM_SECONDS, 0)
    assert not control.watches_idleness
    assert not control_of(framed()).watches_idleness


def test_the_trim_rides_along_with_the_requests_of_rank_0(clock):
    c = returning(idle_trim_seconds=5.0)
    scheduler = SimpleNamespace(tree_cache=c.tree, is_fully_idle=lambda: True)
    assert scheduler_hooks._add_decisions(["r"], scheduler) == ["r"]
    clock.seconds += 5
    assert scheduler_hooks._add_decisions(["r"], scheduler) == ["r", IdleTrim()]
    scheduler.is_fully_idle = lambda: False
    assert scheduler_hooks._add_decisions(["r"], scheduler) == ["r"]
    assert scheduler_hooks._add_decisions(["r"], SimpleNamespace(tree_cache=None)) == ["r"]


# modes


def test_a_lower_mode_returns_nothing_more_and_what_was_returned_comes_back_as_needed():
    c = returning(max_resident_bytes=4 * FRAME, reserve_frames=1)
    control = control_of(c)
    control.set(MODE, OBSERVE)
    assert (trimmed(c), residency(c).max_frames) == (0, None)
    c.insert(run(1000, 60))
    assert evicted(c) == 0
    assert residency(c).committed_frames == 8
    c.evict(60)
    control.step()
    assert (trimmed(c), residency(c).committed_frames) == (0, 8)
    assert_sound(c)
    control.set(MODE, RETURN)
    assert (residency(c).max_frames, residency(c).committed_frames) == (4, 4)
    assert_sound(c)


@pytest.mark.parametrize(("mode", "rule"), [(OBSERVE, "StockPlacement"), (PLACE, "PackPlacement")])
def test_every_mode_places_by_its_rule(mode, rule):
    c = returning()
    c.insert(A16)
    control_of(c).set(MODE, mode)
    assert type(c.allocator.store.placement).__name__ == rule
    assert residency(c).placement is c.allocator.store.placement
    c.insert(B16)
    assert_sound(c)


def test_a_placement_that_was_asked_for_stays_in_every_mode():
    c = returning(placement="stock")
    for mode in (OBSERVE, PLACE, RETURN):
        control_of(c).set(MODE, mode)
        assert type(c.allocator.store.placement).__name__ == "StockPlacement"


def test_a_mode_is_raised_no_higher_than_the_server_started_in():
    c = framed()
    assert control_of(c).highest_mode == OBSERVE
    assert "out of the range [0, 0]" in control_of(c).knobs()[MODE].complaint(MODE, RETURN)
    control_of(c).set(MODE, RETURN)
    assert control_of(c).mode == OBSERVE


# accounts that do not agree


def spoil(c):
    """Somebody writes to the last slot of the pool, whose frame was returned."""
    pool = c.kv_pools[0]
    pool.get_key_buffer(0)[127, 0, 0] = 1.0


def test_memory_beyond_the_committed_frames_degrades_to_observe(caplog):
    c = returning(pretended=False)
    c.insert(A16)
    spoil(c)
    control_of(c).trim()
    control = control_of(c)
    assert (control.mode, control.highest_mode) == (OBSERVE, OBSERVE)
    assert "something wrote to returned frames" in control.degraded
    assert "falling back to mode observe" in caplog.text
    assert control.state()["degraded"] == control.degraded
    assert c.holds_computed_kv(A16)
    c.insert(B16)
    assert c.holds_computed_kv(B16)
    assert c.tree.recount() == []


def test_a_degraded_server_is_not_raised_again_and_has_no_memory_knobs():
    c = returning(pretended=False)
    spoil(c)
    control_of(c).trim()
    knobs = control_of(c).knobs()
    assert set(knobs) == {MODE, MAX_CACHED_TOKENS}
    assert knobs[MODE].complaint(MODE, RETURN)
    control_of(c).set(MODE, RETURN)  # as when a trim of the same request degraded it
    assert control_of(c).mode == OBSERVE
    assert trimmed(c) == 0


def test_memory_that_cannot_be_given_back_degrades_and_the_server_goes_on():
    c = returning()
    c.insert(A16)
    c.evict(16)
    residency(c).backing.keep_next_memory = True
    assert trimmed(c) == 0
    assert "memory could not be given back" in control_of(c).degraded
    c.insert(run(7000, 100))
    assert c.tree.recount() == []


def test_a_rank_whose_accounts_agree_degrades_with_the_others():
    c = returning()
    control_of(c)._agree = lambda _: False
    control_of(c).trim()
    assert control_of(c).degraded == "another rank's accounts do not agree"


def test_ownership_in_doubt_stops_the_server_and_says_what_to_do():
    c = returning()
    c.insert(A16)
    c.allocator.ledger().held_bytes[31] = True
    with pytest.raises(OwnershipError) as stopped:
        control_of(c).trim()
    message = str(stopped.value)
    assert "can no longer say who owns which page" in message
    assert "frames [15] were returned while somebody holds their pages" in message
    assert "RADIX_PAGES_MODE=observe" in message
    assert any("frames [15]" in found for found in c.tree.recount())


# knobs


def test_ranges_follow_the_pool_and_each_other():
    c = returning(reserve_frames=2, max_resident_bytes=8 * FRAME + 5)
    knobs = control_of(c).knobs()
    assert knobs[MODE] == Knob(RETURN, 0, RETURN)
    assert knobs[MAX_CACHED_TOKENS] == Knob(NO_BOUND, 0, 124, can_be_unbounded=True)
    assert knobs[MAX_RESIDENT_BYTES] == Knob(8 * FRAME + 5, 4 * FRAME, 16 * FRAME, can_be_unbounded=True)
    assert knobs[RESERVE_FRAMES] == Knob(2, 0, 6)
    assert knobs[IDLE_TRIM_SECONDS] == Knob(30.0, 0, 86_400, is_whole=False)
    assert knobs[TRIM] == Knob(0, 1, 1)
    control_of(c).set(MAX_RESIDENT_BYTES, NO_BOUND)
    assert control_of(c).knobs()[RESERVE_FRAMES].maximum == 14


def test_every_value_at_the_end_of_a_range_can_be_set():
    for name, knob in control_of(returning()).knobs().items():
        ends = (knob.minimum, knob.maximum, *[NO_BOUND] * knob.can_be_unbounded)
        for value in ends:
            c = returning()
            c.insert(A16)
            assert knob.complaint(name, value) == ""
            control_of(c).set(name, value)
            c.insert(run(5000, 7))
            control_of(c).step()
            assert_sound(c)


def handlers_of(c, waiting=()):
    """What `/set_internal_state` would look at, and the requests whose answers were bounded anew."""
    bounded = []
    scheduler = SimpleNamespace(
        tree_cache=c and c.tree, waiting_queue=list(waiting), init_req_max_new_tokens=bounded.append
    )
    return scheduler_hooks._add_knobs({"stock": None}, SimpleNamespace(scheduler=scheduler)), bounded


def test_knobs_stand_beside_sglangs_own_and_refusals_are_sglangs():
    c = returning()
    handlers, bounded = handlers_of(c, ["waits"])
    assert set(handlers) == {"stock", *control_of(c).knobs()}
    with pytest.raises(UpdateRejected, match=rf"{RESERVE_FRAMES}=15 is out of the range \[0, 14\]"):
        handlers[RESERVE_FRAMES].validate(RESERVE_FRAMES, 15)
    handlers[RESERVE_FRAMES].validate(RESERVE_FRAMES, 3)
    assert handlers[RESERVE_FRAMES].apply(RESERVE_FRAMES, 3) is None
    assert residency(c).reserve_frames == 3
    assert bounded == []
    handlers[MAX_RESIDENT_BYTES].apply(MAX_RESIDENT_BYTES, 6 * FRAME)
    assert bounded == ["waits"]


def test_a_server_with_another_cache_has_sglangs_knobs_alone():
    assert handlers_of(None)[0] == {"stock": None}


def test_before_each_batch_the_bounds_are_kept():
    c = returning(max_cached_tokens=0)
    c.insert(A16)
    scheduler_hooks._step(SimpleNamespace(tree_cache=c.tree))
    assert c.sizes.evictable == 0
    scheduler_hooks._step(SimpleNamespace())


def test_releasing_memory_flushes_as_sglang_does_and_returns_what_is_empty():
    c = returning(pretended=False)
    c.insert(A16)
    updater = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=c.tree, token_to_kv_pool_allocator=c.allocator))

    def release(updater, request):
        torch.get_device_module().synchronize()
        c.reset()
        return f"released {request}"

    assert scheduler_hooks._release(release, updater, "all") == "released all"
    assert residency(c).committed_frames == 1
    assert_sound(c)


# reports


def test_the_state_tells_mode_memory_and_knobs():
    c = returning(pretended=False)
    c.insert(A16)
    c.evict(8)
    state = c.tree.state()
    memory = state["memory"]
    frame = memory["frame_bytes"]
    mapping = residency(c).backing.mapping
    assert (state["mode"], state["highest_mode"], state["degraded"]) == ("return", "return", "")
    assert (state["backing"], state["cached_tokens"], state["capped_tokens"]) == ("mmap", 8, 0)
    assert memory["region"] == [mapping.start, mapping.end]
    assert (memory["total_bytes"], memory["committed_frames"]) == (16 * frame, 3)
    assert memory["resident_bytes"] == memory["committed_bytes"] == 3 * frame
    assert (memory["returned_frames"], memory["returned_bytes"]) == (13, 13 * frame)
    assert memory["process_bytes"] > memory["resident_bytes"]
    assert state["knobs"][MODE] == {"value": RETURN, "minimum": 0, "maximum": RETURN}
    assert state["frame_map"]["cells"].count("-") == 13


def test_a_server_without_a_backing_tells_of_no_memory():
    c = framed(page_size=4, pool_tokens=64)
    state = c.tree.state()
    assert (state["mode"], state["backing"], state["memory"]) == ("observe", "none", None)
    assert set(state["knobs"]) == {MODE, MAX_CACHED_TOKENS}
    control_of(c).trim()
    control_of(c).step()
    assert control_of(c).trims == 0


def test_sglangs_own_allocator_brings_no_control():
    assert caches.build(OURS).tree.control is None


def test_the_map_shows_returned_frames():
    c = returning(pool_tokens=60)
    c.insert(A16)
    assert c.tree.state()["frame_map"] == {"frames_per_cell": 1, "cells": "##3-----"}


@pytest.fixture
def metrics(monkeypatch):
    """Metrics of a rank, and a function that reads a sample; nothing stays registered."""
    registry = prometheus_client.REGISTRY
    before = set(registry._collector_to_names)
    made = MemoryMetrics({"tp_rank": "0"})
    yield made, lambda name: registry.get_sample_value(f"radix_pages:{name}", {"tp_rank": "0"})
    for collector in set(registry._collector_to_names) - before:
        registry.unregister(collector)


def test_metrics_report_gauges_of_now_and_totals_since_start(metrics, clock):
    made, sample = metrics
    c = returning(reserve_frames=1, max_resident_bytes=8 * FRAME)
    control = control_of(c)
    control._metrics = made
    c.insert(run(1000, 40))
    c.evict(40)
    control.trim()
    assert sample("mode") == RETURN
    assert sample("degraded") == 0
    assert sample("committed_bytes") == sample("resident_bytes") == 2 * FRAME
    assert (sample("returned_frames_now"), sample("returned_bytes_now")) == (14, 14 * FRAME)
    assert (sample("returned_frames_total"), sample("returned_bytes_total")) == (4, 4 * FRAME)
    assert (sample("reserve_frames"), sample("ceiling_bytes")) == (1, 8 * FRAME)
    assert (sample("over_ceiling_frames"), sample("trim_seconds_count")) == (0, 1)
    residency(c).backing.fail_next()
    clock.seconds += 30
    assert c.allocator.alloc(60) is c.allocator.alloc(60) is None
    c.insert(run(2000, 60))
    c.insert(run(3000, 60))
    clock.seconds += 5
    control.step()
    assert sample("commit_failures_total") == 1
    assert sample("ceiling_refusals_total") == 1
    assert sample("regrown_frames_total") == 4
    control.report()
    assert sample("returned_frames_total") == 4


def test_only_what_comes_back_within_a_minute_counts_as_regrown(clock):
    c = returning()
    c.insert(A16)
    assert control_of(c)._regrown_frames == 0  # the first time is no return
    c.evict(16)
    control_of(c).trim()
    clock.seconds += 59.9
    c.insert(run(5000, 8))
    assert control_of(c)._regrown_frames == 1
    clock.seconds += 0.2
    c.insert(run(6000, 8))
    assert control_of(c)._regrown_frames == 1


def test_a_kits_cache_without_a_group_of_ranks_has_a_control_that_agrees_with_itself():
    c = returning()
    assert c.tree.tp_group is None
    assert isinstance(control_of(c), MemoryControl)
    assert residency(c).agree(True)
    assert not residency(c).agree(False)
    assert isinstance(c.allocator.store, HostPages)
