"""Which free pages to hand out. A placement owns the choice, the ledger the facts; both change together here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from radix_pages.ledger import Ledger, Pages


class Placement(Protocol):
    """Hands out and takes back pages, and keeps the ledger's record of it."""

    ledger: Ledger

    def take(self, num_pages: int, near: int | None = None) -> Pages:
        """Hold `num_pages` free pages, in the order to use them; `near` is a page of the same request, if known.

        Raises ValueError when fewer are free: the caller asks `num_free` first.
        """

    def give(self, pages: Pages) -> list[int]:
        """Release `pages` and return the frames this empties. Raises LedgerError as `Ledger.release`."""

    @property
    def num_free(self) -> int:
        """Free pages."""

    def free_pages(self) -> Pages:
        """Every free page, those that `take` would hand out first in front."""

    def clear(self) -> None:
        """Every page is free."""


class StockPlacement:
    """SGLang's order: what was freed last is handed out first, whatever frame it is in."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.clear()

    def clear(self) -> None:
        self.ledger.clear()
        self._stack = list(range(self.ledger.num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._stack)

    def free_pages(self) -> Pages:
        return np.array(self._stack[::-1], dtype=np.int64)

    def take(self, num_pages: int, near: int | None = None) -> Pages:
        _require(num_pages, self.num_free)
        if not num_pages:
            return np.empty(0, dtype=np.int64)
        pages = np.array(self._stack[: -num_pages - 1 : -1], dtype=np.int64)
        self.ledger.hold(pages)
        del self._stack[-num_pages:]
        return pages

    def give(self, pages: Pages) -> list[int]:
        emptied = self.ledger.release(pages)
        self._stack += pages[::-1].tolist()
        return emptied


class PackPlacement:
    """New pages go into frames that somebody holds already, the fullest one that has room for all of them first.

    Frames are kept in buckets by their number of free pages, so a choice looks at no more than
    `pages_per_frame` buckets. Buckets keep the order in which frames entered them: equal calls give equal pages.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._per_frame = ledger.geometry.pages_per_frame
        self.clear()

    def clear(self) -> None:
        self.ledger.clear()
        ledger, geometry = self.ledger, self.ledger.geometry
        ends = [min(geometry.first_page(frame + 1), ledger.num_pages + 1) for frame in range(ledger.num_frames)]
        self._free = [end - max(geometry.first_page(frame), 1) for frame, end in enumerate(ends)]
        self._buckets: list[dict[int, None]] = [{} for _ in range(self._per_frame + 1)]
        self._empty: dict[int, None] = dict.fromkeys(range(1, ledger.num_frames))
        if self._free[0]:
            self._buckets[self._free[0]][0] = None

    @property
    def num_free(self) -> int:
        return self.ledger.num_pages - self.ledger.num_held

    def free_pages(self) -> Pages:
        """In the order of frames: fullest first, the empty ones last."""
        frames = [frame for bucket in self._buckets[1:] for frame in bucket] + list(self._empty)
        found = [page for frame in frames for page in self._free_in(frame, self._free[frame])]
        return np.array(found, dtype=np.int64)

    def take(self, num_pages: int, near: int | None = None) -> Pages:
        _require(num_pages, self.num_free)
        chosen: list[int] = []
        frame = None if near is None else self.ledger.geometry.frame_of(near)
        while (missing := num_pages - len(chosen)) > 0:
            if frame is None or not self._free[frame]:
                frame = self._choose(missing)
            count = min(missing, self._free[frame])
            chosen += self._free_in(frame, count)
            self._file(frame, self._free[frame] - count)
            frame = None
        pages = np.array(chosen, dtype=np.int64)
        self.ledger.hold(pages)
        return pages

    def give(self, pages: Pages) -> list[int]:
        emptied = self.ledger.release(pages)
        frames = self.ledger.geometry.frame_of(pages).tolist()
        freed: dict[int, int] = {}
        for frame in frames:
            freed[frame] = freed.get(frame, 0) + 1
        for frame, count in freed.items():
            self._file(frame, self._free[frame] + count)
        return emptied

    def _choose(self, missing: int) -> int:
        """The held frame with the least room that fits `missing` pages, else the one with the most room, else
        an empty one."""
        buckets = self._buckets
        for room in (*range(missing, self._per_frame), *range(min(missing, self._per_frame) - 1, 0, -1)):
            if buckets[room]:
                return next(iter(buckets[room]))
        return next(iter(self._empty))

    def _free_in(self, frame: int, count: int) -> list[int]:
        """The first `count` free pages of `frame`."""
        geometry, held = self.ledger.geometry, self.ledger.held_bytes
        page = max(geometry.first_page(frame), 1) - 1
        found = []
        for _ in range(count):
            page = held.find(0, page + 1)
            found.append(page)
        return found

    def _file(self, frame: int, free: int) -> None:
        """Put `frame`, which now has `free` free pages, into the bucket for that."""
        before = self._free[frame]
        (self._empty if frame in self._empty else self._buckets[before]).pop(frame, None)
        self._free[frame] = free
        if not free:
            return
        if self._is_whole(frame, free):
            self._empty[frame] = None
        else:
            self._buckets[free][frame] = None

    def _is_whole(self, frame: int, free: int) -> bool:
        """Whether `free` free pages are all of `frame`; never for frame 0, which SGLang's padding page holds."""
        if not frame:
            return False
        ledger = self.ledger
        last = frame == ledger.num_frames - 1
        size = ledger.num_pages + 1 - ledger.geometry.first_page(frame) if last else self._per_frame
        return free == size


def give_slots(placement: Placement, slots: NDArray[np.int64]) -> list[int]:
    """Release the pages whose last slot is among `slots`; returns the frames this empties.

    Raises LedgerError for a slot that is free already.
    """
    return placement.give(placement.ledger.free_slots(slots))


PLACEMENTS: dict[str, Callable[[Ledger], Placement]] = {"stock": StockPlacement, "pack": PackPlacement}
"""The rules a server offers (`RADIX_PAGES_PLACEMENT`)."""


def _require(num_pages: int, num_free: int) -> None:
    if num_pages > num_free:
        raise ValueError(f"asked for {num_pages} pages, {num_free} are free")
