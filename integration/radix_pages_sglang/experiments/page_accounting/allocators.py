"""The same evictions through real allocators: what each gives back, and what it loses.

The best case for eviction: every request has its pages in a row and begins on a frame of the largest size. Page 0 is
SGLang's padding page; a filler takes the rest of the first such frame and stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from radix_pages.units import Geometry
from radix_pages_sglang.allocator import RadixPagesPagedAllocator
from radix_pages_sglang.config import Settings
from radix_pages_sglang.experiments.page_accounting.null import FRAME_PAGES
from radix_pages_sglang.experiments.page_accounting.slabs import Slabs
from radix_pages_sglang.experiments.page_accounting.strategies import (
    PAGE_TOKENS,
    Kept,
    in_empty_frames,
    pages_empty,
)
from radix_pages_sglang.pool import Mapping, MmapBacking

Pages = NDArray[np.int64]

FILLER_PAGES = max(FRAME_PAGES)
"""Pages before the first request: the padding page, and a filler that is held throughout."""

FILLER_SLOTS = FILLER_PAGES * PAGE_TOKENS

MOST_UNITS = 64
"""Where a request has pages for each layer or head, allocators are driven with so many of those, spread evenly over
all texts, layers and heads: all 2,160 would take 2 GiB and half a minute a row."""

BUFFER_ROWS = {"request": (1024,) * 4, "layer": (1024,) * 2, "head": (256,) * 2}
"""Bytes that a token takes in each buffer of the measured mapping. request: keys and values of 2 of the 16 layers of
Llama-3.2-1B in bfloat16 (all layers are laid out alike); layer: of one such layer; head: of one head in float32, so
that a page of 16 tokens is one page of the operating system."""

SGLANG_TOKEN, SGLANG_PAGED, OURS, SLAB = "SGLang token pool", "SGLang paged pool", "radix_pages + mmap", "slab"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one allocator did with one eviction.

    `pages_freed` has for each unit the pages it gave back to others: at a frame size, pages of frames without a held
    page. `held_percent` is memory that stays, by the allocator's own books. `os_resident_percent` is what the
    operating system counts of the requests' memory; `os_off_frames` how far that is from the ledger, in frames.
    `live_tokens_lost` are kept tokens whose slot is handed to others all the same; `tokens_copied` what was moved.
    """

    allocator: str
    frame_pages: int
    pages_freed: NDArray[np.float64]
    held_percent: float
    os_resident_percent: float | None = None
    os_off_frames: float | None = None
    live_tokens_lost: int = 0
    tokens_copied: int = 0


def sample(kept: Kept) -> Kept:
    """At most MOST_UNITS of `kept` [units, tokens], evenly spread."""
    if len(kept) <= MOST_UNITS:
        return kept
    return kept[np.linspace(0, len(kept) - 1, MOST_UNITS).astype(int)]


def drive(kept: Kept, spans: str) -> list[Outcome]:
    """Every real allocator that has such a layout. SGLang's pools have one slot for all layers and heads."""
    outcomes = [token_pool(kept), paged_pool(kept)] if spans == "request" else []
    for frame_pages in FRAME_PAGES:
        outcomes.append(ours(kept, frame_pages, BUFFER_ROWS[spans]))
        outcomes.append(slabs(kept, frame_pages))
    return outcomes


def token_pool(kept: Kept) -> Outcome:
    """SGLang's pool of single slots (page size 1): freed slots are free for anyone, wherever they are."""
    pool = TokenToKVPoolAllocator(FILLER_SLOTS + kept.size, torch.float16, "cpu", None, False)
    own = _allocated(pool, kept, FILLER_SLOTS - 1)
    pool.free(own[torch.from_numpy(~kept.reshape(-1))])
    is_free = _marked(pool.get_all_free_pages(), FILLER_SLOTS + kept.size)[own].reshape(kept.shape)
    freed = pages_empty(~is_free).sum(axis=1).astype(float)
    held = 100.0 * float((~is_free).mean())
    return Outcome(SGLANG_TOKEN, 1, freed, held, 100.0, live_tokens_lost=int((kept & is_free).sum()))


def paged_pool(kept: Kept) -> Outcome:
    """SGLang's paged pool as it is: `free` gives back every page that one of the slots is in."""
    pool = PagedTokenToKVPoolAllocator(FILLER_SLOTS + kept.size, PAGE_TOKENS, torch.float16, "cpu", None, False)
    own = _allocated(pool, kept, FILLER_SLOTS - PAGE_TOKENS)
    pool.free(own[torch.from_numpy(~kept.reshape(-1))])
    is_free = _marked(pool.get_all_free_pages(), FILLER_PAGES + kept.size // PAGE_TOKENS)[own // PAGE_TOKENS]
    is_free = is_free.reshape(kept.shape)
    freed = is_free.reshape(len(kept), -1, PAGE_TOKENS).all(axis=2).sum(axis=1).astype(float)
    held = 100.0 * float((~is_free).mean())
    return Outcome(SGLANG_PAGED, 1, freed, held, 100.0, live_tokens_lost=int((kept & is_free).sum()))


def pages_freed_twice(first: Kept, second: Kept) -> int:
    """Evict to `first` and later to `second`, which keeps less: how many pages SGLang's paged pool then has in its
    free list more than once, so that two requests get the same memory."""
    pool = PagedTokenToKVPoolAllocator(FILLER_SLOTS + first.size, PAGE_TOKENS, torch.float16, "cpu", None, False)
    own = _allocated(pool, first, FILLER_SLOTS - PAGE_TOKENS)
    pool.free(own[torch.from_numpy(~first.reshape(-1))])
    pool.free(own[torch.from_numpy((first & ~second).reshape(-1))])
    return int((np.bincount(pool.get_all_free_pages().numpy()) > 1).sum())


def ours(kept: Kept, frame_pages: int, rows: tuple[int, ...]) -> Outcome:
    """Our paged allocator over memory that the operating system counts: a page is free with its last slot, and every
    frame without a held page is given back."""
    geometry = Geometry(PAGE_TOKENS, pages_per_frame=frame_pages)
    num_slots = FILLER_SLOTS + kept.size
    mapping = Mapping([(row, num_slots) for row in rows])
    pool = _backed(mapping, geometry, num_slots)
    own = _allocated(pool, kept, FILLER_SLOTS - PAGE_TOKENS)
    pool.free(own[torch.from_numpy(~kept.reshape(-1))])
    residency, ledger = pool.residency, pool.ledger()
    assert residency is not None
    residency.trim()
    pages = geometry.page_of(own.numpy()).reshape(kept.shape)
    is_returned = ledger.is_returned[geometry.frame_of(pages[:, ::PAGE_TOKENS])]
    resident = residency.backing.resident_bytes()
    filler = residency.backing.bytes_of(np.arange(geometry.frame_of(FILLER_PAGES)))
    return Outcome(
        OURS,
        frame_pages,
        is_returned.sum(axis=1).astype(float),
        100.0 * (residency.committed_bytes - filler) / (residency.total_bytes - filler),
        100.0 * (resident - filler) / (residency.total_bytes - filler),
        abs(resident - residency.committed_bytes) / residency.backing.frame_bytes,
        live_tokens_lost=int((kept & ~ledger.is_held[pages]).sum()),
    )


def slabs(kept: Kept, frame_pages: int) -> Outcome:
    """A slab allocator with tokens for objects and frames for slabs."""
    pool = Slabs(frame_pages * PAGE_TOKENS)
    own = pool.take(kept.size)
    pool.give(own[~kept.reshape(-1)])
    is_freed = ~pool.has_memory(own).reshape(len(kept), -1, PAGE_TOKENS).any(axis=2)
    lost = int((kept.reshape(-1) & ~pool.is_used(own)).sum())
    held = 100.0 * pool.num_slabs * pool.objects_a_slab / kept.size
    return Outcome(SLAB, frame_pages, is_freed.sum(axis=1).astype(float), held, live_tokens_lost=lost)


def _backed(mapping: Mapping, geometry: Geometry, num_slots: int) -> RadixPagesPagedAllocator:
    """Our allocator, SGLang's order of pages, over committed memory for `num_slots` slots, padding page included."""
    stock = PagedTokenToKVPoolAllocator(num_slots - PAGE_TOKENS, PAGE_TOKENS, torch.float16, "cpu", None, False)
    pool = RadixPagesPagedAllocator(stock, geometry, Settings(placement="stock", mode="return", backing="mmap"))
    pool.back_with(MmapBacking(mapping, geometry), starts_returned=False)
    assert pool.residency is not None
    pool.residency.backing.commit(np.arange(pool.ledger().num_frames))
    return pool


def _allocated(
    pool: TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator, kept: Kept, filler_slots: int
) -> torch.Tensor:
    """Slots for every token of every unit, in a row from FILLER_SLOTS on."""
    pool.alloc(filler_slots)
    own = torch.cat([pool.alloc(kept.shape[1]) for _ in range(len(kept))])
    assert torch.equal(own, torch.arange(FILLER_SLOTS, FILLER_SLOTS + kept.size)), "not the placement described"
    return own


def _marked(ids: torch.Tensor, most: int) -> NDArray[np.bool_]:
    """A flag for each id up to `most`."""
    is_marked = np.zeros(most + 1, dtype=np.bool_)
    is_marked[ids.numpy()] = True
    return is_marked


# ------------------------------------------------------------------------------------------------- rules, modelled

MODELLED = {
    "VMM granule, pages in a row": "kvcached's rule: 2 MiB of physical memory go when every page in them is empty "
    "(its reserve of mapped pages trimmed). 4 pages of Llama-3.2-1B if all layers of a page stand together",
    "VMM granule, layer by layer": "the same where each layer has a buffer of its own, as SGLang's pool: 128 pages",
    "cudaMallocAsync + trim, a page each": "cudaMemPoolTrimTo's documentation: memory that backs an outstanding "
    "allocation stays; granularity of the operating system taken as 2 MiB, every page an allocation of its own",
    "cudaMallocAsync + trim, one pool": "the same with one allocation a buffer, as serving engines have it: it is "
    "outstanding, nothing can be released",
    "expandable segments, a page each": "PyTorch's note on expandable segments: only empty physical pages of 2 MiB "
    "(small pool, allocations up to 1 MiB) can be unmapped; every page a tensor of its own",
    "expandable segments, one pool": "the same with one tensor a buffer, as serving engines have it",
    "FasterTransformer": "one contiguous cache for batch and longest sequence, allocated when the batch starts",
    "copied together": "what H2O's own code does: the kept tokens of each unit are copied into a new tensor and the "
    "old one is freed; held is the new one, in whole frames",
}
"""Rules of allocators that were not run here, from their documentation or code, and what is assumed."""

_GRANULES = {
    "VMM granule, pages in a row": 4,
    "VMM granule, layer by layer": 128,
    "cudaMallocAsync + trim, a page each": 4,
    "expandable segments, a page each": 4,
}
_NOTHING = ("cudaMallocAsync + trim, one pool", "expandable segments, one pool", "FasterTransformer")


def modelled(kept: Kept, spans: str) -> list[Outcome]:
    """What the rules of MODELLED give back. Pages for each layer or head exist in none of those allocators."""
    is_empty = pages_empty(kept)
    outcomes = [_copied(kept, frame_pages) for frame_pages in FRAME_PAGES]
    if spans != "request":
        return outcomes
    for name, frame_pages in _GRANULES.items():
        freed = in_empty_frames(is_empty, frame_pages)
        outcomes.append(Outcome(name, frame_pages, freed.sum(axis=1).astype(float), 100.0 * float((~freed).mean())))
    nothing = np.zeros(len(kept))
    return outcomes + [Outcome(name, 1, nothing, 100.0) for name in _NOTHING]


def _copied(kept: Kept, frame_pages: int) -> Outcome:
    run = frame_pages * PAGE_TOKENS
    held = -(-kept.sum(axis=1) // run) * frame_pages
    freed = kept.shape[1] // PAGE_TOKENS - held
    share = 100.0 * float(held.sum()) * PAGE_TOKENS / kept.size
    return Outcome("copied together", frame_pages, freed.astype(float), share, tokens_copied=int(kept.sum()))
