"""Ledger, placement, residency and backing together against a plain model: the set of returned frames and a dict
from every held page to what was written there.

The model is told what is asked and works out naively which frames have to go and come.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radix_pages.ledger import Ledger, LedgerError
from radix_pages.placement import PLACEMENTS
from radix_pages.residency import MOST_SKIPPED, Residency
from radix_pages.units import Geometry
from tests.core.backings import KIB, MIB, PretendBacking, least_frame

PAGE_SIZE = 4
SHAPES = {
    "1 page": ([KIB], KIB),
    "4 pages": ([KIB, 3 * KIB], 4 * KIB),
    "16 pages that straddle 2 MiB": ([128 * KIB, 3 * MIB // 8], 2 * MIB),
}
"""By name: bytes of a page in each buffer, and the granule."""


class MemoryAgainstASet(RuleBasedStateMachine):
    page_bytes, granule = SHAPES["4 pages"]

    @initialize(
        rule_name=st.sampled_from(sorted(PLACEMENTS)),
        num_frames=st.integers(2, 7),
        short=st.integers(0, 15),
        reserve=st.integers(0, 2),
        starts_returned=st.booleans(),
    )
    def start(self, rule_name: str, num_frames: int, short: int, reserve: int, starts_returned: bool) -> None:
        self.per_frame = least_frame(self.page_bytes, self.granule)
        self.num_pages = num_frames * self.per_frame - short % self.per_frame - 1  # without the padding page
        self.num_frames = num_frames
        geometry = Geometry(PAGE_SIZE, pages_per_frame=self.per_frame)
        self.ledger = Ledger(geometry, self.num_pages)
        self.backing = PretendBacking(geometry, self.num_pages, self.page_bytes, self.granule)
        self.others_fail = 0
        reserve = min(reserve, num_frames - 1)
        self.residency = Residency(
            PLACEMENTS[rule_name](self.ledger), self.backing, reserve_frames=reserve, agree=self.agree
        )
        self.marks: dict[int, list[int]] = {}
        self.returned: set[int] = set()
        self.came, self.went, self.failures = 0, 0, 0
        self.in_a_row, self.skip = 0, 0
        self.next_mark = itertools.count(1)
        if starts_returned:
            self.residency.start_returned()
            self.returned = set(range(1 + reserve, num_frames))

    # -- what the model works out --

    def agree(self, succeeded: bool) -> bool:
        """Another rank may have failed where this one did not."""
        if self.others_fail:
            self.others_fail -= 1
            return False
        return succeeded

    @property
    def placement(self):
        return self.residency.placement

    @property
    def will_fail(self) -> bool:
        return bool(self.backing.failing_next or self.others_fail)

    def pages_of(self, frame: int) -> list[int]:
        first = frame * self.per_frame
        return [page for page in range(first, first + self.per_frame) if 1 <= page <= self.num_pages]

    def size_of(self, frame: int) -> int:
        """Pages, the padding page among them."""
        return len(self.pages_of(frame)) + (frame == 0)

    def is_empty(self, frame: int) -> bool:
        return frame > 0 and not any(page in self.marks for page in self.pages_of(frame))

    def empty_with_memory(self) -> list[int]:
        return [f for f in range(self.num_frames) if self.is_empty(f) and f not in self.returned]

    def free_with_memory(self) -> list[int]:
        return [
            page
            for frame in range(self.num_frames)
            if frame not in self.returned
            for page in self.pages_of(frame)
            if page not in self.marks
        ]

    @property
    def num_committed(self) -> int:
        return self.num_frames - len(self.returned)

    def room_under_ceiling(self) -> int:
        most = self.residency.max_frames
        return self.num_frames if most is None else max(most - self.num_committed, 0)

    def expect_commit(self, frames: list[int]) -> bool:
        """The model's part of a commit; whether it works."""
        if not frames:
            return False
        if self.will_fail:
            self.failures += 1
            self.in_a_row += 1
            self.skip = min(2**self.in_a_row - 1, MOST_SKIPPED)
            return False
        self.in_a_row = 0
        self.came += len(frames)
        self.returned -= set(frames)
        return True

    def held_in(self, data, *, most: int) -> np.ndarray:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.marks)), min_size=1, max_size=most, unique=True))
        return np.array(pages, dtype=np.int64)

    def use(self, pages: list[int]) -> None:
        """Whoever was handed `pages` writes to them at once."""
        assert not set(pages) & self.marks.keys()
        for page in pages:
            assert page // self.per_frame not in self.returned
            self.marks[page] = [next(self.next_mark) for _ in range(PAGE_SIZE)]
            self.backing.write(page, self.marks[page])

    # -- pages --

    @rule(data=st.data(), num_pages=st.integers(1, 40), near_held=st.booleans())
    def take(self, data, num_pages: int, near_held: bool) -> None:
        free = self.free_with_memory()
        if num_pages > len(free):
            with pytest.raises(ValueError, match=f"asked for {num_pages} pages, {len(free)} are free"):
                self.placement.take(num_pages)
            return
        among = sorted(self.marks) if near_held else range(1, self.num_pages + 1)
        near = data.draw(st.sampled_from(among)) if among else None
        pages = self.placement.take(num_pages, near).tolist()
        assert len(pages) == num_pages
        self.use(pages)

    @rule(data=st.data())
    def take_one(self, data) -> None:
        if self.free_with_memory():
            near = data.draw(st.none() | st.integers(1, self.num_pages))
            self.use([self.placement.take_one(near)])

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def give(self, data) -> None:
        pages = self.held_in(data, most=12)
        empty_before = {f for f in range(self.num_frames) if self.is_empty(f)}
        emptied = self.placement.give(pages)
        for page in pages.tolist():
            del self.marks[page]
        assert set(emptied) == {f for f in range(self.num_frames) if self.is_empty(f)} - empty_before

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def give_all_of_some_frames(self, data) -> None:
        frames = data.draw(st.sets(st.sampled_from(sorted({page // self.per_frame for page in self.marks}))))
        pages = [page for page in self.marks if page // self.per_frame in frames]
        self.placement.give(np.array(pages, dtype=np.int64))
        for page in pages:
            del self.marks[page]

    @precondition(lambda self: self.returned)
    @rule(data=st.data(), others=st.integers(0, 10))
    def hold_a_page_without_memory(self, data, others: int) -> None:
        """The ledger refuses it, among few pages and among many."""
        frame = data.draw(st.sampled_from(sorted(self.returned)))
        page = data.draw(st.sampled_from(self.pages_of(frame)))
        pages = [*self.free_with_memory()[:others], page]
        with pytest.raises(LedgerError, match=f"frames {frame} were returned"):
            self.ledger.hold(np.array(pages))
        with pytest.raises(LedgerError, match=f"frames {frame} were returned"):
            self.ledger.hold_one(page)

    @rule(frame=st.integers(0, 7))
    def mark_a_frame_in_the_wrong_state(self, frame: int) -> None:
        frames = np.array([frame])
        if frame >= self.num_frames or frame in self.returned or not self.is_empty(frame):
            with pytest.raises(LedgerError, match=f"frames {frame} "):
                self.ledger.mark_returned(frames)
        if frame not in self.returned:
            with pytest.raises(LedgerError, match=f"frames {frame} "):
                self.ledger.mark_committed(frames)

    # -- frames --

    @rule(num_pages=st.integers(1, 60))
    def grow(self, num_pages: int) -> None:
        if self.skip:
            self.skip -= 1
            calls = len(self.backing.calls)
            assert not self.residency.grow(num_pages)
            assert len(self.backing.calls) == calls
            return
        frames: list[int] = []
        for frame in sorted(self.returned):
            if sum(map(self.size_of, frames)) < num_pages:
                frames.append(frame)
        refusals = self.residency.counts.ceiling_refusals
        allowed = frames[: self.room_under_ceiling()]
        gained = sum(map(self.size_of, allowed))
        worked = self.expect_commit(allowed)
        assert self.residency.grow(num_pages) is (worked and gained >= num_pages)
        assert self.residency.counts.ceiling_refusals == refusals + (allowed != frames)

    @rule()
    def refill_reserve(self) -> None:
        lacking = min(self.residency.reserve_frames - len(self.empty_with_memory()), self.room_under_ceiling())
        spare = max(len(self.returned) - self.residency.free_frames, 0)
        frames = sorted(self.returned)[:spare][: max(lacking, 0)]
        assert self.residency.lacking_reserve == (0 if self.in_a_row else len(frames))
        if not self.in_a_row:
            self.expect_commit(frames[:1])
        self.residency.refill_reserve()

    @rule(keep=st.none() | st.integers(0, 7), most=st.none() | st.integers(0, 3))
    def trim(self, keep: int | None, most: int | None) -> None:
        empty = self.empty_with_memory()
        if keep is None:
            gone = empty[self.residency.reserve_frames :]
        else:
            surplus = max(self.num_committed - keep, 0)
            gone = sorted(empty, reverse=True)[:surplus]
        gone = sorted(gone, reverse=True)[:most]
        self.returned |= set(gone)
        self.went += len(gone)
        assert self.residency.trim(keep, most) == len(gone)

    @rule(max_frames=st.none() | st.integers(2, 8))
    def set_ceiling(self, max_frames: int | None) -> None:
        self.residency.max_frames = max_frames

    @rule(reserve=st.integers(0, 3))
    def set_reserve(self, reserve: int) -> None:
        self.residency.reserve_frames = min(reserve, self.num_frames - 1)

    @rule(free=st.integers(0, 3))
    def set_free_frames(self, free: int) -> None:
        self.residency.free_frames = free

    # -- what others do --

    @rule(commits=st.integers(0, 8))
    def commits_fail_from_now_on(self, commits: int) -> None:
        self.backing.fail_next(commits)

    @precondition(lambda self: not self.backing.failing_next)
    @rule(commits=st.integers(1, 2))
    def commits_fail_on_another_rank(self, commits: int) -> None:
        self.others_fail = commits

    @rule(rule_name=st.sampled_from(sorted(PLACEMENTS)))
    def place_by_another_rule(self, rule_name: str) -> None:
        self.residency.placement = PLACEMENTS[rule_name](self.ledger)

    @rule()
    def clear(self) -> None:
        self.placement.clear()
        self.marks.clear()

    # -- what must hold after every step --

    @invariant()
    def the_same_frames_have_memory_for_everybody(self) -> None:
        if not hasattr(self, "residency"):
            return
        r = self.residency
        assert r.disagreements() == []
        assert r.overspent() == ""
        assert set(np.flatnonzero(self.ledger.is_returned).tolist()) == self.returned
        assert set(np.flatnonzero(~self.backing.is_committed).tolist()) == self.returned
        assert r.committed_frames == self.num_committed
        assert r.committed_bytes == self.backing.resident_bytes() == r.total_bytes - r.returned_bytes
        assert r.returned_bytes == self.backing.bytes_of(np.array(sorted(self.returned), dtype=np.int64))

    @invariant()
    def kept_pages_hold_what_was_written(self) -> None:
        if not hasattr(self, "residency"):
            return
        assert {page: self.backing.read(page) for page in self.marks} == self.marks

    @invariant()
    def pages_on_offer_are_free_and_have_memory(self) -> None:
        if not hasattr(self, "residency"):
            return
        free = self.free_with_memory()
        listed = self.placement.free_pages().tolist()
        without = [page for frame in sorted(self.returned) for page in self.pages_of(frame)]
        assert self.placement.num_free == len(free)
        assert sorted(listed[: len(free)]) == free
        assert sorted(listed[len(free) :]) == without
        assert self.ledger.num_returned_pages == len(without)

    @invariant()
    def bounds_are_what_naive_counting_says(self) -> None:
        if not hasattr(self, "residency"):
            return
        r, most = self.residency, self.residency.max_frames
        if most is None:
            assert (r.over_ceiling_frames, r.withheld_pages, r.most_pages) == (0, 0, self.num_pages)
            return
        assert r.over_ceiling_frames == max(self.num_committed - most, 0)
        out_of_reach = sorted(self.returned)[self.room_under_ceiling() :]
        assert r.withheld_pages == sum(map(self.size_of, out_of_reach))
        last = self.num_frames - 1
        # The last frame is committed last, so under a ceiling only if it is now.
        among = range(1, last if last in self.returned and most <= last else self.num_frames)
        assert r.most_pages == min(
            sum(map(self.size_of, (0, *others))) - 1
            for others in itertools.combinations(among, min(most, self.num_frames) - 1)
        )

    @invariant()
    def what_happened_was_counted(self) -> None:
        if not hasattr(self, "residency"):
            return
        counts = self.residency.counts
        assert (counts.returned_frames_total, counts.committed_again_total) == (self.went, self.came)
        assert counts.commit_failures == self.failures
        assert self.residency.is_failing == bool(self.in_a_row)


@pytest.mark.parametrize("shape", SHAPES)
def test_ledger_placement_and_backing_agree_after_every_step(shape):
    page_bytes, granule = SHAPES[shape]
    members = {"page_bytes": page_bytes, "granule": granule}
    run_state_machine_as_test(type("MemoryAgainstASet", (MemoryAgainstASet,), members))
