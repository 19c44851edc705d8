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
Frames = NDArray[np.int64]
FrameCounts = NDArray[np.int32]
_FEW = 8
"""Up to so many pages a Python loop beats numpy."""
_ONE = np.int32(1)
"""Of the counts' own type: numpy adds an int of another type several times slower."""


class LedgerError(RuntimeError):
    """A page was held twice or released while nobody held it; names the slots."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Pages: held + stranded + empty = all pages. Frames: held + empty = all frames; frame 0 counts as held always.

    A stranded page is a free one in a held frame. `packed_floor` is the least frames with room for the held pages.
    `returned_frames` counts those empty frames whose physical memory was given back.
    """

    held_pages: int
    stranded_pages: int
    empty_pages: int
    held_frames: int
    empty_frames: int
    packed_floor: int
    returned_frames: int = 0


class PartlyFreed:
    """Held pages of which single slots were freed: which slots, until the page is done or released as a whole."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._freed: dict[int, set[int]] = {}

    def free(self, slots: NDArray[np.int64]) -> Pages:
        """Count `slots` and return the pages whose last slot that was, by number (SGLang sorts them, too).

        Raises LedgerError for a slot that was freed before; then nothing is counted.
        """
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
        return np.array(sorted(done), dtype=np.int64)

    def __bool__(self) -> bool:
        return bool(self._freed)

    def forget(self, pages: Pages) -> None:
        """`pages` were released as a whole."""
        if self._freed:
            for page in pages.tolist():
                self._freed.pop(page, None)

    def live_slots(self, page: int) -> int:
        """Slots of `page` that were not freed yet."""
        return self._geometry.page_size - len(self._freed.get(page, ()))


class Ledger:
    """Which of the pages 1..num_pages somebody holds. Page 0 is SGLang's padding page: held always, never counted.

    `held_bytes` (and `is_held`, the same memory for numpy) has one flag a page. `occupancy[frame]` is the number of
    held pages among the `sizes[frame]` pages of a frame. The padding page counts there, so frame 0 is never empty.
    `is_returned` marks empty frames whose physical memory was given back; nobody can hold their pages until it is
    committed again.
    """

    def __init__(self, geometry: Geometry, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a ledger needs at least one page, got {num_pages}")
        self.geometry = geometry
        self.num_pages = num_pages
        self.num_frames = geometry.frame_of(num_pages) + 1
        self.sizes: FrameCounts = np.full(self.num_frames, geometry.pages_per_frame, dtype=np.int32)
        self.sizes[-1] = num_pages + 1 - geometry.first_page(self.num_frames - 1)
        self.frames_emptied = 0
        self.frames_refilled = 0
        self.is_returned: NDArray[np.bool_] = np.zeros(self.num_frames, dtype=np.bool_)
        self.num_returned_frames = 0
        self.num_returned_pages = 0
        self._start()

    def _start(self) -> None:
        self.held_bytes = bytearray(self.num_pages + 1)
        self.held_bytes[0] = True
        self.is_held = np.frombuffer(self.held_bytes, dtype=np.bool_)
        self.occupancy: FrameCounts = np.zeros(self.num_frames, dtype=np.int32)
        self.occupancy[0] = 1
        self.num_held = 0
        self._partly_freed = PartlyFreed(self.geometry)

    def clear(self) -> None:
        """Nobody holds anything. Returned frames stay returned; totals of emptied and refilled frames go on."""
        self.frames_emptied += self.num_held_frames - 1
        self._start()

    @property
    def num_held_frames(self) -> int:
        """Frames that are not empty, frame 0 included."""
        return 1 + self.frames_refilled - self.frames_emptied

    def hold(self, pages: Pages) -> int:
        """Somebody takes `pages`, each once; returns how many frames were empty until now.

        Raises LedgerError when one is held already, named twice or not a page.
        """
        if len(pages) <= _FEW:
            refilled = self._hold_few(pages.tolist())
        else:
            frames = self.geometry.frame_of(self._checked(pages, held=False))
            if self.num_returned_frames and self.is_returned[frames].any():
                raise self._no_memory(frames.tolist())
            self.is_held[pages] = True
            refilled = len(_each_once(frames[self.occupancy[frames] == 0]))
            np.add.at(self.occupancy, frames, _ONE)
        self.num_held += len(pages)
        self.frames_refilled += refilled
        return refilled

    def hold_one(self, page: int) -> None:
        """`hold` for one page given as an int; what decode steps call."""
        if not 0 < page <= self.num_pages or self.held_bytes[page]:
            raise self._complaint([page], held=False)
        frame = self.geometry.frame_of(page)
        if self.num_returned_frames and self.is_returned[frame]:
            raise self._no_memory([frame])
        self.held_bytes[page] = True
        self.frames_refilled += not self.occupancy[frame]
        self.occupancy[frame] += _ONE
        self.num_held += 1

    def release(self, pages: Pages) -> list[int]:
        """Nobody holds `pages` any more; returns the frames that this leaves empty.

        Raises LedgerError when one is not held (a double free), named twice or not a page.
        """
        if len(pages) <= _FEW:
            emptied = self._release_few(pages.tolist())
        else:
            frames = self.geometry.frame_of(self._checked(pages, held=True))
            self.is_held[pages] = False
            np.subtract.at(self.occupancy, frames, _ONE)
            emptied = _each_once(frames[self.occupancy[frames] == 0])
        self._partly_freed.forget(pages)
        self.num_held -= len(pages)
        self.frames_emptied += len(emptied)
        return emptied

    def free_slots(self, slots: NDArray[np.int64]) -> Pages:
        """Count single slots as freed and return the pages whose last slot that was; the caller releases those.

        Raises LedgerError when a slot's page is not held or the slot was freed before; then nothing is counted.
        """
        pages = _each_once(np.sort(self.geometry.page_of(slots)))
        self._check_few(pages, held=True)
        return self._partly_freed.free(slots)

    def mark_returned(self, frames: Frames) -> None:
        """The physical memory of `frames` is given back.

        Raises LedgerError when one is held (frame 0 always is), returned already or named twice; then none is marked.
        """
        self._check_frames(frames)
        if wrong := frames[(self.occupancy[frames] > 0) | self.is_returned[frames]].tolist():
            raise LedgerError(f"frames {_some(wrong)} are held or were returned already: they cannot be returned")
        self.is_returned[frames] = True
        self.num_returned_frames += len(frames)
        self.num_returned_pages += int(self.sizes[frames].sum())

    def mark_committed(self, frames: Frames) -> None:
        """`frames` have physical memory again. Raises LedgerError when one was not returned or is named twice."""
        self._check_frames(frames)
        if wrong := frames[~self.is_returned[frames]].tolist():
            raise LedgerError(f"frames {_some(wrong)} were not returned: they have memory already")
        self.is_returned[frames] = False
        self.num_returned_frames -= len(frames)
        self.num_returned_pages -= int(self.sizes[frames].sum())

    def live_slots(self, page: int) -> int:
        """Slots of a held page that no `free_slots` has counted yet; 0 for a free page."""
        return self._partly_freed.live_slots(page) if self.held_bytes[page] else 0

    def occupancy_report(self) -> Occupancy:
        """What is held now, counted in pages and in frames."""
        empty_pages = int(self.sizes[self.occupancy == 0].sum())
        return Occupancy(
            held_pages=self.num_held,
            stranded_pages=self.num_pages - self.num_held - empty_pages,
            empty_pages=empty_pages,
            held_frames=self.num_held_frames,
            empty_frames=self.num_frames - self.num_held_frames,
            packed_floor=self.geometry.frames_to_hold(self.num_held),
            returned_frames=self.num_returned_frames,
        )

    def _hold_few(self, pages: list[int]) -> int:
        self._check_few(pages, held=False)
        if self.num_returned_frames:
            frames = [self.geometry.frame_of(page) for page in pages]
            if any(self.is_returned[frame] for frame in frames):
                raise self._no_memory(frames)
        refilled = 0
        for page in pages:
            self.held_bytes[page] = True
            frame = self.geometry.frame_of(page)
            refilled += not self.occupancy[frame]
            self.occupancy[frame] += 1
        return refilled

    def _release_few(self, pages: list[int]) -> list[int]:
        self._check_few(pages, held=True)
        emptied = []
        for page in pages:
            self.held_bytes[page] = False
            frame = self.geometry.frame_of(page)
            self.occupancy[frame] -= 1
            if not self.occupancy[frame]:
                emptied.append(frame)
        return emptied

    def _check_few(self, pages: list[int], *, held: bool) -> None:
        for page in pages:
            if not 0 < page <= self.num_pages or self.held_bytes[page] != held:
                raise self._complaint(pages, held=held)
        if len(set(pages)) != len(pages):
            raise self._complaint(pages, held=held)

    def _checked(self, pages: Pages, *, held: bool) -> Pages:
        """`pages` in ascending order, once it is sure that each may change."""
        ascending = np.sort(pages)
        if (
            not 0 < ascending[0] <= ascending[-1] <= self.num_pages
            or (not held) in self.is_held[ascending].tobytes()
            or True in (ascending[1:] == ascending[:-1]).tobytes()
        ):
            raise self._complaint(pages.tolist(), held=held)
        return ascending

    def _complaint(self, pages: list[int], *, held: bool) -> LedgerError:
        """What is wrong with `pages`, all of which should be pages, each named once, and held or not."""
        strange = [page for page in pages if not 0 < page <= self.num_pages]
        if strange:
            return LedgerError(f"pages {_some(strange)} are not among pages 1 to {self.num_pages}")
        wrong = [page for page in dict.fromkeys(pages) if self.held_bytes[page] != held]
        if wrong:
            what = "not held: freed twice, or never allocated" if held else "held already"
            return LedgerError(f"{self._named(wrong)} are {what}")
        twice = [page for page, count in Counter(pages).items() if count > 1]
        return LedgerError(f"{self._named(twice)} are named twice in one call")

    def _no_memory(self, frames: list[int]) -> LedgerError:
        """Somebody wants to hold pages of `frames`, some of which were returned."""
        returned = [frame for frame in dict.fromkeys(frames) if self.is_returned[frame]]
        return LedgerError(f"frames {_some(returned)} were returned: commit them before anybody holds their pages")

    def _check_frames(self, frames: Frames) -> None:
        if strange := frames[(frames < 0) | (frames >= self.num_frames)].tolist():
            raise LedgerError(f"frames {_some(strange)} are not among frames 0 to {self.num_frames - 1}")
        if len(np.unique(frames)) != len(frames):
            raise LedgerError(f"some of frames {_some(frames.tolist())} are named twice in one call")

    def _named(self, pages: list[int]) -> str:
        geometry = self.geometry
        if geometry.page_size == 1:
            return f"slots {_some(pages)}"
        runs = [f"{geometry.first_slot(page)}..{geometry.first_slot(page + 1) - 1}" for page in pages[:8]]
        return f"pages {_some(pages)} (slots {', '.join(runs)}{', ...' if len(pages) > 8 else ''})"


def _each_once(ascending: NDArray[np.int64]) -> list[int]:
    if not len(ascending):
        return []
    rest = ascending[1:]
    return [int(ascending[0]), *rest[rest != ascending[:-1]].tolist()]


def _some(ids: list[int]) -> str:
    """The first few ids, and how many more."""
    shown = ", ".join(map(str, ids[:8]))
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"
