"""A backing made of counters: it can fail, be slow and complain, and knows what the memory of every slot holds."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence

import numpy as np

from radix_pages.backing import CommitError
from radix_pages.ledger import Frames
from radix_pages.units import Geometry

KIB, MIB = 1024, 1024 * 1024


def least_frame(page_bytes: Sequence[int], granule: int) -> int:
    """The least pages that fill whole granules in every buffer."""
    return math.lcm(*(granule // math.gcd(granule, size) for size in page_bytes))


class PretendBacking:
    """`radix_pages.backing.Backing` for a pool of `num_pages` pages and the padding page, all committed at first.

    `page_bytes` are the bytes of a page in each buffer; a page may straddle granules, a frame fills them. Memory is
    resident granule by granule. `contents` stands for what the slots hold: 0 where memory is new. Calls that break
    the protocol, and uses of memory that is not committed, are AssertionErrors.
    """

    def __init__(
        self, geometry: Geometry, num_pages: int, page_bytes: Sequence[int] = (KIB, KIB), granule: int = KIB
    ) -> None:
        self.geometry = geometry
        self.granule = granule
        self._frames = [geometry.pages_per_frame * size for size in page_bytes]
        if any(size % granule for size in self._frames):
            raise ValueError(f"frames of {self._frames} bytes do not fill granules of {granule}")
        self.frame_bytes = sum(self._frames)
        self.num_frames = geometry.frame_of(num_pages) + 1
        self._resident = [np.ones(-(-(num_pages + 1) * size // granule), dtype=np.bool_) for size in page_bytes]
        self.is_committed = np.ones(self.num_frames, dtype=np.bool_)
        self.contents = np.zeros(geometry.slots(num_pages + 1), dtype=np.int64)
        self.calls: list[tuple[str, list[int]]] = []
        """Every commit, whether it failed or not, and every decommit."""
        self.failures = 0
        self.delay_seconds = 0.0
        self.failing_next = 0
        self.keep_next_memory = False
        """The next decommit fails as a system call: nobody uses the frames any more, but their memory stays."""
        self._fail_every = 0
        self._chance = 0.0
        self._random = random.Random(0)

    # -- what goes wrong --

    def fail_next(self, commits: int = 1) -> None:
        """So many commits from now on fail, one after another; more than a test makes: all of them."""
        self.failing_next = commits

    def fail_every(self, commits: int) -> None:
        """Every so-manieth commit fails, counted from the first one; 0: none."""
        self._fail_every = commits

    def fail_at_random(self, chance: float, seed: int) -> None:
        """Each commit fails with this chance."""
        self._chance, self._random = chance, random.Random(seed)

    def _fails(self) -> bool:
        if self.failing_next:
            self.failing_next -= 1
            return True
        commits = sum(kind == "commit" for kind, _ in self.calls)
        return bool(self._fail_every and commits % self._fail_every == 0) or self._random.random() < self._chance

    # -- the protocol --

    def commit(self, frames: Frames) -> None:
        self._look_at(frames)
        twice = frames[self.is_committed[frames]].tolist()
        assert not twice, f"frames {twice} are committed already"
        self.calls.append(("commit", frames.tolist()))
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        if self._fails():
            self.failures += 1
            raise CommitError(f"pretended: no memory for frames {frames.tolist()}")
        self.is_committed[frames] = True
        self._mark(frames, resident=True)

    def decommit(self, frames: Frames) -> None:
        self._look_at(frames)
        twice = frames[~self.is_committed[frames]].tolist()
        assert not twice, f"frames {twice} have no memory to give back"
        self.calls.append(("decommit", frames.tolist()))
        self.is_committed[frames] = False
        if self.keep_next_memory:
            self.keep_next_memory = False
            raise OSError("pretended: the memory stays")
        self._mark(frames, resident=False)
        for frame in frames.tolist():
            self.contents[self._slots_of(frame)] = 0

    def bytes_of(self, frames: Frames) -> int:
        return sum(
            self.granule * len(granules[self._granules(frame, size)])
            for granules, size in zip(self._resident, self._frames, strict=True)
            for frame in frames.tolist()
        )

    def resident_bytes(self) -> int:
        return self.granule * sum(int(granules.sum()) for granules in self._resident)

    # -- memory --

    def write(self, page: int, marks: Sequence[int] | int) -> None:
        """Leave `marks`, one a slot, in the slots of `page`."""
        self.contents[self._used(page)] = marks

    def read(self, page: int) -> list[int]:
        return self.contents[self._used(page)].tolist()

    def stray_write(self, frame: int) -> None:
        """Somebody writes to the first page of `frame` though it has no memory: the system makes some resident."""
        assert not self.is_committed[frame]
        for granules, size in zip(self._resident, self._frames, strict=True):
            granules[self._granules(frame, size).start] = True

    def _used(self, page: int) -> slice:
        frame = self.geometry.frame_of(page)
        assert self.is_committed[frame], f"page {page} is used, but its frame {frame} has no memory"
        return slice(self.geometry.first_slot(page), self.geometry.first_slot(page + 1))

    def _slots_of(self, frame: int) -> slice:
        first, stop = self.geometry.first_page(frame), self.geometry.first_page(frame + 1)
        return slice(self.geometry.first_slot(first), self.geometry.first_slot(stop))

    def _granules(self, frame: int, frame_bytes: int) -> slice:
        return slice(frame * frame_bytes // self.granule, (frame + 1) * frame_bytes // self.granule)

    def _mark(self, frames: Frames, *, resident: bool) -> None:
        for granules, size in zip(self._resident, self._frames, strict=True):
            for frame in frames.tolist():
                granules[self._granules(frame, size)] = resident

    def _look_at(self, frames: Frames) -> None:
        assert isinstance(frames, np.ndarray)
        assert frames.dtype.kind == "i"
        named = frames.tolist()
        assert named, "a call that names no frame"
        assert all(one < other for one, other in itertools.pairwise(named)), f"{named} do not ascend"
        assert 0 <= named[0] <= named[-1] < self.num_frames, (
            f"{named} are not among frames 0 to {self.num_frames - 1}"
        )
