"""Residency: which frames have physical memory, and within which bounds. Decides about frames, never about pages.

A frame is committed, or returned while nobody holds one of its pages. Frames are committed when pages are wanted
(`grow`, lowest first) and given back when somebody asks for it (`trim`, highest first).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from radix_pages.backing import Backing, CommitError
from radix_pages.ledger import Frames, Ledger
from radix_pages.placement import Placement

MOST_SKIPPED = 63
"""After failed commits so many calls for growth pass at most before one tries again."""


@dataclass(slots=True)
class ResidencyCounts:
    """Totals since start. `ceiling_refusals` counts calls for growth that the ceiling cut short."""

    returned_frames_total: int = 0
    returned_bytes_total: int = 0
    committed_again_total: int = 0
    commit_failures: int = 0
    ceiling_refusals: int = 0


class Residency:
    """Commits and returns the frames of one pool.

    `reserve_frames` empty frames stay committed against regrowth and never count as returned; `max_frames` is the
    ceiling on committed frames, frame 0 and the reserve included (None: no ceiling). `free_frames` are wanted free
    for a neighbour: growth takes them only when nothing can be evicted instead. `agree` combines a success of this
    rank with the others' (every rank makes the same calls), so that a commit which fails on one fails on all.
    `on_return` and `on_commit` hear of frames afterwards, for reports.
    """

    def __init__(
        self,
        placement: Placement,
        backing: Backing,
        *,
        reserve_frames: int = 0,
        max_frames: int | None = None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self.placement = placement
        self.backing = backing
        self.reserve_frames = reserve_frames
        self.max_frames = max_frames
        self.free_frames = 0
        self.agree = agree
        self.counts = ResidencyCounts()
        self.total_bytes = backing.bytes_of(np.arange(self.ledger.num_frames))
        self.returned_bytes = 0
        self.on_return: Callable[[Frames], None] = _nobody_watches
        self.on_commit: Callable[[Frames], None] = _nobody_watches
        self._failures_in_a_row = 0
        self._skip = 0

    @property
    def ledger(self) -> Ledger:
        return self.placement.ledger

    @property
    def committed_frames(self) -> int:
        """Frames with memory, frame 0 included."""
        return self.ledger.num_frames - self.ledger.num_returned_frames

    @property
    def committed_bytes(self) -> int:
        return self.total_bytes - self.returned_bytes

    @property
    def num_empty_frames(self) -> int:
        """Frames with memory that nobody holds a page of: the reserve, and what a trim would return."""
        return len(self._empty_frames())

    @property
    def is_failing(self) -> bool:
        """Whether the last commit failed."""
        return self._failures_in_a_row > 0

    @property
    def over_ceiling_frames(self) -> int:
        """Committed frames beyond the ceiling: it was lowered, and something still holds them."""
        return 0 if self.max_frames is None else max(self.committed_frames - self.max_frames, 0)

    @property
    def withheld_pages(self) -> int:
        """Free pages that nobody can have now, because the ceiling keeps their frames from being committed."""
        if self.max_frames is None:
            return 0
        allowed = max(self.max_frames - self.committed_frames, 0)
        return max(self.ledger.num_returned_pages - allowed * self.ledger.geometry.pages_per_frame, 0)

    @property
    def most_pages(self) -> int:
        """Pages that can surely be held at once under the ceiling."""
        ledger = self.ledger
        if self.max_frames is None or self.max_frames >= ledger.num_frames:
            return ledger.num_pages
        # Under a ceiling the last frame, which may be short, is never committed: only a lowered one finds it so.
        short = 0 if ledger.is_returned[-1] else ledger.geometry.pages_per_frame - int(ledger.sizes[-1])
        return ledger.geometry.first_page(self.max_frames) - short - 1  # page 0 is SGLang's

    def start_returned(self) -> None:
        """For a pool nobody has used: only frame 0 and the reserve are committed. Raises CommitError."""
        every = np.arange(self.ledger.num_frames)
        self.backing.decommit(every)
        self.backing.commit(every[: 1 + self.reserve_frames])
        self._withdraw(every[1 + self.reserve_frames :])

    def grow(self, num_pages: int, *, spare_neighbour: bool = False) -> bool:
        """Commit frames until `num_pages` more pages are free; whether that many could be had.

        Never beyond the ceiling, and not into `free_frames` if the neighbour is to be spared. After a failed commit
        the next 1, 3, 7, ... calls do not try, because a failing commit may be slow and the scheduler comes back at
        every step.
        """
        if self._skip:
            self._skip -= 1
            return False
        ledger = self.ledger
        if not ledger.num_returned_frames:  # a full pool asks at every step
            return False
        wanted = self._returned_with(num_pages)
        if spare_neighbour and self.free_frames:
            wanted = wanted[: max(ledger.num_frames - self.free_frames - self.committed_frames, 0)]
        if self.max_frames is not None:
            allowed = wanted[: max(self.max_frames - self.committed_frames, 0)]
            self.counts.ceiling_refusals += len(allowed) < len(wanted)
            wanted = allowed
        if not len(wanted) or not self._commit(wanted):
            return False
        return int(ledger.sizes[wanted].sum()) >= num_pages

    @property
    def lacking_reserve(self) -> int:
        """Frames that the reserve lacks and could have now: within the ceiling, without what is kept free for a
        neighbour, and none while commits fail."""
        if not self.reserve_frames or self.is_failing:
            return 0
        spare = self.ledger.num_returned_frames - self.free_frames
        if self.max_frames is not None:
            spare = min(spare, self.max_frames - self.committed_frames)
        return max(min(self.reserve_frames - self.num_empty_frames, spare), 0)

    def refill_reserve(self) -> None:
        """Commit one frame ahead, between batches, where the reserve lacks some: no batch waits for all."""
        if self.lacking_reserve:
            self._commit(np.flatnonzero(self.ledger.is_returned)[:1])

    def trim(self, keep_committed: int | None = None, most: int | None = None) -> int:
        """Return empty frames, the highest first; how many that were.

        All but the reserve, or only until `keep_committed` frames are committed, with the reserve if need be; in
        either case no more than `most`, if that is given: the system takes its time over each.
        """
        surplus = self._empty_frames()
        if keep_committed is None:
            surplus = surplus[self.reserve_frames :]
        else:
            surplus = surplus[max(len(surplus) - max(self.committed_frames - keep_committed, 0), 0) :]
        if most is not None:
            surplus = surplus[max(len(surplus) - most, 0) :]
        if len(surplus):
            size = self._withdraw(surplus)
            self.backing.decommit(surplus)
            self.counts.returned_frames_total += len(surplus)
            self.counts.returned_bytes_total += size
            self.on_return(surplus)
        return len(surplus)

    def disagreements(self) -> list[str]:
        """Where ledger and placement contradict each other about frames: then nobody knows who owns a page."""
        ledger = self.ledger
        found = []
        frames = ledger.geometry.frame_of(np.flatnonzero(ledger.is_held))
        occupancy = np.bincount(frames, minlength=ledger.num_frames)
        if wrong := np.flatnonzero(occupancy != ledger.occupancy).tolist():
            found.append(f"frames {wrong[:8]} hold other numbers of pages than the ledger counts")
        if held := np.flatnonzero((occupancy > 0) & ledger.is_returned).tolist():
            found.append(f"frames {held[:8]} were returned while somebody holds their pages")
        free = ledger.num_pages - ledger.num_held - ledger.num_returned_pages
        if self.placement.num_free != free:
            found.append(f"{self.placement.num_free} pages are on offer, {free} are free and have memory")
        return found

    def overspent(self) -> str:
        """What the operating system counts beyond the committed frames, in a sentence; empty when it counts less.

        Pages that somebody holds are committed, so their contents are good all the same.
        """
        resident = self.backing.resident_bytes()
        if resident <= self.committed_bytes:
            return ""
        return (
            f"the pool occupies {resident} bytes, its committed frames take {self.committed_bytes}: "
            "something wrote to returned frames, or the system counts other memory with them"
        )

    def _returned_with(self, num_pages: int) -> Frames:
        """The lowest returned frames that have `num_pages` pages together; all when there are fewer."""
        returned = np.flatnonzero(self.ledger.is_returned)
        count = int(np.searchsorted(np.cumsum(self.ledger.sizes[returned]), num_pages)) + 1
        return returned[:count]

    def _empty_frames(self) -> Frames:
        ledger = self.ledger
        return np.flatnonzero((ledger.occupancy == 0) & ~ledger.is_returned)

    def _withdraw(self, frames: Frames) -> int:
        """Nobody gets pages of `frames` any more; the bytes that are to be given back."""
        self.placement.withdraw(frames)
        size = self.backing.bytes_of(frames)
        self.returned_bytes += size
        return size

    def _commit(self, frames: Frames) -> bool:
        try:
            self.backing.commit(frames)
            succeeded = True
        except CommitError:
            succeeded = False
        if not self.agree(succeeded):
            if succeeded:  # it failed on another rank, and ranks stay alike
                with suppress(OSError):  # memory that stays all the same is `overspent`
                    self.backing.decommit(frames)
            self.counts.commit_failures += 1
            self._failures_in_a_row += 1
            self._skip = min(2**self._failures_in_a_row - 1, MOST_SKIPPED)
            return False
        self._failures_in_a_row = 0
        self.counts.committed_again_total += len(frames)
        self.placement.restore(frames)
        self.returned_bytes -= self.backing.bytes_of(frames)
        self.on_commit(frames)
        return True


def _nobody_watches(frames: Frames) -> None:
    pass
