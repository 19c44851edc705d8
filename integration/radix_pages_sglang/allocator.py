"""Slot allocators that know which frames are empty: SGLang's contracts, our free pages.

What differs from SGLang's own allocators:

- Free pages live in a `PageStore`, which places new pages and keeps the ledger. `free_pages` is still a real tensor
  of page ids, built when somebody reads it.
- Room is made for exactly the pages that an allocation adds. SGLang asks for it ahead of the allocation and assumes
  one new page a request; `evict_to_free_tokens` here only notes the cache, and the allocation that follows evicts
  what it lacks. `check_decode_capacity` is told the exact number and evicts at once, and so does the look-ahead
  after a retraction, which allocates nothing itself (`evict_now`).
- Where memory can be given back, room is first made by committing returned frames and only then by evicting, and
  prefills are admitted on memory that is there (`budget.py`).
- `free()` may carry single slots: a page comes back with its last one. `free_segment(s)` and `free_page_ids` carry
  whole pages, the last one even when the segment ends inside it, as `release_kv_cache` relies on.

Waiting for a device: `alloc`, `alloc_extend`, `alloc_decode`, `free_segment(s)`, `free_page_ids`, `available_size`
and `check_decode_capacity` never do; `free` may (stock's does); `verify_byte_accounting` and `ledger` do.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.kernels.ops.memory.allocator import alloc_decode_kernel, alloc_extend_kernel
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import alloc_decode_naive, alloc_extend_naive
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils import next_power_of_2

from radix_pages.residency import Residency
from radix_pages_sglang import convert
from radix_pages_sglang.budget import CommittedPrefillBudget
from radix_pages_sglang.config import SettingError, Settings
from radix_pages_sglang.page_store import HostPages, PageStore, make_page_store

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    from radix_pages.backing import Backing
    from radix_pages.ledger import Ledger
    from radix_pages.units import Geometry
    from radix_pages_sglang.cache import RadixPagesCache


class FrameAware:
    """What both allocators share.

    `cache` is set by the cache once it exists, for recounts; `_evict_from` is the cache that SGLang named for the
    allocation which comes next, and is forgotten with it.
    """

    geometry: Geometry
    store: PageStore
    settings: Settings
    residency: Residency | None = None
    """Which frames have memory; None without a backing: then all have."""
    cache: RadixPagesCache | None = None
    _evict_from: BasePrefixCache | None = None
    _recounted: tuple[int, int] | None = None
    _next_recount = 0.0

    # SGLang's base class assigns these in its constructor and reads them in checks.

    @property
    def free_pages(self) -> torch.Tensor:
        return self.store.free_pages()

    @free_pages.setter
    def free_pages(self, value: object) -> None:
        if value is not None:
            raise AttributeError("free_pages is what the ledger says; use free_page_ids() and alloc()")

    @property
    def ledger_is_at_hand(self) -> bool:
        """Whether `ledger()` costs nothing; elsewhere it waits for the device."""
        return isinstance(self.store, HostPages)

    def ledger(self) -> Ledger:
        """Who holds what, as of now."""
        return self.store.ledger()

    def available_size(self) -> int:
        """Free slots, those of returned frames included: SGLang's sums are about ownership."""
        return self.geometry.slots(self.store.num_free + self.store.num_returned)

    def committed_size(self) -> int:
        """Free slots that have memory."""
        return self.geometry.slots(self.store.num_free)

    def withheld_size(self) -> int:
        """Free slots that the ceiling keeps from being used."""
        return 0 if self.residency is None else self.geometry.slots(self.residency.withheld_pages)

    def back_with(self, backing: Backing, *, starts_returned: bool) -> None:
        """Let `backing` hold the memory of the pool, which nobody has used. Raises CommitError, SettingError."""
        if not isinstance(self.store, HostPages):
            raise TypeError("memory can be given back where the host knows the free pages: on a CPU")
        settings = self.settings
        ceiling = settings.max_resident_bytes
        max_frames = None if ceiling is None else ceiling // backing.frame_bytes
        least = least_frames(settings.reserve_frames)
        if max_frames is not None and max_frames < least:
            raise SettingError(
                f"RADIX_PAGES_MAX_RESIDENT_BYTES={ceiling} holds {max_frames} frames of {backing.frame_bytes} bytes; "
                f"{least} are the least that can serve"
            )
        num_frames = self.ledger().num_frames
        if settings.reserve_frames > num_frames - 1:
            raise SettingError(
                f"RADIX_PAGES_RESERVE_FRAMES={settings.reserve_frames}: the pool has {num_frames - 1} frames"
            )
        self.residency = Residency(
            self.store.placement, backing, reserve_frames=settings.reserve_frames, max_frames=max_frames
        )
        self.residency.free_frames = settings.free_frames
        if settings.free_frames > num_frames - least_frames(0):
            raise SettingError(
                f"RADIX_PAGES_FREE_FRAMES={settings.free_frames}: of {num_frames} frames {least_frames(0)} are the "
                "least that can serve"
            )
        if starts_returned:
            self.residency.start_returned()

    def use_placement(self, rule: str) -> None:
        """Place new pages by another rule from now on."""
        self.store.use(rule)
        if self.residency is not None and isinstance(self.store, HostPages):
            self.residency.placement = self.store.placement

    def create_prefill_budget(self, tree_cache, *, num_mixed_decode_tokens=0):
        kind = PrefillBudget if self.residency is None else CommittedPrefillBudget
        return kind(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def max_new_tokens_for_memory(self, input_tokens: int, max_new_tokens: int, *, token_capacity: int, **rest):
        """As SGLang's, for a pool as small as the ceiling makes it; None when the prompt itself cannot fit."""
        if self.residency is not None and self.residency.max_frames is not None:
            token_capacity = min(token_capacity, self.geometry.slots(self.residency.most_pages))
            if not self.fits_alone(input_tokens):
                return None
        return super().max_new_tokens_for_memory(input_tokens, max_new_tokens, token_capacity=token_capacity, **rest)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` could ever be admitted, were it the only one."""
        if self.residency is None:
            return True
        return num_tokens + self.page_size < self.geometry.slots(self.residency.most_pages)

    def commit_ahead(self, num_tokens: int, evictable_tokens: int) -> bool:
        """Commit frames until `num_tokens` are free or evictable, all with memory; False where bounds or failures
        left fewer. Evicts nothing."""
        lacking = self.geometry.pages_to_hold(num_tokens) - self.store.num_free
        if lacking <= 0 or self.residency is None:
            return True
        if self.residency.grow(lacking, spare_neighbour=True):
            return True
        lacking = num_tokens - self.geometry.slots(self.store.num_free) - evictable_tokens
        return lacking <= 0 or (
            self.residency.free_frames > 0 and self.residency.grow(self.geometry.pages_to_hold(lacking))
        )

    def get_all_free_pages(self) -> torch.Tensor:
        return self.store.free_pages()

    def merge_and_sort_free(self) -> None:
        """Nothing waits to be merged: released pages are free at once."""

    def evict_to_free_tokens(self, tree_cache, num_tokens: int) -> bool | None:
        self._evict_from = tree_cache
        return None

    def evict_now(self, tree_cache: BasePrefixCache, num_tokens: int) -> bool:
        """Evict what `num_tokens` lack, at once: for callers who allocate nothing themselves."""
        self._evict_from = tree_cache
        return self._make_room(self.geometry.pages_to_hold(num_tokens))

    def check_decode_capacity(self, *, num_tokens: int, tree_cache, requests=None, spec_algorithm=None) -> bool:
        return self.evict_now(tree_cache, num_tokens)

    def _make_room(self, num_pages: int) -> bool:
        """Commit, then evict what `num_pages` lack, from the cache that SGLang named for this allocation; False if
        that is not enough."""
        cache, self._evict_from = self._evict_from, None
        lacking = num_pages - self.store.num_free
        residency = self.residency
        if lacking > 0 and residency is not None:
            residency.grow(lacking, spare_neighbour=True)
            lacking = num_pages - self.store.num_free
        if lacking <= 0:
            return True
        if cache is not None and cache.supports_prefix_sharing():
            cache.evict_for_alloc(EvictParams(num_tokens=self.geometry.slots(lacking)))
        lacking = num_pages - self.store.num_free
        if lacking > 0 and residency is not None and residency.free_frames:
            residency.grow(lacking)
        return self.store.num_free >= num_pages

    def _resize(self, num_pages: int) -> None:
        if self.residency is not None:
            raise RuntimeError("a pool whose memory can be given back cannot change its size")
        self.store = self.store.resized(num_pages)

    def verify_byte_accounting(self) -> list[str]:
        """SGLang's recount at idle: everything on which ledger, tree and sessions disagree.

        It grows with the cache, so it runs only when something changed since the last one, and once it takes more
        than 5 ms no oftener than every 20th moment: a request after a short pause should not have to wait for it.
        """
        if self.cache is None:
            return []
        state = (self.cache.tree_core.tree.tick, self.store.num_free)
        if state == self._recounted or time.monotonic() < self._next_recount:
            return []
        self._recounted = state
        start = time.monotonic()
        found = self.cache.recount()
        now = time.monotonic()
        seconds = now - start
        self._next_recount = now + 20 * seconds if seconds > 0.005 else 0.0
        return found


def least_frames(reserve_frames: int) -> int:
    """The fewest committed frames that a ceiling may allow: the padding page's, the reserve and one to work in."""
    return 2 + reserve_frames


class RadixPagesTokenAllocator(FrameAware, TokenToKVPoolAllocator):
    """For page_size 1: a page is a slot, a frame `geometry.pages_per_frame` slots."""

    def __init__(self, stock: TokenToKVPoolAllocator, geometry: Geometry, settings: Settings) -> None:
        self.geometry = geometry
        self.settings = settings
        placement = settings.placement_in(settings.mode)
        self.store = make_page_store(geometry, stock.size, placement, torch.device(stock.device))
        super().__init__(stock.size, stock.dtype, stock.device, stock.get_kvcache(), stock.need_sort)

    def clear(self) -> None:
        if self.store.num_pages != self.size:
            self._resize(self.size)
        self.store.clear()
        self.free_group = None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not self._make_room(need_size):
            return None
        return self.store.take([need_size])

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self.store.give(free_index)
        else:
            self.free_group.append(self._copy_for_free_group(free_index))


class RadixPagesPagedAllocator(FrameAware, PagedTokenToKVPoolAllocator):
    """For larger pages."""

    def __init__(self, stock: PagedTokenToKVPoolAllocator, geometry: Geometry, settings: Settings) -> None:
        self.geometry = geometry
        self.settings = settings
        placement = settings.placement_in(settings.mode)
        self.store = make_page_store(geometry, stock.num_pages, placement, torch.device(stock.device))
        super().__init__(stock.size, stock.page_size, stock.dtype, stock.device, stock.get_kvcache(), stock.need_sort)
        self._on_host = torch.device(stock.device).type == "cpu"

    def clear(self) -> None:
        if self.store.num_pages != self.num_pages:
            self._resize(self.num_pages)
        self.store.clear()
        self.free_group = None
        self.free_page_ids_group = []
        self.staged_pages: list[torch.Tensor] = []
        self.num_staged_pages = 0

    def get_extend_allocation_demand(
        self, prefix_lens_cpu, seq_lens_cpu, *, conservative_num_tokens: int, shard_size: int
    ) -> int:
        return self.geometry.slots(sum(self._new_pages(prefix_lens_cpu, seq_lens_cpu)))

    def _new_pages(self, prefix_lens_cpu: torch.Tensor, seq_lens_cpu: torch.Tensor) -> list[int]:
        """Pages that each request adds when it grows from its prefix to its new length. Host tensors."""
        to_hold = self.geometry.pages_to_hold
        prefixes, lengths = convert.host_ints(prefix_lens_cpu), convert.host_ints(seq_lens_cpu)
        return [to_hold(after) - to_hold(before) for before, after in zip(prefixes, lengths, strict=True)]

    def alloc(self, need_size: int) -> torch.Tensor | None:
        num_pages = self.geometry.whole_pages(need_size)
        if not self._make_room(num_pages):
            return None
        first_slots = self.geometry.first_slot(self.store.take([num_pages]))
        return (first_slots[:, None] + torch.arange(self.page_size, device=self.device)).reshape(-1)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        counts = self._new_pages(prefix_lens_cpu, seq_lens_cpu)
        if not self._make_room(sum(counts)):
            return None
        if self._on_host:
            return self._extend_on_host(convert.host_ints(prefix_lens_cpu), seq_lens_cpu, last_loc, counts)
        pages = self.store.take(counts)
        slots = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        if self.use_triton_kernels:
            batch = len(prefix_lens)
            alloc_extend_kernel[(batch,)](
                prefix_lens, seq_lens, last_loc, pages, slots, next_power_of_2(batch), self.page_size
            )
        else:
            alloc_extend_naive(prefix_lens, seq_lens, last_loc, pages, slots, self.page_size, self.device)
        return slots

    def _extend_on_host(self, prefixes: list[int], seq_lens_cpu, last_loc, counts: list[int]) -> torch.Tensor:
        """Slots of all requests in a row: each goes on in its last page, if that has room, then in its new ones."""
        geometry = self.geometry
        last_pages = [geometry.page_of(slot) for slot in convert.host_ints(last_loc)]
        near = [page if prefix else None for page, prefix in zip(last_pages, prefixes, strict=True)]
        pages = convert.host_ints(self.store.take(counts, near))
        runs, used = [], 0
        for prefix, length, count, last_page in zip(
            prefixes, convert.host_ints(seq_lens_cpu), counts, last_pages, strict=True
        ):
            own = pages[used : used + count]
            used += count
            skip = geometry.place_in_page(prefix)
            if skip:
                own.insert(0, last_page)
            slots = geometry.slots_of(np.array(own, dtype=np.int64))
            runs.append(slots[skip : skip + length - prefix])
        return torch.from_numpy(np.concatenate(runs)) if runs else torch.empty(0, dtype=torch.int64)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        starts_page = self.geometry.place_in_page(convert.cpu_array(seq_lens_cpu) - 1) == 0
        if self._on_host:
            return self._decode_on_host(np.flatnonzero(starts_page), convert.cpu_array(last_loc))
        num_new_pages = int(starts_page.sum())
        if not self._make_room(num_new_pages):
            return None
        pages = self.store.take([num_new_pages])
        slots = torch.empty((len(seq_lens),), dtype=torch.int64, device=self.device)
        if self.use_triton_kernels:
            batch = len(seq_lens)
            alloc_decode_kernel[(batch,)](seq_lens, last_loc, pages, slots, next_power_of_2(batch), self.page_size)
        else:
            alloc_decode_naive(seq_lens, last_loc, pages, slots, self.page_size, num_new_pages)
        return slots

    def _decode_on_host(self, growing: np.ndarray, last_loc: np.ndarray) -> torch.Tensor | None:
        """The next slot of every request; those at positions `growing` begin a page, near their last one."""
        if not self._make_room(len(growing)):
            return None
        slots = last_loc.astype(np.int64) + 1
        if len(growing):
            near = convert.host_ints(self.geometry.page_of(last_loc[growing]))
            slots[growing] = self.geometry.first_slot(np.array(self.store.take_each(near), dtype=np.int64))
        return torch.from_numpy(slots)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        if not self._on_host or self.free_group is not None or self.debug_mode:
            super().free_segment(free_index, start_pos=start_pos)
            return
        if self.geometry.place_in_page(start_pos):
            raise ValueError(f"a segment begins at position {start_pos}, which does not begin a page")
        slots = convert.cpu_array(free_index)
        self.store.give_host(self.geometry.page_of(slots[:: self.page_size]))

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self.store.give_slots(free_index)
        else:
            self.free_group.append(self._copy_for_free_group(free_index))

    def free_full_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        self.free_segment(free_index, start_pos=start_pos)  # one pool: there is no sliding-window side to leave out

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        for pages in page_ids:
            self.store.give(pages)
