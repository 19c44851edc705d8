"""One thing a step, and no more of it than the budget allows: what a batch waits for while memory is worked on.

As in `test_bounds`, a frame is two pages of four tokens and a pool has 16 frames, 124 tokens.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager

import pytest

from radix_pages.residency import Residency
from radix_pages_sglang import convert
from radix_pages_sglang.config import MODES
from radix_pages_sglang.knobs import FREE_FRAMES, MAX_RESIDENT_BYTES, MODE, NO_BOUND, RESERVE_FRAMES, TRIM
from radix_pages_sglang.moving import PoolMover, Reclaimer, returns_in
from tests.adapter import caches
from tests.adapter.caches import Request, run
from tests.adapter.returning import FRAME, assert_sound, control_of, residency
from tests.adapter.test_moving import work
from tests.core.test_residency import drawn

pytestmark = pytest.mark.usefixtures("published_config")

RETURNING = pytest.mark.parametrize("mode", ["return", "move"])


def emptied(mode, *, returns_per_slice, is_serving=True, **options):
    """A cache of which twelve frames are empty and have memory, and a request that runs, if it is serving."""
    c = caches.returning(pool_tokens=124, pretended=True, mode=mode, returns_per_slice=returns_per_slice, **options)
    request = Request(c, run(9000, 12)).admit().prefill() if is_serving else None
    c.insert(run(1000, 96))
    c.evict(96)
    residency(c).backing.calls.clear()
    assert residency(c).num_empty_frames >= 12
    return c, request


def committed_after_each_step(c):
    committed = []
    while control_of(c).is_working:
        control_of(c).step()
        committed.append(residency(c).committed_frames)
        assert len(committed) < 100
    return committed


def sizes_of_returns(c):
    return [len(called) for kind, called in residency(c).backing.calls if kind == "decommit"]


@RETURNING
def test_a_trim_gives_back_no_more_frames_a_step_than_the_budget_allows(mode):
    c, request = emptied(mode, returns_per_slice=5)
    empty = residency(c).num_empty_frames
    control_of(c).trim()
    work(c)
    assert sizes_of_returns(c) == [5, 5, empty - 10]
    assert residency(c).num_empty_frames == 0
    assert control_of(c).trims == 1
    request.finish()
    assert_sound(c)


@RETURNING
def test_a_trim_is_counted_with_its_last_slice(mode):
    c, _ = emptied(mode, returns_per_slice=1)
    control_of(c).trim()
    while residency(c).num_empty_frames:
        assert control_of(c).trims == 0
        assert control_of(c).is_working
        control_of(c).step()
    work(c)
    assert control_of(c).trims == 1
    assert control_of(c).trim_seconds > 0


@RETURNING
def test_an_idle_server_gives_everything_back_at_once(mode):
    c, _ = emptied(mode, returns_per_slice=1, is_serving=False)
    empty = residency(c).num_empty_frames
    control_of(c).trim()
    work(c)
    assert sizes_of_returns(c) == [empty]


@RETURNING
def test_a_trim_in_slices_leaves_the_reserve(mode):
    c, _ = emptied(mode, returns_per_slice=2, reserve_frames=3)
    control_of(c).trim()
    work(c)
    assert residency(c).num_empty_frames == 3
    assert max(sizes_of_returns(c)) == 2


@RETURNING
def test_what_comes_free_while_frames_go_back_is_left_to_the_next_trim(mode):
    """A server whose frames come and go all the time would never end one."""
    c, _ = emptied(mode, returns_per_slice=1)
    empty = residency(c).num_empty_frames
    control_of(c).trim()
    control_of(c).step()
    for number in range(3 * empty):
        c.insert(run(2000 + 100 * number, 8))
        c.evict(8)
        control_of(c).step()
    assert control_of(c).trims == 1
    assert sum(sizes_of_returns(c)) <= empty


@RETURNING
def test_a_ceiling_that_is_lowered_under_load_is_reached_in_slices(mode):
    c, request = emptied(mode, returns_per_slice=3)
    control_of(c).max_resident_bytes = 6 * FRAME
    control_of(c)._set_bounds()
    control_of(c).step()
    committed = [residency(c).committed_frames, *committed_after_each_step(c)]
    assert committed[-1] == 6
    assert max(sizes_of_returns(c)) == 3
    request.finish()
    assert_sound(c)


@RETURNING
def test_a_ceiling_below_what_is_cached_is_reached_under_load_without_another_request(mode):
    c, _ = emptied(mode, returns_per_slice=1)
    for number in range(6):
        c.insert(run(2000 + 100 * number, 8))
    control_of(c).max_resident_bytes = 4 * FRAME
    control_of(c)._set_bounds()
    control_of(c).step()
    assert committed_after_each_step(c)[-1] == 4
    assert max(sizes_of_returns(c)) == 1


@RETURNING
def test_lowering_the_mode_ends_a_return(mode):
    c, _ = emptied(mode, returns_per_slice=1)
    control = control_of(c)
    control.trim()
    control.step()
    control.step()
    control.set(MODE, MODES.index("place"))
    assert not control.is_working
    committed = residency(c).committed_frames
    for _ in range(20):
        control.step()
    assert residency(c).committed_frames == committed
    assert control.trims == 0


@RETURNING
def test_a_return_that_the_system_refuses_half_way_ends_there(mode):
    c, _ = emptied(mode, returns_per_slice=2)
    control = control_of(c)
    control.trim()
    while not sizes_of_returns(c):
        control.step()
    residency(c).backing.keep_next_memory = True
    work(c)
    assert "memory could not be given back" in control.degraded
    assert sizes_of_returns(c) == [2, 2]
    assert control.trims == 1


def test_frames_for_a_neighbour_go_back_in_slices():
    c, request = emptied("move", returns_per_slice=2)
    control_of(c).set(FREE_FRAMES, 10)
    work(c)
    assert residency(c).ledger.num_returned_frames == 10
    assert max(sizes_of_returns(c)) == 2
    request.finish()
    assert_sound(c)


def test_once_more_than_an_eighth_lacks_all_of_it_is_made_up_though_what_is_empty_leaves_less():
    """Fourteen frames are held by single pages, eleven wanted; returning the empty ones leaves one that lacks."""
    c = caches.returning(pool_tokens=124, pretended=True, mode="move", placement="stock")
    for number in range(12):
        c.insert(run(100 * number, 4))
    for number in range(0, 12, 2):
        c.match(run(100 * number, 4))
    c.evict(24)
    residency(c).grow(2 * 6)
    empty, committed = residency(c).num_empty_frames, residency(c).committed_frames
    target = residency(c).ledger.num_frames - committed + empty + 1
    assert empty > target // 8
    control_of(c).set(FREE_FRAMES, target)
    work(c)
    assert residency(c).ledger.num_returned_frames == target
    assert control_of(c)._reclaimer.counts.plans == 1


def test_a_target_that_cannot_be_met_rests_although_frames_come_and_go():
    """Requests hold what the neighbour wants, and one more takes a frame and gives it back at every step."""
    c = caches.returning(pool_tokens=124, pretended=True, mode="move", free_frames=10)
    held = [Request(c, run(1000 * (1 + number), 8)).admit().prefill() for number in range(8)]
    residency(c).backing.calls.clear()
    for number in range(300):
        request = Request(c, run(20_000 + 100 * number, 8)).admit().prefill()
        request.abort()
        c.evict(c.sizes.evictable)
        control_of(c).step()
    assert control_of(c)._reclaimer.counts.plans > 0
    assert len(sizes_of_returns(c)) < 40
    assert len(held) == 8


def test_a_reserve_and_frames_for_a_neighbour_do_not_take_from_each_other_in_circles():
    c, _ = emptied("move", returns_per_slice=1000, reserve_frames=4)
    c.insert(run(2000, 16))
    control_of(c).set(FREE_FRAMES, 11)
    work(c)
    residency(c).backing.calls.clear()
    for _ in range(200):
        control_of(c).step()
    assert residency(c).backing.calls == []
    assert not control_of(c).is_working


def test_a_step_does_one_thing_at_most_and_no_more_of_it_than_the_budget_allows(monkeypatch):
    """Plans, slices of moves, returns and commits ahead, through a random life with every bound set and lifted."""
    did = []

    def counted(owner, name, told):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            before = len(did)
            result = original(*args, **kwargs)
            if (size := told(args, result)) is not None:
                did[before:] = [(name, size)]
            return result

        monkeypatch.setattr(owner, name, call)

    counted(Reclaimer, "_begin", lambda args, moves: 0)
    counted(PoolMover, "copy", lambda args, _: len(args[1]))
    counted(Residency, "trim", lambda args, returned: returned or None)
    counted(Residency, "refill_reserve", lambda args, _: None)
    counted(Residency, "_commit", lambda args, _: len(args[1]))
    c = caches.returning(pool_tokens=124, pretended=True, mode="move", returns_per_slice=2, placement="stock")
    control, numbers = control_of(c), random.Random(0)
    control._reclaimer.moves_per_slice = 3
    always = Request(c, run(9000, 12)).admit().prefill()
    seen = set()

    @contextmanager
    def one_step():
        did.clear()
        yield
        if did:
            assert len(did) == 1, did
            name, size = did[0]
            assert size <= {"_begin": 0, "copy": 3, "trim": 2, "_commit": 1}[name]
            seen.add(name)

    for _ in range(1500):
        if numbers.random() < 0.3:
            c.insert(run(100 * numbers.randrange(40), 4 * numbers.randint(1, 6)))
        if numbers.random() < 0.1:
            c.evict(4 * numbers.randint(1, 8))
        if numbers.random() < 0.1:
            name = numbers.choice([FREE_FRAMES, MAX_RESIDENT_BYTES, RESERVE_FRAMES, TRIM])
            values = {FREE_FRAMES: [0, 4, 10], MAX_RESIDENT_BYTES: [NO_BOUND, 8 * FRAME], TRIM: [1]}
            with one_step():  # a trim of mode move begins with the next step
                control.set(name, numbers.choice(values.get(name, [0, 1, 3])))
        with one_step():
            control.step()
    assert seen == {"_begin", "copy", "trim", "_commit"}
    always.finish()
    work(c)
    assert c.tree.recount() == []


# the budget


def slow(seconds):
    """A residency whose frames take so long to go back."""
    r = drawn("#### ---- ---- ----")
    decommit = r.backing.decommit

    def slowly(frames):
        time.sleep(seconds)
        decommit(frames)

    r.backing.decommit = slowly
    return r


def test_a_budget_is_as_many_frames_as_can_go_back_in_it_and_at_least_one():
    r = slow(0.02)
    assert 2 <= returns_in(r, 0.1) <= 5
    assert returns_in(r, 0.001) == 1
    assert r.backing.is_committed.tolist() == [True, False, False, False]


def test_where_a_frame_cannot_be_had_to_try_it_the_budget_is_one():
    r = drawn("#### ---- ----")
    r.backing.fail_next()
    assert returns_in(r, 1.0) == 1
    assert r.backing.is_committed.tolist() == [True, False, False]


def test_where_no_frame_is_unused_the_budget_is_one():
    r = drawn("#### .... ....")
    assert returns_in(r, 1.0) == 1
    assert r.backing.calls == []


@RETURNING
def test_every_rank_returns_as_much_in_a_slice_as_the_slowest(monkeypatch, mode):
    monkeypatch.setattr(convert, "least", lambda number, group: min(number, 3))
    c = caches.returning(pool_tokens=124, pretended=True, mode=mode, returns_per_slice=None)
    assert control_of(c).returns_per_slice == 3
    assert c.tree.state()["memory"]["returns_per_slice"] == 3
