"""The free pages of a pool, on the host or on the device, behind one interface for the allocators.

On a CPU the host knows every page id, so placement and ledger work page by page. On a device the ids of freed
pages live in device tensors, and reading them would make the scheduler wait; there the free list stays on the
device, is put in order there, and a ledger is read off it when a report or a plan asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from radix_pages.ledger import Ledger, LedgerError, PartlyFreed
from radix_pages.placement import PLACEMENTS, give_slots
from radix_pages.units import Geometry
from radix_pages_sglang import convert


class PageStore(Protocol):
    """Hands out page ids as int64 tensors on the pool's device. `give_slots` and `ledger` may wait for it."""

    num_pages: int

    @property
    def num_free(self) -> int:
        """Free pages that have memory."""

    @property
    def num_returned(self) -> int:
        """Free pages in frames whose memory was given back."""

    def use(self, placement: str) -> None:
        """Place new pages by another rule from now on."""

    def take(self, num_pages: Sequence[int], near: Sequence[int | None] | None = None) -> torch.Tensor:
        """Pages for several requests, in their order; `near` names a page of each one, where the host knows it."""

    def give(self, pages: torch.Tensor) -> None:
        """Whole pages come back, each once."""

    def give_slots(self, slots: torch.Tensor) -> None:
        """Single slots come back; a page does with its last one."""

    def free_pages(self) -> torch.Tensor: ...

    def ledger(self) -> Ledger:
        """What is held, as of now. On a device made anew each time, which waits and tells no past totals.

        Raises LedgerError when the device's free list is broken, which only this read can find out there.
        """

    def clear(self) -> None: ...

    def resized(self, num_pages: int) -> PageStore:
        """An empty store of the same kind for another number of pages."""


class HostPages:
    """For pools on a CPU: a placement of `radix_pages` decides, and a double free raises at once."""

    def __init__(self, geometry: Geometry, num_pages: int, placement: str) -> None:
        self.num_pages = num_pages
        self._rule = placement
        self._ledger = Ledger(geometry, num_pages)
        self.placement = PLACEMENTS[placement](self._ledger)

    def use(self, placement: str) -> None:
        self._rule = placement
        self.placement = PLACEMENTS[placement](self._ledger)

    def resized(self, num_pages: int) -> HostPages:
        return HostPages(self._ledger.geometry, num_pages, self._rule)

    @property
    def num_free(self) -> int:
        return self.placement.num_free

    @property
    def num_returned(self) -> int:
        return self._ledger.num_returned_pages

    def take(self, num_pages: Sequence[int], near: Sequence[int | None] | None = None) -> torch.Tensor:
        placement = self.placement
        taken = [placement.take(count, near[i] if near else None) for i, count in enumerate(num_pages) if count]
        if not taken:
            return torch.empty(0, dtype=torch.int64)
        return torch.from_numpy(taken[0] if len(taken) == 1 else np.concatenate(taken))

    def take_each(self, near: Sequence[int]) -> list[int]:
        """A page for each of several requests, beside the one they name."""
        take_one = self.placement.take_one
        return [take_one(page) for page in near]

    def give(self, pages: torch.Tensor) -> None:
        self.placement.give(convert.host_array(pages))

    def give_host(self, pages: np.ndarray) -> None:
        """`give` for an array."""
        self.placement.give(pages)

    def give_slots(self, slots: torch.Tensor) -> None:
        give_slots(self.placement, convert.host_array(slots))

    def free_pages(self) -> torch.Tensor:
        return torch.from_numpy(self.placement.free_pages())

    def ledger(self) -> Ledger:
        return self._ledger

    def clear(self) -> None:
        self.placement.clear()


class DevicePages:
    """For pools on a device: the free list is a device tensor, and only its length is known to the host.

    With placement `pack` the list is sorted before an allocation that follows a release: pages of held frames
    first, by number. Sorting runs on the device; the host only enqueues it.
    """

    def __init__(self, geometry: Geometry, num_pages: int, placement: str, device: torch.device) -> None:
        self._geometry = geometry
        self.num_pages = num_pages
        self._device = device
        self.use(placement)
        # As in the ledger: the padding page is a page of frame 0, which is therefore never empty.
        self._frame_sizes = torch.from_numpy(Ledger(geometry, num_pages).sizes).to(device, torch.int64)
        self.clear()

    num_returned = 0

    def use(self, placement: str) -> None:
        self._rule = placement
        self._pack = placement == "pack" and self._geometry.pages_per_frame > 1

    def resized(self, num_pages: int) -> DevicePages:
        return DevicePages(self._geometry, num_pages, self._rule, self._device)

    def clear(self) -> None:
        self._free = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self._device)
        self._unsorted = False
        self._partly_freed = PartlyFreed(self._geometry)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_pages(self) -> torch.Tensor:
        return self._free

    def take(self, num_pages: Sequence[int], near: Sequence[int | None] | None = None) -> torch.Tensor:
        count = sum(num_pages)
        if self._unsorted and count:
            self._sort()
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, pages: torch.Tensor) -> None:
        if self._partly_freed:  # single slots were freed before, which made the host wait already
            self._partly_freed.forget(convert.host_array(pages))
        self._add(pages)

    def _add(self, pages: torch.Tensor) -> None:
        # SGLang's own orders: a pool of single slots is a queue, a paged one a stack.
        parts = (self._free, pages) if self._geometry.page_size == 1 else (pages, self._free)
        self._free = torch.cat(parts)
        self._unsorted = self._pack

    def give_slots(self, slots: torch.Tensor) -> None:
        done = self._partly_freed.free(convert.host_array(slots))
        if len(done):
            self._add(torch.from_numpy(done).to(self._device, non_blocking=True))

    def _sort(self) -> None:
        """Pages of held frames by number, then those of empty frames by number."""
        geometry = self._geometry
        frames = geometry.frame_of(self._free)
        room = torch.zeros_like(self._frame_sizes)
        room.scatter_add_(0, frames, torch.ones_like(frames))
        in_empty_frame = room[frames] == self._frame_sizes[frames]
        self._free = self._free[torch.argsort(self._free + in_empty_frame * (self.num_pages + 1))]
        self._unsorted = False

    def ledger(self) -> Ledger:
        ledger = Ledger(self._geometry, self.num_pages)
        free = convert.host_array(self._free)
        if twice := convert.repeated(free):
            raise LedgerError(f"pages {twice[:8]} are in the free list more than once: freed twice")
        if strange := convert.host_ints(free[(free < 1) | (free > self.num_pages)][:8]):
            raise LedgerError(f"pages {strange} are in the free list and not among pages 1 to {self.num_pages}")
        ledger.hold(np.setdiff1d(np.arange(1, self.num_pages + 1), free))
        return ledger


def make_page_store(geometry: Geometry, num_pages: int, placement: str, device: torch.device) -> PageStore:
    """The store that fits the device."""
    if device.type == "cpu":
        return HostPages(geometry, num_pages, placement)
    return DevicePages(geometry, num_pages, placement, device)
