"""Which free pages to hand out. A placement owns the choice, the ledger the facts; both change together here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from radix_pages.ledger import FrameCounts, Frames, Ledger, Pages


class Placement(Protocol):
    """Hands out and takes back pages, and keeps the ledger's record of it."""

    ledger: Ledger

    def take(self, num_pages: int, near: int | None = None) -> Pages:
        """Hold `num_pages` free pages, in the order to use them; `near` is a page of the same request, if known.

        Raises ValueError when fewer are free: the caller asks `num_free` first.
        """

    def take_one(self, near: int | None = None) -> int:
        """`take` for one page, as an int; what decode steps call."""

    def take_these(self, pages: Pages) -> None:
        """Hold exactly these free pages. Raises LedgerError as `Ledger.hold`; then nothing is held."""

    def give(self, pages: Pages) -> list[int]:
        """Release `pages` and return the frames this empties. Raises LedgerError as `Ledger.release`."""

    @property
    def num_free(self) -> int:
        """Free pages with physical memory."""

    def free_pages(self) -> Pages:
        """Every free page, those that `take` would hand out first in front, those of returned frames at the end."""

    def withdraw(self, frames: Frames) -> None:
        """The memory of `frames`, all empty, is given back. Raises LedgerError as `Ledger.mark_returned`."""

    def restore(self, frames: Frames) -> None:
        """`frames` have memory again. Raises LedgerError as `Ledger.mark_committed`."""

    def clear(self) -> None:
        """Every page is free."""


class StockPlacement:
    """SGLang's order, whatever frame a page is in: a paged pool hands out first what was freed last, a pool of
    single slots (page_size 1) what was freed first. Over a ledger in use it begins with the free pages by number."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._queue: deque[int] = deque(_free(ledger, returned=False).tolist())

    def clear(self) -> None:
        self.ledger.clear()
        self._queue = deque(_free(self.ledger, returned=False).tolist())

    @property
    def num_free(self) -> int:
        return len(self._queue)

    def free_pages(self) -> Pages:
        return np.concatenate((np.array(self._queue, dtype=np.int64), _free(self.ledger, returned=True)))

    def withdraw(self, frames: Frames) -> None:
        self.ledger.mark_returned(frames)
        pages = np.array(self._queue, dtype=np.int64)
        self._queue = deque(pages[~self.ledger.is_returned[self.ledger.geometry.frame_of(pages)]].tolist())

    def restore(self, frames: Frames) -> None:
        self.ledger.mark_committed(frames)
        for frame in frames.tolist():
            self._queue.extend(_pages_of(self.ledger, frame))

    def take(self, num_pages: int, near: int | None = None) -> Pages:
        _require(num_pages, self.num_free)
        pages = np.array([self._queue.popleft() for _ in range(num_pages)], dtype=np.int64)
        self.ledger.hold(pages)
        return pages

    def take_one(self, near: int | None = None) -> int:
        _require(1, self.num_free)
        page = self._queue.popleft()
        self.ledger.hold_one(page)
        return page

    def take_these(self, pages: Pages) -> None:
        self.ledger.hold(pages)
        queue = np.array(self._queue, dtype=np.int64)
        self._queue = deque(queue[~self.ledger.is_held[queue]].tolist())

    def give(self, pages: Pages) -> list[int]:
        emptied = self.ledger.release(pages)
        if self.ledger.geometry.page_size == 1:
            self._queue.extend(pages.tolist())
        else:
            self._queue.extendleft(pages[::-1].tolist())
        return emptied


class PackPlacement:
    """Pages that will be freed together go into few frames, and held frames fill up before empty ones are opened.

    1. Beside the request's last page, while its frame has room.
    2. A run that fills a frame gets an empty one, unless more frames would then be held than ever before.
    3. What is left goes into the first held frame, by number, with room for all of it,
    4. failing that into the roomiest held frames, and when all are full into empty ones.

    Low frames thus fill up and stay full while high ones run empty. The choice is read off the ledger and the most
    frames ever held, so equal calls give equal pages. What each rule brings: scripts/results/placement.txt.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._begin()

    def _begin(self) -> None:
        self._most_frames = self.ledger.num_held_frames
        self._low = 1
        self._changed: list[Pages] = []

    def clear(self) -> None:
        self.ledger.clear()
        self._begin()

    @property
    def num_free(self) -> int:
        return self.ledger.num_pages - self.ledger.num_held - self.ledger.num_returned_pages

    def free_pages(self) -> Pages:
        """By number, those of held frames in front: the order in which single pages go that have nothing near."""
        ledger = self.ledger
        free = _free(ledger, returned=False)
        is_in_held_frame = ledger.occupancy[ledger.geometry.frame_of(free)] > 0
        return np.concatenate((free[is_in_held_frame], free[~is_in_held_frame], _free(ledger, returned=True)))

    def withdraw(self, frames: Frames) -> None:
        self.ledger.mark_returned(frames)

    def restore(self, frames: Frames) -> None:
        self.ledger.mark_committed(frames)

    def take(self, num_pages: int, near: int | None = None) -> Pages:
        _require(num_pages, self.num_free)
        ledger = self.ledger
        frame = None if near is None else ledger.geometry.frame_of(near)
        chosen = [] if frame is None or ledger.is_returned[frame] else self._free_in(frame, num_pages)
        if len(chosen) < num_pages:
            for share in self._shares(num_pages - len(chosen), full=frame):
                chosen += self._free_in(*share)
        pages = np.array(chosen, dtype=np.int64)
        ledger.hold(pages)
        self._changed.append(pages)
        self._most_frames = max(self._most_frames, ledger.num_held_frames)
        return pages

    def take_one(self, near: int | None = None) -> int:
        _require(1, self.num_free)
        ledger = self.ledger
        page = -1
        if near is not None:
            frame = ledger.geometry.frame_of(near)
            first, end = ledger.geometry.first_page(frame), ledger.geometry.first_page(frame + 1)
            if not ledger.is_returned[frame]:  # else nobody holds `near` any more
                page = ledger.held_bytes.find(False, first, end)
        if page < 0:
            page = self._first_free()
            self._low = min(self._low, page)
        ledger.hold_one(page)
        self._most_frames = max(self._most_frames, ledger.num_held_frames)
        return page

    def take_these(self, pages: Pages) -> None:
        self.ledger.hold(pages)
        self._changed.append(pages)
        self._most_frames = max(self._most_frames, self.ledger.num_held_frames)

    def _first_free(self) -> int:
        """The first free page of a held frame, by number; of an empty one when no held frame has room.

        No held frame below page `_low` has room. Empty frames are few above it; after eight of them looking at all
        frames at once is faster.
        """
        ledger, find = self.ledger, self.ledger.held_bytes.find
        self._look_at_changes()
        page = find(False, self._low)
        for _ in range(8):
            if page < 0:
                break
            frame = ledger.geometry.frame_of(page)
            if ledger.occupancy[frame]:
                self._low = page
                return page
            page = find(False, ledger.geometry.first_page(frame + 1))
        has_room = (ledger.occupancy > 0) & (ledger.occupancy < ledger.sizes)
        frame = int(has_room.argmax())
        if not has_room[frame]:
            is_empty = (ledger.occupancy == 0) & ~ledger.is_returned
            return find(False, ledger.geometry.first_page(int(is_empty.argmax())))
        self._low = page = find(False, ledger.geometry.first_page(frame))
        return page

    def _look_at_changes(self) -> None:
        """The frames of pages that were held or released since may have room now."""
        if self._changed:
            geometry = self.ledger.geometry
            lowest = int(np.concatenate(self._changed).min(initial=self._low))
            self._low = min(self._low, max(geometry.first_page(geometry.frame_of(lowest)), 1))
            self._changed.clear()

    def give(self, pages: Pages) -> list[int]:
        self._changed.append(pages)
        if len(self._changed) > 256:  # nobody asked for long
            self._look_at_changes()
        return self.ledger.release(pages)

    def _free_in(self, frame: int, most: int) -> list[int]:
        """The first free pages of `frame`, at most so many."""
        ledger = self.ledger
        first, end = ledger.geometry.first_page(frame), ledger.geometry.first_page(frame + 1)
        if not ledger.occupancy[frame]:
            return list(range(first, first + min(most, int(ledger.sizes[frame]))))
        find = ledger.held_bytes.find
        found: list[int] = []
        page = first - 1
        while len(found) < most and (page := find(False, page + 1, end)) >= 0:
            found.append(page)
        return found

    def _shares(self, num_pages: int, full: int | None) -> list[tuple[int, int]]:
        """Frames for a run of pages by rules 2 to 4, each with its number of pages; `full` is not among them."""
        ledger = self.ledger
        per_frame = ledger.geometry.pages_per_frame
        room = ledger.sizes - ledger.occupancy
        if ledger.num_returned_frames:
            room[ledger.is_returned] = 0
        if full is not None:
            room[full] = 0
        shares: list[tuple[int, int]] = []
        spare = self._most_frames - ledger.num_held_frames
        if num_pages >= per_frame:
            for frame in np.flatnonzero(room == per_frame)[: min(spare, num_pages)].tolist():
                if num_pages < per_frame:
                    break
                shares.append((frame, per_frame))
                room[frame] = 0
                num_pages -= per_frame
        if not num_pages:
            return shares
        is_held = ledger.occupancy > 0
        fits = (room >= num_pages) & is_held
        first = int(fits.argmax())
        if fits[first]:
            return [*shares, (first, num_pages)]
        return shares + _roomiest(room, is_held, num_pages)


def _roomiest(room: FrameCounts, is_held: NDArray[np.bool_], num_pages: int) -> list[tuple[int, int]]:
    """Frames for a run that fits into no held one: held ones with the most room first, then empty ones by number.

    As soon as a held frame has room for the rest of the run, the first such frame by number gets it.
    """
    shares: list[tuple[int, int]] = []
    held = np.flatnonzero(is_held & (room > 0))
    held = held[np.argsort(-room[held], kind="stable")]
    num_full = int(np.searchsorted(np.cumsum(room[held]), num_pages))
    for frame in held[:num_full].tolist():
        shares.append((frame, int(room[frame])))
        num_pages -= shares[-1][1]
    if num_full < len(held):
        rest = np.sort(held[num_full:])
        return [*shares, (int(rest[(room[rest] >= num_pages).argmax()]), num_pages)]
    for frame in np.flatnonzero(~is_held & (room > 0)).tolist():
        if not num_pages:
            break
        shares.append((frame, min(num_pages, int(room[frame]))))
        num_pages -= shares[-1][1]
    return shares


def _free(ledger: Ledger, *, returned: bool) -> Pages:
    """Free pages by number: those of returned frames, or all others."""
    free: Pages = np.flatnonzero(~ledger.is_held[1:]) + 1
    if not ledger.num_returned_frames:
        return free[:0] if returned else free
    chosen: Pages = free[ledger.is_returned[ledger.geometry.frame_of(free)] == returned]
    return chosen


def _pages_of(ledger: Ledger, frame: int) -> range:
    first = ledger.geometry.first_page(frame)
    return range(first, first + int(ledger.sizes[frame]))


def give_slots(placement: Placement, slots: NDArray[np.int64]) -> list[int]:
    """Release the pages whose last slot is among `slots`; returns the frames this empties.

    Raises LedgerError for a slot that is free already.
    """
    return placement.give(placement.ledger.free_slots(slots))


def _pack(ledger: Ledger) -> Placement:
    """With one page in a frame there is nothing to pack."""
    return StockPlacement(ledger) if ledger.geometry.pages_per_frame == 1 else PackPlacement(ledger)


PLACEMENTS: dict[str, Callable[[Ledger], Placement]] = {"stock": StockPlacement, "pack": _pack}
"""The rules a server offers (`RADIX_PAGES_PLACEMENT`)."""


def _require(num_pages: int, num_free: int) -> None:
    if num_pages > num_free:
        raise ValueError(f"asked for {num_pages} pages, {num_free} are free")
