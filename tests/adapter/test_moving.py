"""Pages that move so that frames come free: the mover over real buffers, the reclaimer, and the control in mode move.

As in `test_bounds`, a frame is two pages of four tokens and a pool has 16 frames, 124 tokens, unless said otherwise.
"""

from __future__ import annotations

import itertools
import random
import time
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
import torch

from radix_pages.frame_planner import CachedPages, FreeFrames, HeldFrames, plan_frames
from radix_pages.planner import Eviction
from radix_pages.reclaim import Moves
from radix_pages.units import Geometry, Span
from radix_pages_sglang import control as control_module
from radix_pages_sglang import convert, moving
from radix_pages_sglang.config import MODES
from radix_pages_sglang.control import CHECK_RANKS, LEAST_REST, MOST_REST, RanksDisagree
from radix_pages_sglang.knobs import FREE_FRAMES, MAX_CACHED_TOKENS, MAX_RESIDENT_BYTES, MODE, NO_BOUND, TRIM, Knob
from radix_pages_sglang.metrics import MemoryMetrics
from radix_pages_sglang.moving import MOST_REPLANS, PoolMover, digest, moves_in
from tests.adapter import caches
from tests.adapter.caches import Request, run
from tests.adapter.returning import FRAME, assert_sound, control_of, evicted, frames, residency

pytestmark = pytest.mark.usefixtures("published_config")

RETURN, MOVE = MODES.index("return"), MODES.index("move")


def moving_cache(*, pool_tokens=124, pretended=True, mode="move", **options):
    return caches.returning(pool_tokens=pool_tokens, pretended=pretended, mode=mode, **options)


def page_of(number):
    """A prompt of one page."""
    return run(1000 * number, 4)


def scattered(num_kept=6, **options):
    """One-page prompts, of which every other one was evicted: each frame keeps one page and a hole."""
    c = moving_cache(**options)
    for number in range(2 * num_kept):
        c.insert(page_of(number))
    for number in range(0, 2 * num_kept, 2):
        c.match(page_of(number))
    c.evict(4 * num_kept)
    c.tree.eviction_counts.evicted_tokens = 0
    assert c.sizes.evictable == 4 * num_kept
    return c


def reclaimer_of(c):
    return control_of(c)._reclaimer


def floor_of(c):
    """The fewest frames that can hold what is held; the padding page takes a place, too."""
    ledger = c.allocator.ledger()
    return -(-(ledger.num_held + 1) // ledger.geometry.pages_per_frame)


def work(c, most=400):
    """Step as long as another one is due at once; how many steps that took."""
    for num_steps in range(most):
        if not control_of(c).is_working:
            return num_steps
        control_of(c).step()
    raise AssertionError("the work does not end")


def keeps(c, numbers):
    return all(c.cached(page_of(n)) == 4 and c.holds_computed_kv(page_of(n)) for n in numbers)


# the mover


class Buffers:
    """Key and value buffers of two layers with a row a slot, all different."""

    def __init__(self, num_slots, seed=0):
        numbers = torch.Generator().manual_seed(seed)
        shape = (num_slots, 2, 3)
        self.k_buffer = [torch.randn(shape, generator=numbers) for _ in range(2)]
        self.v_buffer = [torch.randn(shape, generator=numbers) for _ in range(2)]

    def all(self):
        return [*self.k_buffer, *self.v_buffer]


def mover_of(page_size, num_pages=40):
    geometry = Geometry(page_size, pages_per_frame=4)
    buffers = Buffers((num_pages + 1) * page_size)
    return PoolMover(buffers, geometry), buffers


def payload_of(pages, page_size):
    return torch.tensor([page * page_size + place for page in pages for place in range(page_size)])


PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])


@PAGE_SIZES
def test_pages_of_nodes_stand_node_by_node_in_the_order_of_their_tokens(page_size):
    mover, _ = mover_of(page_size)
    pages = [[7], [3, 2, 30], [4, 5]]
    nodes = [SimpleNamespace(payload=payload_of(own, page_size)) for own in pages]
    found = mover.pages_of(nodes)
    assert (found.tolist(), found.dtype) == ([7, 3, 2, 30, 4, 5], np.int64)


@PAGE_SIZES
@pytest.mark.parametrize("seed", range(3))
def test_a_copy_moves_whole_pages_in_every_buffer_and_touches_no_other(page_size, seed):
    mover, buffers = mover_of(page_size)
    pages = random.Random(seed).sample(range(1, 41), 14)
    sources, targets = pages[:7], pages[7:]
    expected = [buffer.clone() for buffer in buffers.all()]
    for buffer in expected:
        for source, target in zip(sources, targets, strict=True):
            for place in range(page_size):
                buffer[target * page_size + place] = buffer[source * page_size + place]
    mover.copy(np.array(sources), np.array(targets))
    assert all(torch.equal(one, other) for one, other in zip(buffers.all(), expected, strict=True))


@PAGE_SIZES
@pytest.mark.parametrize("seed", range(5))
def test_a_repointed_payload_names_the_target_wherever_it_named_the_source(page_size, seed):
    mover, _ = mover_of(page_size)
    numbers = random.Random(seed)
    pages = numbers.sample(range(1, 21), numbers.randint(1, 9))
    sources = numbers.sample(range(1, 21), numbers.randint(1, 12))
    targets = numbers.sample(range(21, 41), len(sources))
    moved = dict(zip(sources, targets, strict=True))
    payload = payload_of(pages, page_size)
    before = payload.clone()
    result = mover.repointed(payload, np.array(sources), np.array(targets))
    assert torch.equal(result, payload_of([moved.get(page, page) for page in pages], page_size))
    assert result.dtype == torch.int64
    assert result.data_ptr() != payload.data_ptr()
    assert torch.equal(payload, before)


@pytest.mark.parametrize("pages_per_frame", [1, 2, 8, 64])
def test_the_budget_is_tried_on_memory_of_frame_0_and_is_at_least_a_page(pages_per_frame):
    """All other frames may have been returned."""
    tried = []
    mover = SimpleNamespace(copy=lambda sources, targets: tried.append((sources.tolist(), targets.tolist())))
    assert moves_in(mover, pages_per_frame, 1000, 1e-12) == 1
    assert moves_in(mover, pages_per_frame, 1000, 10.0) > 1
    for sources, targets in tried:
        assert len(sources) == len(set(targets)) == min(max(pages_per_frame // 2, 1), 8)
        assert pages_per_frame == 1 or not set(sources) & set(targets)
        assert max(sources + targets) < pages_per_frame


def test_a_larger_budget_moves_more_pages(monkeypatch):
    """The slowest of the calls that are timed, but for one hiccup, counts: 8 pages in 5 ms."""
    tries = [0.002, 0.005, 0.002, 0.7, *[0.003, 0.005] * 4]
    ticks = iter(itertools.accumulate(itertools.cycle([step for seconds in tries for step in (1.0, seconds)])))
    monkeypatch.setattr(moving, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    mover = SimpleNamespace(copy=lambda sources, targets: None)
    for seconds, num_pages in ((0.005, 8), (0.1, 160)):
        assert abs(moves_in(mover, 16, 1000, seconds) - num_pages) <= 1


@pytest.mark.parametrize("frame_pages", [1, 2])
def test_trying_the_budget_makes_no_returned_frame_resident(frame_pages):
    c = moving_cache(pretended=False, frame_pages=frame_pages)
    control_of(c).trim()
    work(c)
    assert control_of(c).degraded == ""
    assert_sound(c)


# the reclaimer


def planned(c, need):
    return plan_frames(c.core.leaves, c.allocator.ledger(), need, reclaimer_of(c)._mover.pages_of)


def free_frames(c):
    ledger = c.allocator.ledger()
    return int(((ledger.occupancy == 0) & ~ledger.is_returned).sum())


@pytest.mark.parametrize("moves_per_slice", [1, 2, 100])
def test_a_need_is_met_slice_by_slice(moves_per_slice):
    c = scattered()
    reclaimer = reclaimer_of(c)
    reclaimer.moves_per_slice = moves_per_slice
    before = free_frames(c)
    num_moves = len(planned(c, FreeFrames(before + 2)).sources)
    assert num_moves == 2
    reclaimer.aim(FreeFrames(before + 2))
    moved = []
    while not reclaimer.step():
        moved.append(reclaimer.counts.moved_pages)
    assert moved == [0, *range(moves_per_slice, num_moves, moves_per_slice)]  # the plan takes a step of its own
    assert (reclaimer.counts.moved_pages, reclaimer.counts.plans, reclaimer.counts.void_plans) == (num_moves, 1, 0)
    assert free_frames(c) == before + 2
    assert not reclaimer.is_working
    assert not reclaimer.fell_short
    assert reclaimer.step()
    assert keeps(c, range(0, 12, 2))
    assert_sound(c)


def test_what_cannot_be_met_falls_short():
    c = scattered()
    reclaimer = reclaimer_of(c)
    reclaimer.aim(HeldFrames(0))
    while not reclaimer.step():
        pass
    assert reclaimer.fell_short
    assert c.allocator.ledger().num_held_frames == 1
    assert_sound(c)


def test_a_plan_that_is_overtaken_is_made_anew_from_what_is_there():
    c = scattered()
    reclaimer = reclaimer_of(c)
    reclaimer.moves_per_slice = 1
    reclaimer.aim(CachedPages(100))
    assert not reclaimer.step()
    assert not reclaimer.step()
    c.match(page_of(0))
    c.evict(24)
    assert not reclaimer.step()
    assert reclaimer.counts.void_plans == 1
    assert reclaimer.step()
    assert (reclaimer.counts.plans, reclaimer.counts.moved_pages) == (2, 1)
    assert_sound(c)


def test_a_need_is_dropped_after_so_many_plans_in_a_row_were_overtaken(monkeypatch):
    class Overtaken(Moves):
        def step(self, most):
            self.is_stale = True
            return 0

    c = scattered()
    monkeypatch.setattr(moving, "Moves", Overtaken)
    reclaimer = reclaimer_of(c)
    reclaimer.aim(CachedPages(100))
    steps = 1
    while not reclaimer.step():
        steps += 1
    assert reclaimer.counts.plans == reclaimer.counts.void_plans == MOST_REPLANS + 1
    assert steps == 2 * reclaimer.counts.plans
    assert reclaimer.fell_short
    assert not reclaimer.is_working
    reclaimer.aim(CachedPages(100))
    assert [reclaimer.step() for _ in range(2 * MOST_REPLANS + 2)] == [False] * (2 * MOST_REPLANS + 1) + [True]


def test_dropped_work_leaves_what_has_moved_where_it_is():
    c = scattered()
    reclaimer = reclaimer_of(c)
    reclaimer.moves_per_slice = 1
    reclaimer.aim(CachedPages(100))
    reclaimer.step()
    reclaimer.step()
    reclaimer.drop()
    assert not reclaimer.is_working
    assert reclaimer.step()
    assert reclaimer.counts.moved_pages == 1
    assert keeps(c, range(0, 12, 2))
    assert_sound(c)


def test_equal_plans_have_one_digest_and_others_have_others():
    plans = [planned(scattered(), FreeFrames(20)) for _ in range(2)]
    assert digest(plans[0]) == digest(plans[1])
    plan = plans[0]
    assert len(plan.evictions) > 0
    moved = planned(scattered(), CachedPages(100))
    leaf = plan.evictions[0].leaf
    others = [
        moved,
        moved._replace(sources=moved.sources[::-1]),
        moved._replace(targets=moved.targets[::-1]),
        moved._replace(sources=moved.targets, targets=moved.sources),
        plan._replace(frames=plan.frames[:-1]),
        plan._replace(evictions=plan.evictions[1:]),
        plan._replace(evictions=plan.evictions[::-1]),
        plan._replace(evictions=(Eviction(leaf, Span(1, 2)), *plan.evictions[1:])),
    ]
    digests = [digest(one) for one in (plan, *others)]
    assert len(set(digests)) == len(digests)
    assert all(0 <= number < 1 << 63 for number in digests)


# ranks


def other_rank_says(monkeypatch, more):
    """A group in which another rank brings a number that is greater by `more` to every comparison."""

    def least(number, group):
        return min(number, number + more if number > 0 else number - more)

    monkeypatch.setattr(convert, "least", least)


def test_equal_plans_pass_and_different_ones_stop_the_server(monkeypatch):
    other_rank_says(monkeypatch, 0)
    control_module._same_everywhere(0xABC, None)
    for more in (-1, 1):
        other_rank_says(monkeypatch, more)
        with pytest.raises(RanksDisagree, match=r"planned different moves \(here abc\).*RADIX_PAGES_MODE=return"):
            control_module._same_everywhere(0xABC, None)


def test_plans_are_compared_where_it_was_asked_for(monkeypatch):
    monkeypatch.setenv(CHECK_RANKS, "1")
    c = scattered()
    other_rank_says(monkeypatch, 1)
    control_of(c).trim()
    before = frames(c)
    with pytest.raises(RanksDisagree):
        control_of(c).step()
    assert frames(c) == before
    monkeypatch.setenv(CHECK_RANKS, "0")
    c = scattered()
    control_of(c).trim()
    work(c)
    assert reclaimer_of(c).counts.moved_pages > 0


def test_every_rank_moves_as_much_in_a_slice_as_the_slowest(monkeypatch):
    monkeypatch.setattr(convert, "least", lambda number, group: min(number, 3))
    assert reclaimer_of(moving_cache()).moves_per_slice == 3


# trims


def test_what_came_free_goes_back_in_a_step_of_its_own():
    c = scattered()
    control_of(c).trim()
    committed = []
    while control_of(c).is_working:
        control_of(c).step()
        committed.append(residency(c).committed_frames)
    assert committed[:3] == [7, 7, 4]  # the plan, its moves, the return


def test_a_trim_that_is_asked_for_while_a_return_is_due_packs_before_it_returns():
    c = scattered()
    control_of(c).trim()
    control_of(c).step()
    control_of(c).step()
    c.evict(8)
    control_of(c).trim()
    assert control_of(c).trims == 0
    work(c)
    assert control_of(c).trims == 1
    assert residency(c).committed_frames == floor_of(c)
    assert_sound(c)


@pytest.mark.parametrize("pretended", [True, False])
@pytest.mark.parametrize("placement", [None, "stock"])
@pytest.mark.parametrize("moves_per_slice", [1, 100])
def test_a_trim_packs_what_is_cached_into_the_fewest_frames_and_returns_the_others(
    pretended, placement, moves_per_slice
):
    c = scattered(pretended=pretended, placement=placement)
    reclaimer_of(c).moves_per_slice = moves_per_slice
    assert residency(c).committed_frames == 7
    control_of(c).set(TRIM, 1)
    assert control_of(c).is_working
    work(c)
    assert residency(c).committed_frames == floor_of(c) == 4
    assert keeps(c, range(0, 12, 2))
    assert control_of(c).trims == 1
    assert_sound(c)


@pytest.mark.parametrize("page_size", [1, 16])
def test_pools_of_any_page_size_come_down_to_the_floor(page_size):
    c = moving_cache(page_size=page_size, frame_pages=4, pool_tokens=47 * page_size, pretended=False, layers=2)
    prompts = [run(1000 * number, 3 * page_size) for number in range(12)]
    for tokens in prompts:
        c.insert(tokens)
    for tokens in prompts[::2]:
        c.match(tokens)
    c.evict(19 * page_size)
    kept = [c.cached(tokens) for tokens in prompts]
    control_of(c).trim()
    work(c)
    assert residency(c).committed_frames == floor_of(c) == 5
    assert [c.cached(tokens) for tokens in prompts] == kept
    assert all(c.holds_computed_kv(tokens) for tokens in prompts)
    assert_sound(c, 47 * page_size)


def test_what_requests_hold_stays_and_its_holes_are_filled():
    c = scattered()
    request = Request(c, run(9000, 20)).admit().prefill()
    control_of(c).trim()
    work(c)
    assert residency(c).committed_frames == floor_of(c) == 6
    assert keeps(c, range(0, 12, 2))
    row = c.rows.req_to_token[request.req.kv.req_pool_idx, :20].long()
    assert c.marks_of(row) == caches.prefix_marks(run(9000, 20))
    request.abort()
    assert_sound(c)


def test_a_trim_evicts_nothing_even_if_requests_end_before_it_begins():
    c = scattered()
    request = Request(c, run(9000, 20)).admit().prefill().publish()
    control_of(c).trim()
    request.decode([1]).finish()
    cached = c.sizes.evictable
    work(c)
    assert c.sizes.evictable == cached
    assert_sound(c)


def test_a_step_that_works_on_a_trim_commits_no_frame_ahead_and_the_one_after_it_does():
    """Clearing a frame takes as long as a slice: requests would wait for both."""
    c = scattered()
    control, res = control_of(c), residency(c)
    control.trim()
    res.reserve_frames = 12
    committed = []
    while control.is_working:
        was_working = control._is_reclaiming
        before = res.counts.committed_again_total
        control.step()
        committed.append((was_working, res.counts.committed_again_total - before))
    assert (True, 0) in committed
    assert (False, 1) in committed
    assert {worked for worked, frames_ahead in committed if frames_ahead} == {False}
    assert_sound(c)


def test_the_reserve_survives_a_trim():
    c = scattered(reserve_frames=2)
    control_of(c).trim()
    work(c)
    assert residency(c).committed_frames == floor_of(c) + 2
    assert_sound(c)


def test_a_cap_evicts_first_and_packs_what_is_left():
    c = scattered()
    control_of(c).set(MAX_CACHED_TOKENS, 12)
    work(c)
    assert keeps(c, (6, 8, 10))
    assert (c.sizes.evictable, residency(c).committed_frames) == (12, 2)
    assert_sound(c)


# the ceiling


def test_a_lowered_ceiling_is_reached_with_fewer_evictions_than_without_moves():
    kept = {}
    for mode in ("return", "move"):
        c = scattered(mode=mode)
        control_of(c).set(MAX_RESIDENT_BYTES, 4 * FRAME)
        work(c)
        assert residency(c).committed_frames <= residency(c).max_frames == 4
        assert residency(c).over_ceiling_frames == 0
        kept[mode] = c.sizes.evictable
        assert_sound(c)
    assert kept["move"] == 24
    assert kept["return"] < 24


def test_a_ceiling_below_the_floor_evicts_what_was_used_longest_ago():
    c = scattered()
    control_of(c).set(MAX_RESIDENT_BYTES, 2 * FRAME)
    work(c)
    assert residency(c).committed_frames == 2
    assert keeps(c, (6, 8, 10))
    assert_sound(c)


def step_numbers_of_plans(c, num_steps):
    """In which of so many steps a plan was made."""
    made = []
    for number in range(num_steps):
        before = reclaimer_of(c).counts.plans
        control_of(c).step()
        if reclaimer_of(c).counts.plans > before:
            made.append(number)
    return made


def test_plans_that_fall_short_are_made_more_and_more_seldom_until_requests_end():
    c = scattered()
    reclaimer_of(c).moves_per_slice = 100
    requests = [Request(c, run(9000 + 100 * i, 16)).admit().prefill() for i in range(2)]
    control_of(c).max_resident_bytes = 2 * FRAME
    control_of(c)._set_bounds()
    made = step_numbers_of_plans(c, 12 * MOST_REST)
    gaps = [later - sooner for sooner, later in itertools.pairwise(made)]
    assert gaps == sorted(gaps)
    assert LEAST_REST <= gaps[0] < gaps[1] < gaps[-1]
    assert gaps[-1] <= MOST_REST + 2
    assert gaps[-1] == gaps[-2]
    assert not control_of(c).is_working  # an idle server may sleep
    assert residency(c).over_ceiling_frames > 0
    requests[0].abort()
    requests[1].abort()
    assert work(c) < LEAST_REST  # without waiting the rest out
    assert residency(c).over_ceiling_frames == 0
    assert_sound(c)


# frames for a neighbour


def test_allocations_evict_before_they_take_a_neighbours_frames():
    c = moving_cache(free_frames=8)
    for number in range(20):
        c.insert(page_of(number))
        control_of(c).step()
    assert residency(c).committed_frames == 8
    assert evicted(c) == 20
    assert_sound(c)


def test_they_are_taken_rather_than_an_allocation_fails_and_given_back_afterwards():
    c = moving_cache(free_frames=8)
    for number in range(15):
        c.insert(page_of(number))
    request = Request(c, run(9000, 100)).admit().prefill()
    assert residency(c).committed_frames == 13
    assert c.sizes.evictable == 0
    for _ in range(4):
        control_of(c).step()
    assert residency(c).committed_frames == 13
    request.decode([1]).finish()
    for _ in range(4):
        control_of(c).step()
    work(c)
    assert 8 <= residency(c).committed_frames <= 9  # an eighth may lack
    assert c.sizes.evictable >= 48
    assert_sound(c)


def test_admission_counts_on_them_only_when_nothing_can_be_evicted():
    c = moving_cache(free_frames=8)
    c.insert(run(1000, 40))
    assert c.allocator.commit_ahead(20, 40)
    assert residency(c).committed_frames <= 8
    assert c.allocator.commit_ahead(100, 40)
    assert residency(c).committed_frames > 8


def test_a_target_set_at_run_time_is_worked_off_by_moving_first():
    c = scattered()
    control_of(c).set(FREE_FRAMES, 12)
    work(c)
    assert residency(c).ledger.num_returned_frames == 12
    assert keeps(c, range(0, 12, 2))
    control_of(c).set(FREE_FRAMES, 14)
    work(c)
    assert residency(c).ledger.num_returned_frames >= 13
    assert_sound(c)
    control_of(c).set(FREE_FRAMES, 0)
    c.insert(run(5000, 100))
    assert residency(c).committed_frames > 12


def test_a_pool_at_its_target_does_not_copy_in_circles():
    c = scattered()
    control_of(c).set(FREE_FRAMES, 12)
    work(c)
    moved, plans = reclaimer_of(c).counts.moved_pages, reclaimer_of(c).counts.plans
    for _ in range(300):
        control_of(c).step()
    assert (reclaimer_of(c).counts.moved_pages, reclaimer_of(c).counts.plans) == (moved, plans)
    assert not control_of(c).is_working


# modes


def test_lowering_the_mode_drops_the_work():
    c = scattered()
    control = control_of(c)
    reclaimer_of(c).moves_per_slice = 1
    control.trim()
    control.step()
    control.step()
    control.set(MODE, RETURN)
    assert not control.is_working
    assert not reclaimer_of(c).is_working
    moved = reclaimer_of(c).counts.moved_pages
    assert moved == 1
    control.set(MODE, MOVE)
    work(c)
    control.set(FREE_FRAMES, 10)
    work(c)
    assert control.trims == 0
    assert residency(c).ledger.num_returned_frames >= 9
    assert keeps(c, range(0, 12, 2))
    assert_sound(c)


@pytest.mark.parametrize("placement", [None, "stock"])
def test_setting_the_mode_that_there_is_disturbs_no_work(placement):
    c = scattered(placement=placement)
    control = control_of(c)
    reclaimer_of(c).moves_per_slice = 1
    control.trim()
    control.step()
    control.set(MODE, MOVE)
    work(c)
    assert residency(c).committed_frames == floor_of(c)
    assert_sound(c)
    c.insert(run(5000, 40))
    assert keeps(c, range(0, 12, 2))
    assert_sound(c)


def test_a_lower_mode_spares_no_frames_for_a_neighbour():
    c = moving_cache(free_frames=8)
    control_of(c).set(MODE, RETURN)
    c.insert(run(1000, 100))
    assert (residency(c).free_frames, evicted(c)) == (0, 0)
    control_of(c).set(MODE, MOVE)
    work(c)
    assert residency(c).free_frames == 8
    assert residency(c).ledger.num_returned_frames >= 7
    assert_sound(c)


def test_a_refused_return_ends_the_work_for_good():
    c = scattered()
    c.evict(4)
    residency(c).backing.keep_next_memory = True
    control_of(c).set(FREE_FRAMES, 14)
    assert "memory could not be given back" in control_of(c).degraded
    plans = reclaimer_of(c).counts.plans
    for _ in range(20):
        control_of(c).step()
    assert not reclaimer_of(c).is_working
    assert reclaimer_of(c).counts.plans == plans == 0
    assert not control_of(c).is_working


def test_in_other_modes_nothing_moves():
    c = scattered(mode="return")
    assert reclaimer_of(c) is None
    control_of(c).trim()
    assert not control_of(c).is_working
    assert residency(c).committed_frames == 6
    assert FREE_FRAMES not in control_of(c).knobs()
    assert "moved_pages" not in control_of(c).state()["memory"]


# reports


def test_knobs_and_state_tell_of_moves():
    c = scattered()
    control = control_of(c)
    assert control.knobs()[FREE_FRAMES] == Knob(0, 0, 14)
    assert control.knobs()[MODE] == Knob(MOVE, 0, MOVE)
    control.set(FREE_FRAMES, 12)
    work(c)
    state = c.tree.state()
    memory = state["memory"]
    assert (state["mode"], state["highest_mode"]) == ("move", "move")
    assert state["knobs"][FREE_FRAMES] == {"value": 12, "minimum": 0, "maximum": 14}
    assert (memory["free_frames"], memory["moved_pages"], memory["plans"], memory["void_plans"]) == (12, 2, 1, 0)
    assert memory["moved_bytes"] == FRAME
    assert memory["moves_per_slice"] == reclaimer_of(c).moves_per_slice >= 1
    assert memory["move_seconds"] > 0
    assert memory["plan_seconds"] > 0


def test_the_longest_step_is_that_of_a_server_with_requests():
    c = scattered()
    control = control_of(c)
    control.set(FREE_FRAMES, 12)
    work(c)
    assert control.longest_step_seconds == control.longest_step_cpu_seconds == 0
    Request(c, run(9000, 16)).admit().prefill()
    control.step()
    memory = c.tree.state()["memory"]
    assert 0 < control.longest_step_seconds == memory["longest_step_seconds"]
    assert 0 < control.longest_step_cpu_seconds == memory["longest_step_cpu_seconds"]


def test_a_step_that_waits_for_a_core_is_long_by_the_clock_and_short_in_processor_time(monkeypatch):
    c = scattered()
    control = control_of(c)
    Request(c, run(9000, 16)).admit().prefill()
    monkeypatch.setattr(control, "_keep_memory", lambda residency: time.sleep(0.05))
    control.step()
    assert control.longest_step_cpu_seconds < 0.05 <= control.longest_step_seconds


def test_a_frame_committed_ahead_counts_apart_from_work_on_trims(monkeypatch):
    """How long the kernel takes to clear a frame hangs on the frame, not on the budget."""
    c = moving_cache(reserve_frames=3)
    control = control_of(c)
    Request(c, run(9000, 16)).admit().prefill()
    backing = residency(c).backing
    backing.delay_seconds = 0.02
    work(c)
    assert residency(c).num_empty_frames == 3
    assert control.longest_step_seconds < 0.02 <= control.longest_commit_seconds
    assert c.tree.state()["memory"]["longest_commit_seconds"] == control.longest_commit_seconds


def test_every_number_of_free_frames_can_be_set():
    for value in (0, 14):
        c = scattered()
        knob = control_of(c).knobs()[FREE_FRAMES]
        assert knob.complaint(FREE_FRAMES, value) == ""
        control_of(c).set(FREE_FRAMES, value)
        c.insert(run(5000, 7))
        control_of(c).step()
        assert_sound(c)
    assert knob.complaint(FREE_FRAMES, 15) == f"{FREE_FRAMES}=15 is out of the range [0, 14]."
    assert knob.complaint(FREE_FRAMES, NO_BOUND)


def test_metrics_count_what_was_moved():
    registry = prometheus_client.REGISTRY
    before = set(registry._collector_to_names)
    try:
        c = scattered()
        control_of(c)._metrics = MemoryMetrics({"tp_rank": "0"})
        control_of(c).set(FREE_FRAMES, 12)
        work(c)
        control_of(c).report()
        samples = {
            name: registry.get_sample_value(f"radix_pages:{name}", {"tp_rank": "0"})
            for name in ("mode", "moved_pages_total", "moved_bytes_total", "free_frames_target")
        }
    finally:
        for collector in set(registry._collector_to_names) - before:
            registry.unregister(collector)
    assert samples == {
        "mode": MOVE,
        "moved_pages_total": 2,
        "moved_bytes_total": FRAME,
        "free_frames_target": 12,
    }
