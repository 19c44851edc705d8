"""Our allocators in SGLang's place, alone and below a cache, and what tests ask of them.

`held` are the pages somebody owns, read off the ledger.
"""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_decode, alloc_paged_token_slots_extend
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from radix_pages_sglang.hooks import frame_aware
from tests.adapter import caches
from tests.adapter.caches import OURS

FRAMES = (1, 4, 64, 128)
PLACEMENTS = ("pack", "stock")


def stock_allocator(page_size, num_pages, *, need_sort=False):
    common = {"dtype": torch.float16, "device": "cpu", "kvcache": None, "need_sort": need_sort}
    if page_size == 1:
        return TokenToKVPoolAllocator(num_pages, **common)
    return PagedTokenToKVPoolAllocator(page_size * num_pages, page_size=page_size, **common)


def our_allocator(page_size, num_pages, *, frame_pages=4, placement="pack", need_sort=False):
    """What a server's hook puts in place of SGLang's allocator."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RADIX_PAGES_FRAME_TOKENS", str(page_size * frame_pages))
        environment.setenv("RADIX_PAGES_PLACEMENT", placement)
        return frame_aware(stock_allocator(page_size, num_pages, need_sort=need_sort))


def framed(*, frame_pages=4, placement="pack", **options):
    """A cache of ours on an allocator of ours; `options` are those of `caches.build`."""
    with pytest.MonkeyPatch.context() as patch:
        page_size = options.get("page_size", 1)
        patch.setenv("RADIX_PAGES_FRAME_TOKENS", str(page_size * frame_pages))
        patch.setenv("RADIX_PAGES_PLACEMENT", placement)
        for stock in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
            patch.setattr(caches, stock.__name__, lambda *a, stock=stock, **k: frame_aware(stock(*a, **k)))
        return caches.build(OURS, **options)


def held(ledger):
    """Pages that somebody holds."""
    return {page for page in range(1, ledger.num_pages + 1) if ledger.held_bytes[page]}


def assert_whole(allocator):
    """Free list, ledger and sizes say the same, and no page is in the list twice."""
    ledger = allocator.ledger()
    free = allocator.get_all_free_pages()
    assert free.dtype == torch.int64
    assert torch.equal(free, allocator.free_pages)
    listed = free.tolist()
    assert len(set(listed)) == len(listed)
    assert set(listed) | held(ledger) == set(range(1, ledger.num_pages + 1))
    assert set(listed).isdisjoint(held(ledger))
    assert allocator.available_size() == len(listed) * allocator.page_size
    assert_counts_are_right(ledger)


def assert_counts_are_right(ledger):
    """Occupancy of every frame, and the report, recounted from the held pages and the padding page 0 alone."""
    geometry, pages = ledger.geometry, held(ledger)
    occupancy = [0] * ledger.num_frames
    for page in (0, *pages):
        occupancy[geometry.frame_of(page)] += 1
    assert list(ledger.occupancy) == occupancy
    report = ledger.occupancy_report()
    empty = {frame for frame in range(ledger.num_frames) if not occupancy[frame]}
    in_empty = sum(geometry.frame_of(page) in empty for page in range(1, ledger.num_pages + 1))
    assert (report.held_pages, report.empty_pages) == (len(pages), in_empty)
    assert report.stranded_pages == ledger.num_pages - len(pages) - in_empty
    assert (report.empty_frames, report.held_frames) == (len(empty), ledger.num_frames - len(empty))
    assert report.packed_floor == -(-len(pages) // geometry.pages_per_frame)


def lengths(*numbers):
    """A tensor twice, as SGLang passes lengths: for the device and for the host."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return tensor, tensor


def extend(tree, before, after, last_slots):
    """The slots that SGLang's scheduler gets for requests growing from `before` to `after` tokens."""
    new = sum(after) - sum(before)
    return alloc_paged_token_slots_extend(tree, *lengths(*before), *lengths(*after), torch.tensor(last_slots), new)


def decode(tree, next_lengths, last_slots):
    return alloc_paged_token_slots_decode(tree, *lengths(*next_lengths), torch.tensor(last_slots))


def evicted_tokens(c):
    return c.tree.eviction_counts.evicted_tokens
