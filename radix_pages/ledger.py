"""The ledger: which pages somebody holds, and what that means for frames. It knows no tokens and no tree.

`hold` and `release` take whole pages; `free_slots` counts single slots and names the pages that are done.
Every call checks all its pages before it changes anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radix_pages.units import Geometry

Pages = NDArray[np.int64]
_FEW = 64
"""Up to so many pages a Python loop beats numpy."""


class LedgerError(RuntimeError):
    """A page was held twice or released while nobody held it; names the slots."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A count over all frames but frame 0. Page counts: held + stranded + empty = all pages."""

    held_pages: int
    stranded_pages: int
    empty_pages: int
    held_frames: int
    empty_frames: int
    packed_floor: int


class PartlyFreed:
    """Held pages of which single slots were freed: which slots, until the page is done or released as a whole."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._freed: dict[int, set[int]] = {}

    def free(self, slots: NDArray[np.int64]) -> Pages:
        """Count `slots` and return the pages whose last slot that was. Raises LedgerError for one freed before."""
        by_page: dict[int, set[int]] = {}
        twice = []
        for slot in slots.tolist():
            page = self._geometry.page_of(slot)
            fresh = by_page.setdefault(page, set())
            if slot in fresh or slot in self._freed.get(page, ()):
                twice.append(slot)
            fresh.add(slot)
        if twice:
            raise LedgerError(f"slots {_some(twice)} are free already: freed twice")
        done = []
        for page, fresh in by_page.items():
            fresh |= self._freed.pop(page, set())
            if len(fresh) == self._geometry.page_size:
                done.append(page)
            else:
                self._freed[page] = fresh
        return np.array(done, dtype=np.int64)

    def forget(self, pages: Pages) -> None:
        """`pages` were released as a whole."""
        if self._freed:
            for page in pages.tolist():
                self._freed.pop(page, None)

    def live_slots(self, page: int) -> int:
        """Slots of `page` that were not freed yet."""
        return self._geometry.page_size - len(self._freed.get(page, ()))


class Ledger:
    """Which of the pages 1..num_pages somebody holds (page 0 is SGLang's padding page: always there, never counted).

    `occupancy[frame]` is the number of held pages in a frame. Frame 0 never counts as empty, whatever it holds.
    """

    def __init__(self, geometry: Geometry, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a ledger needs at least one page, got {num_pages}")
        self.geometry = geometry
        self.num_pages = num_pages
        self.num_frames = geometry.frame_of(num_pages) + 1
        self.frames_emptied = 0
        self.frames_refilled = 0
        self.clear()

    def clear(self) -> None:
        """Nobody holds anything; the totals of emptied and refilled frames go on."""
        self.held_bytes = bytearray(self.num_pages + 1)
        self.is_held = np.frombuffer(self.held_bytes, dtype=np.bool_)
        self.occupancy = [0] * self.num_frames
        self.num_held = 0
        self._partly_freed = PartlyFreed(self.geometry)

    def hold(self, pages: Pages) -> int:
        """Somebody takes `pages`, each once; returns how many frames were empty until now.

        Raises LedgerError when one is held already, named twice or not a page.
        """
        self._require(pages, held=False)
        self._mark(pages, 1)
        refilled = 0
        for frame, count in self._frames(pages):
            refilled += not self.occupancy[frame] and frame > 0
            self.occupancy[frame] += count
        self.num_held += len(pages)
        self.frames_refilled += refilled
        return refilled

    def release(self, pages: Pages) -> list[int]:
        """Nobody holds `pages` any more; returns the frames that this leaves empty.

        Raises LedgerError when one is not held (a double free), named twice or not a page.
        """
        self._require(pages, held=True)
        self._mark(pages, 0)
        self._partly_freed.forget(pages)
        emptied = []
        for frame, count in self._frames(pages):
            self.occupancy[frame] -= count
            if not self.occupancy[frame] and frame > 0:
                emptied.append(frame)
        self.num_held -= len(pages)
        self.frames_emptied += len(emptied)
        return emptied

    def free_slots(self, slots: NDArray[np.int64]) -> Pages:
        """Count single slots as freed and return the pages whose last slot that was; the caller releases those.

        Raises LedgerError when a slot's page is not held or the slot was freed before; then nothing is counted.
        """
        self._require(np.unique(self.geometry.page_of(slots)), held=True)
        return self._partly_freed.free(slots)

    def live_slots(self, page: int) -> int:
        """Slots of a held page that no `free_slots` has counted yet; 0 for a free page."""
        return self._partly_freed.live_slots(page) if self.held_bytes[page] else 0

    def occupancy_report(self) -> Occupancy:
        """Pages and frames by what they hold; stranded pages are free pages of frames that are not empty."""
        geometry = self.geometry
        empty_frames = self.occupancy[1:].count(0)
        held_frames = self.num_frames - 1 - empty_frames
        last_frame_pages = self.num_pages + 1 - geometry.first_page(self.num_frames - 1)
        empty_pages = empty_frames * geometry.pages_per_frame
        if empty_frames and not self.occupancy[-1]:
            empty_pages -= geometry.pages_per_frame - last_frame_pages
        return Occupancy(
            held_pages=self.num_held,
            stranded_pages=self.num_pages - self.num_held - empty_pages,
            empty_pages=empty_pages,
            held_frames=held_frames,
            empty_frames=empty_frames,
            packed_floor=geometry.frames_to_hold(self.num_held),
        )

    def _mark(self, pages: Pages, value: int) -> None:
        if len(pages) > _FEW:
            self.is_held[pages] = value
        else:
            for page in pages.tolist():
                self.held_bytes[page] = value

    def _frames(self, pages: Pages) -> list[tuple[int, int]]:
        """The frames of `pages`, each once, with how many of them it holds."""
        frames = self.geometry.frame_of(pages)
        if len(frames) > _FEW:
            each, counts = np.unique(frames, return_counts=True)
            return list(zip(each.tolist(), counts.tolist(), strict=True))
        return list(Counter(frames.tolist()).items())

    def _require(self, pages: Pages, *, held: bool) -> None:
        ids: list[int] = pages.tolist()
        if len(set(ids)) != len(ids):
            twice = [page for page, count in Counter(ids).items() if count > 1]
            raise LedgerError(f"{self._named(twice)} are named twice in one call")
        if not ids:
            return
        if min(ids) < 1 or max(ids) > self.num_pages:
            strange = [page for page in ids if not 1 <= page <= self.num_pages]
            raise LedgerError(f"pages {_some(strange)} are not among pages 1 to {self.num_pages}")
        if len(ids) > _FEW:
            sound = bool((self.is_held[pages] == held).all())
        else:
            sound = all(self.held_bytes[page] == held for page in ids)
        if not sound:
            wrong = [page for page in ids if self.held_bytes[page] != held]
            what = "not held: freed twice, or never allocated" if held else "held already"
            raise LedgerError(f"{self._named(wrong)} are {what}")

    def _named(self, pages: list[int]) -> str:
        size = self.geometry.page_size
        if size == 1:
            return f"slots {_some(pages)}"
        runs = [f"{page * size}..{page * size + size - 1}" for page in pages[:8]]
        return f"pages {_some(pages)} (slots {', '.join(runs)}{', ...' if len(pages) > 8 else ''})"


def _some(ids: list[int]) -> str:
    """The first few ids, and how many more."""
    shown = ", ".join(map(str, ids[:8]))
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"
