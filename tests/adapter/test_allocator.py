"""Our slot allocators in SGLang's place: its contracts, and a ledger that agrees at every step.

Everything is SGLang's own (allocators, pools, requests, the functions its scheduler calls); only the allocator is
exchanged, by the function that a server's hook calls (`framed.py`).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.common import release_kv_cache

from radix_pages_sglang.allocator import RadixPagesPagedAllocator, RadixPagesTokenAllocator
from radix_pages_sglang.hooks import frame_aware
from tests.adapter.caches import Request, Sizes, run
from tests.adapter.framed import (
    FRAMES,
    PLACEMENTS,
    assert_whole,
    extend,
    framed,
    lengths,
    our_allocator,
)

pytestmark = pytest.mark.usefixtures("published_config")


# in place of SGLang's


@pytest.mark.parametrize(("page_size", "kind"), [(1, RadixPagesTokenAllocator), (16, RadixPagesPagedAllocator)])
def test_ours_is_a_kind_of_the_stock_allocator_over_the_same_pool(page_size, kind):
    c = framed(page_size=page_size)
    assert type(c.allocator) is kind
    assert isinstance(c.allocator, TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator)
    assert c.allocator.get_kvcache() is c.kv_pools[0]
    assert (c.allocator.size, c.allocator.page_size, c.allocator.size_full) == (256, page_size, 256)
    assert c.allocator.cache is c.tree


def test_other_kinds_of_allocators_are_left_alone():
    class Other(PagedTokenToKVPoolAllocator):
        pass

    other = Other(64, page_size=4, dtype=torch.float16, device="cpu", kvcache=None, need_sort=False)
    assert frame_aware(other) is other


@pytest.mark.parametrize("frame_pages", FRAMES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_fresh_pool_is_free_and_frame_0_never_counts_as_empty(page_size, frame_pages):
    """512 pages and the padding page, which holds frame 0; the last frame is a short one."""
    allocator = our_allocator(page_size, 512, frame_pages=frame_pages)
    assert_whole(allocator)
    report = allocator.ledger().occupancy_report()
    in_frame_0 = frame_pages - 1
    assert (report.held_pages, report.held_frames) == (0, 1)
    assert (report.empty_pages, report.stranded_pages) == (512 - in_frame_0, in_frame_0)
    assert report.empty_frames == 512 // frame_pages


# placement


@pytest.mark.parametrize("frame_pages", [4, 64, 128])
def test_pack_fills_a_frame_before_it_opens_another(frame_pages):
    """Half of two frames is freed and a third one empty; as many new pages as the halves hold leave it empty."""
    allocator = our_allocator(4, 4 * frame_pages - 1, frame_pages=frame_pages)
    slots = allocator.alloc(allocator.size)
    pages = torch.arange(1, 4 * frame_pages)
    allocator.free_page_ids(pages[pages >= 3 * frame_pages])
    allocator.free_page_ids(pages[(pages >= frame_pages) & (pages < 3 * frame_pages) & (pages % 2 == 0)])
    assert allocator.ledger().occupancy_report().empty_frames == 1
    for _ in range(frame_pages):
        allocator.alloc(4)
    report = allocator.ledger().occupancy_report()
    assert (report.empty_frames, report.stranded_pages) == (1, 0)
    assert len(slots) == allocator.size
    assert_whole(allocator)


def test_pack_gives_a_request_pages_of_one_frame_where_one_has_room_for_all():
    """Frames of 4: frame 1 has room for one page, frame 2 for two; two pages go to frame 2, side by side."""
    allocator = our_allocator(4, 15)
    allocator.alloc(60)
    allocator.free_page_ids(torch.tensor([6, 9, 10]))
    assert (allocator.alloc(8)[::4] // 4).tolist() == [9, 10]
    assert (allocator.alloc(4)[::4] // 4).tolist() == [6]


def test_pack_puts_a_decode_page_beside_its_own_request():
    """Frames of 4: the request lies in frame 2, and frame 1 is as full."""
    allocator = our_allocator(4, 15)
    allocator.alloc(60)
    allocator.free_page_ids(torch.tensor([5, 10]))
    slots = allocator.alloc_decode(*lengths(5), torch.tensor([4 * 9 + 3]))
    assert slots.tolist() == [4 * 10]


# lists and life cycle


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_free_list_cannot_be_replaced(page_size):
    allocator = our_allocator(page_size, 8)
    with pytest.raises(AttributeError, match="free_page_ids"):
        allocator.free_pages = torch.arange(3)
    assert_whole(allocator)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_clear_makes_everything_free_and_forgets_open_groups_and_half_freed_pages(page_size, placement):
    allocator = our_allocator(page_size, 16, placement=placement)
    slots = allocator.alloc(8 * page_size)
    allocator.free(slots[:1])
    allocator.free_group_begin()
    allocator.free(slots[page_size : 2 * page_size])
    allocator.clear()
    assert allocator.available_size() == 16 * page_size
    assert_whole(allocator)
    allocator.free_group_begin()
    allocator.free_group_end()
    again = allocator.alloc(16 * page_size)
    assert len(torch.unique(again)) == 16 * page_size
    allocator.free(again)
    assert allocator.available_size() == 16 * page_size


@pytest.mark.parametrize("num_tokens", [64, 512])
@pytest.mark.parametrize("page_size", [1, 4])
def test_resize_makes_a_free_pool_of_the_new_size(page_size, num_tokens):
    """As SGLang does it after it has captured its graphs, when it knows how much memory is left."""
    allocator = our_allocator(page_size, 256 // page_size)
    allocator.alloc(64)
    allocator.resize(SimpleNamespace(max_total_num_tokens=num_tokens))
    assert allocator.size == allocator.available_size() == num_tokens
    assert allocator.ledger().num_pages == num_tokens // page_size
    assert_whole(allocator)
    assert len(torch.unique(allocator.alloc(num_tokens))) == num_tokens
    assert allocator.alloc(page_size) is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_allocator_that_sorts_its_frees_has_them_at_hand_all_the_same(page_size):
    """With need_sort, SGLang's keeps frees aside until an allocation runs short."""
    allocator = our_allocator(page_size, 8, need_sort=True)
    assert allocator.need_sort
    slots = allocator.alloc(8 * page_size)
    allocator.free(slots[: 4 * page_size])
    assert_whole(allocator)
    allocator.merge_and_sort_free()
    assert_whole(allocator)
    assert len(allocator.alloc(4 * page_size)) == 4 * page_size
    assert allocator.available_size() == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_cache_and_its_allocator_start_afresh_after_a_flush(page_size):
    c = framed(page_size=page_size)
    Request(c, run(1, 32)).serve(run(100, 9))
    c.reset()
    assert c.sizes == Sizes(256, 0, 0)
    assert_whole(c.allocator)
    assert c.allocator.verify_byte_accounting() == []


# the recount at idle


def idle_cache():
    """Pool of 16 pages of 4 with 6 cached; an idle server."""
    c = framed(page_size=4, pool_tokens=64)
    c.insert(run(1, 16))
    c.insert(run(100, 8))
    assert c.allocator.verify_byte_accounting() == []
    return c


def page_in_tree(c, which=0):
    return c.core.geometry.page_of(c.core.all_values_flatten()[:: c.core.geometry.page_size]).tolist()[which]


def test_the_recount_names_a_page_that_was_freed_behind_the_trees_back():
    c = idle_cache()
    page = page_in_tree(c)
    c.allocator.free_page_ids(torch.tensor([page]))
    assert c.allocator.verify_byte_accounting() == [f"page {page} belongs to the tree and is free"]


def test_the_recount_names_leaked_pages():
    c = idle_cache()
    leaked = sorted(set((c.allocator.alloc(8) // 4).tolist()))
    assert c.allocator.verify_byte_accounting() == [f"2 pages are held by nobody: {leaked}"]


def test_the_recount_names_a_page_that_is_in_the_tree_twice():
    """A second node is given the slots of the first one; its own page is then nobody's."""
    c = idle_cache()
    slots = c.allocator.alloc(4)
    own = slots[0].item() // 4
    c.tree.insert(InsertParams(key=c.key(run(500, 4)), value=slots))
    twice = page_in_tree(c)
    node = c.core.tree.node(c.match(run(500, 4)).last_device_node)
    node.payload = torch.arange(4 * twice, 4 * twice + 4)
    found = c.allocator.verify_byte_accounting()
    assert any(f"slot {4 * twice} is in nodes [" in line and str(node.id) in line for line in found)
    assert f"1 pages are held by nobody: [{own}]" in found


def test_a_healthy_idle_cache_is_recounted_without_a_word_after_every_kind_of_call():
    c = framed(page_size=4, pool_tokens=64)
    for turn in range(12):
        Request(c, run(1000 * (turn % 3), 10 + turn)).serve(run(50, 5))
        assert c.allocator.verify_byte_accounting() == []
    c.evict(8)
    assert c.allocator.verify_byte_accounting() == []


def test_without_a_cache_there_is_nothing_to_recount():
    assert our_allocator(4, 8).verify_byte_accounting() == []


# never mind who asks


def test_a_disabled_cache_is_not_asked_for_room():
    """--disable-radix-cache: SGLang names a cache that shares nothing."""
    allocator = our_allocator(4, 4)

    class Disabled:
        token_to_kv_pool_allocator = allocator

        def supports_prefix_sharing(self):
            return False

        def available_and_evictable_str(self):
            return ""

        def pretty_print(self):
            pass

    assert len(extend(Disabled(), [0], [16], [-1])) == 16
    with pytest.raises(RuntimeError, match="out of memory"):
        extend(Disabled(), [0], [1], [-1])
    assert not allocator.check_decode_capacity(num_tokens=4, tree_cache=Disabled())
    assert not allocator.check_decode_capacity(num_tokens=4, tree_cache=None)
    assert allocator.check_decode_capacity(num_tokens=0, tree_cache=None)


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_eviction_gives_its_pages_to_the_allocator_at_once(page_size):
    c = framed(page_size=page_size)
    c.insert(run(1, 64))
    assert c.tree.evict(EvictParams(num_tokens=20)).num_tokens_evicted == 20
    assert c.sizes == Sizes(212, 44, 0)
    assert_whole(c.allocator)
    assert c.allocator.verify_byte_accounting() == []


def test_a_released_request_gives_back_the_page_that_it_had_begun():
    """13 tokens are 4 pages of 4; the last one holds a single token. Nothing is published."""
    c = framed(page_size=4, pool_tokens=64)
    request = Request(c, run(1, 13)).admit().prefill()
    assert c.sizes == Sizes(48, 0, 0)
    release_kv_cache(request.req, c.tree, checkpoint=False)
    assert c.sizes == Sizes(64, 0, 0)
    assert_whole(c.allocator)
