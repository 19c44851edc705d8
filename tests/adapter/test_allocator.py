"""Our slot allocators in SGLang's place: its contracts, exact demand, and a ledger that agrees at every step.

Everything is SGLang's own (allocators, pools, requests, the functions its scheduler calls); only the allocator is
exchanged, by the function that a server's hook calls. `held` are the pages somebody owns, read off the ledger.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_decode, alloc_paged_token_slots_extend
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from radix_pages.ledger import Ledger, LedgerError
from radix_pages.units import Geometry
from radix_pages_sglang.allocator import RadixPagesPagedAllocator, RadixPagesTokenAllocator
from radix_pages_sglang.hooks import frame_aware
from radix_pages_sglang.page_store import DevicePages, HostPages
from tests.adapter import caches
from tests.adapter.caches import OURS, Request, Sizes, run

pytestmark = pytest.mark.usefixtures("published_config")

FRAMES = (1, 4, 64, 128)
PLACEMENTS = ("pack", "stock")
A64, B64 = run(1000, 64), run(2000, 64)


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


# C1: evicts when no page is needed (extend)


def one_request_and_one_prefix(frame_pages, placement):
    """Pool of 3 pages of 64: a request owns 63 slots of one, A(64) is cached, one is free."""
    c = framed(page_size=64, pool_tokens=192, frame_pages=frame_pages, placement=placement)
    own = c.allocator.alloc(64)
    c.insert(A64)
    assert c.sizes == Sizes(64, 64, 0)
    return c, own


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("frame_pages", FRAMES)
def test_c1_an_extend_into_a_page_with_room_evicts_nothing(frame_pages, placement):
    c, own = one_request_and_one_prefix(frame_pages, placement)
    slots = extend(c.tree, [63], [64], [own[62].item()])
    assert slots.tolist() == [own[63].item()]
    assert c.sizes == Sizes(64, 64, 0)
    assert c.matched(A64) == 64
    assert_whole(c.allocator)


def test_c1_the_free_page_is_used_before_anything_is_evicted():
    c, own = one_request_and_one_prefix(1, "pack")
    slots = extend(c.tree, [63], [65], [own[62].item()])
    assert slots[0] == own[63]
    assert c.sizes == Sizes(0, 64, 0)
    assert c.cached(A64) == 64


def test_c1_several_requests_together_evict_what_they_lack_to_the_page():
    """Pool of 8 pages of 4, 6 of them cached, one free: three requests add 0, 1 and 2 pages, so 2 are missing."""
    c = framed(page_size=4, pool_tokens=32)
    own = c.allocator.alloc(4)
    leaf = run(1, 24)
    c.insert(leaf)
    assert c.sizes == Sizes(4, 24, 0)
    slots = extend(c.tree, [2, 0, 0], [4, 3, 8], [own[1].item(), -1, -1])
    assert len(slots) == 13
    assert slots[:2].tolist() == own[2:].tolist()
    assert evicted_tokens(c) == 8
    assert c.sizes == Sizes(0, 16, 0)
    assert c.cached(leaf) == 16
    assert_whole(c.allocator)


def test_c1_requests_that_all_stay_in_their_pages_evict_nothing():
    c = framed(page_size=4, pool_tokens=32)
    own = c.allocator.alloc(16)
    c.insert(run(1, 16))
    assert c.sizes == Sizes(0, 16, 0)
    slots = extend(c.tree, [1, 2, 3, 1], [4, 3, 4, 2], [own[0].item(), own[5].item(), own[10].item(), own[12].item()])
    assert slots.tolist() == [*own[1:4].tolist(), own[6].item(), own[11].item(), own[13].item()]
    assert evicted_tokens(c) == 0


def test_c1_an_extend_that_cannot_be_met_says_so_and_harms_nothing():
    """SGLang's own error; whatever was evicted for it is free, and nothing is lost."""
    c = framed(page_size=4, pool_tokens=16)
    c.insert(run(1, 8))
    c.allocator.alloc(4)
    with pytest.raises(RuntimeError, match="out of memory"):
        extend(c.tree, [0], [20], [-1])
    assert c.sizes.available + c.sizes.evictable == 12
    assert_whole(c.allocator)


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
def test_at_page_size_1_an_allocation_evicts_the_tokens_it_lacks(num_tokens):
    c = framed(page_size=1, pool_tokens=32)
    leaf = run(1, 30)
    c.insert(leaf)
    Request(c, run(100, num_tokens)).admit().prefill()
    assert evicted_tokens(c) == max(num_tokens - 2, 0)
    assert c.cached(leaf) == 30 - max(num_tokens - 2, 0)


# C2: evicts when no page is needed (decode)


def two_requests_and_two_prefixes(frame_pages=1, placement="pack"):
    """Pool of 4 pages of 64: two requests with 9 and 19 tokens own one each, A(64) and B(64) are cached."""
    c = framed(page_size=64, pool_tokens=256, frame_pages=frame_pages, placement=placement)
    own = c.allocator.alloc(128)
    c.insert(A64)
    c.insert(B64)
    assert c.sizes == Sizes(0, 128, 0)
    return c, own


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("frame_pages", FRAMES)
def test_c2_a_decode_step_inside_the_pages_evicts_nothing(frame_pages, placement):
    c, own = two_requests_and_two_prefixes(frame_pages, placement)
    slots = decode(c.tree, [10, 20], [own[8].item(), own[64 + 18].item()])
    assert slots.tolist() == [own[9].item(), own[64 + 19].item()]
    assert c.sizes == Sizes(0, 128, 0)
    assert (c.cached(A64), c.cached(B64)) == (64, 64)
    assert_whole(c.allocator)


def batch_of(c, *committed_lengths):
    """The fields of a ScheduleBatch that its own memory check reads."""
    reqs = [SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n), beam_group=None) for n in committed_lengths]
    batch = SimpleNamespace(
        reqs=reqs,
        token_to_kv_pool_allocator=c.allocator,
        tree_cache=c.tree,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.new_tokens_required_next_decode = lambda chosen: ScheduleBatch.new_tokens_required_next_decode(
        batch, chosen
    )
    return batch


def test_c2_the_memory_check_before_a_decode_step_evicts_nothing():
    c, own = two_requests_and_two_prefixes()
    batch = batch_of(c, 9, 19)
    assert ScheduleBatch.check_decode_mem(batch)
    decode(c.tree, [10, 20], [own[8].item(), own[64 + 18].item()])
    assert c.sizes == Sizes(0, 128, 0)
    assert (c.cached(A64), c.cached(B64)) == (64, 64)


def test_c2_the_memory_check_evicts_one_page_for_the_one_request_that_needs_one():
    c, own = two_requests_and_two_prefixes()
    batch = batch_of(c, 64, 19)
    assert ScheduleBatch.check_decode_mem(batch)
    assert c.sizes == Sizes(64, 64, 0)
    slots = decode(c.tree, [65, 20], [own[63].item(), own[64 + 18].item()])
    assert slots[1] == own[64 + 19]
    assert c.sizes == Sizes(0, 64, 0)
    assert evicted_tokens(c) == 64
    assert (c.cached(A64), c.cached(B64)) == (0, 64)


def test_c2_the_memory_check_says_no_when_nothing_is_left_to_evict():
    c, _ = two_requests_and_two_prefixes()
    batch = batch_of(c, 64, 64, 64)
    assert not ScheduleBatch.check_decode_mem(batch)
    assert c.sizes == Sizes(128, 0, 0)


def test_c2_a_decode_step_without_a_memory_check_before_it_evicts_what_it_lacks():
    """SGLang asks for one page a request ahead of the step; what is evicted is the one page that is missing."""
    c, own = two_requests_and_two_prefixes()
    slots = decode(c.tree, [65, 20], [own[63].item(), own[64 + 18].item()])
    assert evicted_tokens(c) == 64
    assert c.sizes == Sizes(0, 64, 0)
    assert slots[0] % 64 == 0
    assert slots[1] == own[64 + 19]


def test_c2_a_decode_step_that_cannot_be_met_says_so():
    c, own = two_requests_and_two_prefixes()
    c.evict(128)
    c.allocator.alloc(128)
    with pytest.raises(RuntimeError, match="Decode out of memory"):
        decode(c.tree, [65, 20], [own[63].item(), own[64 + 18].item()])
    assert_whole(c.allocator)


def test_a_running_request_decodes_to_its_end_and_evicts_one_page_for_each_it_begins():
    """Pool of 16 pages of 4, full: 2 of a request, 14 cached. 12 more tokens are 3 pages more."""
    c = framed(page_size=4, pool_tokens=64)
    request = Request(c, run(9000, 8)).admit().prefill()
    old = run(1, 56)
    c.insert(old)
    assert c.sizes.available == 0
    request.decode(run(9500, 13))
    assert evicted_tokens(c) == 12
    assert c.cached(old) == 44
    assert request.held_tokens == 20
    assert c.sizes.total + request.held_tokens == 64
    request.finish()
    assert c.sizes.total == 64
    assert c.allocator.verify_byte_accounting() == []


# C5: tokens freed, no memory freed


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_c5_lru_alone_empties_no_frame_and_the_ledger_says_so(placement):
    """One-token leaves in slots 1 to 256, frames of 8 slots; slots 8, 16, .. 256 stay: 32, one a frame."""
    c = framed(page_size=1, pool_tokens=256, frame_pages=8, placement=placement)
    for token in range(1, 257):
        c.insert([token])
    slots = [c.match([token]) and c.tree.path_device_indices(c.match([token]).last_device_node) for token in (1, 256)]
    assert [int(slot) for slot in slots] == [1, 256]
    kept = range(8, 257, 8)
    for token in kept:
        assert c.matched([token]) == 1
    emptied_before = c.allocator.ledger().frames_emptied
    assert c.evict(224) == 224
    assert [c.cached([token]) for token in kept] == [1] * 32
    ledger = c.allocator.ledger()
    report = ledger.occupancy_report()
    assert ledger.frames_emptied == emptied_before == 0
    assert (report.held_pages, report.held_frames, report.empty_frames) == (32, 33, 0)
    assert (report.stranded_pages, report.empty_pages) == (224, 0)
    assert report.packed_floor == 4  # 28 of the 32 frames beside the first could be empty
    assert_whole(c.allocator)


# C9: one page owned twice

OLD, NEW = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 50, 60, 70, 80]


def test_c9_an_insert_over_slots_that_the_tree_has_for_other_tokens_is_declined():
    """Two pages of 4; the second one's tokens are rewritten in the same slots."""
    c = framed(page_size=4, pool_tokens=64)
    slots = c.allocator.alloc(8)
    node = c.tree.insert(InsertParams(key=c.key(OLD), value=slots)).last_device_node
    lock = c.tree.lock(node)
    assert c.sizes == Sizes(56, 0, 8)
    again = c.tree.insert(InsertParams(key=c.key(NEW), value=slots, prev_prefix_len=8))
    assert again.rotation_tail_declined
    assert (c.sizes, c.sizes.total) == (Sizes(56, 0, 8), 64)
    assert (c.cached(OLD), c.cached(NEW)) == (4, 4)
    assert_whole(c.allocator)
    c.tree.unlock(lock)
    assert c.sizes == Sizes(60, 4, 0)  # the overwritten page left with its lock
    assert_whole(c.allocator)
    assert c.allocator.verify_byte_accounting() == []
    assert c.evict(64) == 4
    assert c.sizes == Sizes(64, 0, 0)
    assert_whole(c.allocator)


def rewriting_request(c, length=8):
    """A real request that published OLD and then put NEW's tokens into the same slots."""
    request = Request(c, OLD[:length]).admit().prefill().publish()
    request.req.origin_input_ids[:] = type(request.req.origin_input_ids)("q", NEW[:length])
    request.req.full_untruncated_fill_ids = request.req.origin_input_ids[:]
    row = c.rows.req_to_token[request.req.kv.req_pool_idx, :length].to(torch.int64)
    c.compute(row, NEW[:length])
    return request


def test_c9_a_request_that_rewrites_its_last_page_leaves_no_page_owned_twice():
    c = framed(page_size=4, pool_tokens=64)
    request = rewriting_request(c)
    assert c.sizes == Sizes(56, 0, 8)
    checkpoint_kv_cache(request.req, c.tree)
    assert c.sizes == Sizes(56, 0, 8)
    assert (c.cached(OLD), c.cached(NEW)) == (4, 4)
    assert_whole(c.allocator)
    request.finish()
    assert c.sizes.total == 64
    assert c.cached(OLD) == 4
    assert c.holds_computed_kv(OLD[:4])
    assert_whole(c.allocator)
    assert c.allocator.verify_byte_accounting() == []
    c.evict(64)
    assert c.sizes == Sizes(64, 0, 0)
    assert_whole(c.allocator)


def test_c9_the_overwritten_span_stays_for_whoever_else_locked_it_and_leaves_with_the_last_lock():
    """Another request runs on the old tokens; its lock keeps their page, which nobody can match any more."""
    c = framed(page_size=4, pool_tokens=64)
    other = rewriting_request(c)
    reader = c.tree.lock(other.req.last_node)
    checkpoint_kv_cache(other.req, c.tree)
    other.finish()
    assert c.sizes == Sizes(56, 0, 8)
    assert c.cached(OLD) == 4
    c.tree.unlock(reader)
    assert c.sizes == Sizes(60, 4, 0)
    assert_whole(c.allocator)
    assert c.allocator.verify_byte_accounting() == []


def test_c9_a_request_goes_on_after_its_insert_was_declined():
    """It decodes three pages more; none of them enters the tree, all come back."""
    c = framed(page_size=4, pool_tokens=64)
    request = rewriting_request(c)
    checkpoint_kv_cache(request.req, c.tree)
    request.decode(run(500, 13))
    assert c.sizes.total + request.held_tokens == 64
    assert_whole(c.allocator)
    request.finish()
    assert c.sizes.total == 64
    assert c.cached(OLD) == 4
    assert c.allocator.verify_byte_accounting() == []


# C10: silent double free


def named(pages, page_size):
    """How an error names pages: at page_size 1 as slots."""
    return rf"(slots|pages) {', '.join(map(str, pages))}\b" if page_size == 1 else rf"pages {pages[0]}\b"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_c10_a_second_free_is_an_error_that_names_the_slots(placement):
    allocator = our_allocator(1, 8, placement=placement)
    slots = allocator.alloc(4)
    allocator.free(slots)
    with pytest.raises(LedgerError, match=f"slots {', '.join(map(str, slots.tolist()))} .*freed twice"):
        allocator.free(slots)
    assert allocator.available_size() == 8
    assert_whole(allocator)


@pytest.mark.parametrize("call", ["free", "free_segment", "free_page_ids"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_c10_every_way_to_free_a_page_twice_is_an_error_and_changes_nothing(page_size, call):
    allocator = our_allocator(page_size, 8)
    slots = allocator.alloc(4 * page_size)
    pages = torch.unique(slots // page_size)
    kept, gone = pages[:2], pages[2:]

    def release(which):
        if call == "free_page_ids":
            allocator.free_page_ids(which)
            return
        chosen = torch.cat([slots[slots // page_size == page] for page in which])
        if call == "free":
            allocator.free(chosen)
        else:
            allocator.free_segment(chosen, start_pos=0)

    release(gone)
    assert allocator.available_size() == 6 * page_size
    with pytest.raises(LedgerError, match=named(gone.tolist(), page_size)):
        release(torch.cat([kept, gone]))
    assert allocator.available_size() == 6 * page_size
    assert_whole(allocator)
    release(kept)
    assert allocator.available_size() == 8 * page_size


def test_c10_one_page_named_twice_in_one_call_is_an_error():
    allocator = our_allocator(4, 8)
    page = allocator.alloc(4)[:1] // 4
    with pytest.raises(LedgerError, match=f"pages {page.item()} .*twice"):
        allocator.free_page_ids(torch.cat([page, page]))
    assert allocator.available_size() == 28
    assert_whole(allocator)


@pytest.mark.parametrize("page_size", [1, 4])
def test_c10_the_padding_page_and_pages_beyond_the_pool_cannot_be_freed(page_size):
    allocator = our_allocator(page_size, 8)
    allocator.alloc(8 * page_size)
    for page in (0, 9, -1):
        with pytest.raises(LedgerError, match=f"{page}\\b"):
            allocator.free_page_ids(torch.tensor([page]))
    assert allocator.available_size() == 0


# C14: freeing one slot frees its page


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_c14_a_page_comes_back_with_its_last_slot(placement):
    allocator = our_allocator(4, 4, placement=placement)
    slots = allocator.alloc(4)
    page = slots[0].item() // 4
    for freed in range(3):
        allocator.free(slots[freed : freed + 1])
        assert allocator.available_size() == 12
        assert allocator.ledger().live_slots(page) == 3 - freed
        assert_whole(allocator)
    allocator.free(slots[3:])
    assert allocator.available_size() == 16
    assert_whole(allocator)


def test_c14_slots_of_several_pages_are_counted_apart():
    allocator = our_allocator(4, 4)
    slots = allocator.alloc(12)
    allocator.free(slots[[0, 1, 2, 3, 4, 11]])
    assert allocator.available_size() == 8
    allocator.free(slots[[5, 6, 7, 8, 9]])
    assert allocator.available_size() == 12
    allocator.free(slots[10:11])
    assert allocator.available_size() == 16


def test_c14_one_slot_freed_twice_is_an_error_that_names_it():
    allocator = our_allocator(4, 4)
    slots = allocator.alloc(4)
    allocator.free(slots[1:2])
    with pytest.raises(LedgerError, match=f"slots {slots[1]} .*twice"):
        allocator.free(slots[:2])
    allocator.free(slots[:1])
    allocator.free(slots[2:])
    assert allocator.available_size() == 16
    assert_whole(allocator)


def test_c14_a_slot_of_a_free_page_is_an_error():
    allocator = our_allocator(4, 4)
    slots = allocator.alloc(4)
    allocator.free_segment(slots, start_pos=0)
    with pytest.raises(LedgerError):
        allocator.free(slots[:1])
    assert allocator.available_size() == 16


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_c14_a_segment_frees_whole_pages_the_last_one_too(length):
    """As `release_kv_cache` relies on: what is left of the last page is nobody's."""
    allocator = our_allocator(4, 4)
    slots = allocator.alloc(8)
    allocator.free_segment(slots[:length], start_pos=0)
    assert allocator.available_size() == 8 + 4 * (1 if length <= 4 else 2)
    assert_whole(allocator)


def test_c14_sglangs_debug_mode_changes_nothing(monkeypatch):
    """SGLANG_DEBUG_MEMORY_POOL looks through the free list after every call."""
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    allocator = our_allocator(4, 4)
    assert allocator.debug_mode
    slots = allocator.alloc(16)
    allocator.free_segment(slots[:6], start_pos=0)
    allocator.free_page_ids(slots[8:9] // 4)
    allocator.free(slots[12:14])
    allocator.free(slots[14:])
    assert allocator.available_size() == 16


def test_c14_page_ids_free_whole_pages():
    allocator = our_allocator(4, 4)
    slots = allocator.alloc(8)
    allocator.free_page_ids(slots[:1] // 4)
    assert allocator.available_size() == 12


def test_c14_segments_of_one_row_free_every_page_once():
    allocator = our_allocator(4, 8)
    row = allocator.alloc(24)
    allocator.free_segments([(row[:6], 0), (row[8:9], 8), (row[16:], 16)])
    assert allocator.available_size() == 32 - 4
    with pytest.raises(AssertionError, match="shares a page"):
        allocator.free_segments([(row[12:13], 12), (row[14:15], 14)])


@pytest.mark.parametrize("start_pos", [1, 3, 5])
def test_c14_a_segment_that_begins_inside_a_page_is_refused(start_pos):
    allocator = our_allocator(4, 4)
    row = allocator.alloc(8)
    with pytest.raises((AssertionError, ValueError), match=str(start_pos)):
        allocator.free_segment(row[start_pos:], start_pos=start_pos)
    assert allocator.available_size() == 8


def test_c14_a_page_released_as_a_whole_forgets_which_slots_were_freed_before():
    """One slot is freed, then the page, then it serves another request: three frees leave one slot alive."""
    allocator = our_allocator(4, 1)
    slots = allocator.alloc(4)
    allocator.free(slots[:1])
    allocator.free_segment(slots, start_pos=0)
    again = allocator.alloc(4)
    allocator.free(again[1:])
    assert allocator.available_size() == 0
    allocator.free(again[:1])
    assert allocator.available_size() == 4


def test_freeing_nothing_is_nothing():
    for page_size in (1, 4):
        allocator = our_allocator(page_size, 4)
        nothing = torch.empty(0, dtype=torch.int64)
        allocator.free(nothing)
        allocator.free_page_ids(nothing)
        allocator.free_segment(nothing, start_pos=0)
        allocator.free_segments([])
        assert allocator.available_size() == 4 * page_size


# free groups


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_free_group_frees_at_its_end_what_its_callers_meant_when_they_called(page_size):
    """The tensors are changed after the call, as a scheduler reuses its rows; the group has copies."""
    allocator = our_allocator(page_size, 8)
    slots = allocator.alloc(6 * page_size)
    allocator.free_group_begin()
    one, two, three = slots[: 2 * page_size].clone(), slots[2 * page_size : 4 * page_size].clone(), slots[-1:].clone()
    allocator.free(one)
    allocator.free_segment(two, start_pos=2 * page_size)
    ids = three // page_size
    allocator.free_page_ids(ids)
    for tensor in (one, two, ids):
        tensor.zero_()
    assert allocator.available_size() == 2 * page_size
    allocator.free_group_end()
    assert allocator.available_size() == 7 * page_size
    assert_whole(allocator)
    allocator.free_group_begin()
    allocator.free_group_end()
    assert allocator.available_size() == 7 * page_size


def test_a_free_group_counts_single_slots_as_one_call_would():
    allocator = our_allocator(4, 4)
    slots = allocator.alloc(8)
    allocator.free_group_begin()
    for slot in (0, 1, 2, 3, 4):
        allocator.free(slots[slot : slot + 1])
    allocator.free_group_end()
    assert allocator.available_size() == 12
    assert allocator.ledger().live_slots(slots[4].item() // 4) == 3


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_double_free_inside_a_group_is_the_error_at_its_end(page_size):
    allocator = our_allocator(page_size, 8)
    slots = allocator.alloc(2 * page_size)
    allocator.free_group_begin()
    allocator.free_segment(slots, start_pos=0)
    allocator.free_segment(slots, start_pos=0)
    with pytest.raises(LedgerError, match="twice"):
        allocator.free_group_end()
    assert allocator.available_size() == 6 * page_size


# slots as SGLang's


def structure(slots, before, after, last_slots, page_size):
    """Slots with page names taken out: what goes on in a request's last page, and the order of its new ones."""
    names: dict[int, int] = {}
    described, at = [], 0
    for start, stop, last in zip(before, after, last_slots, strict=True):
        for slot in slots[at : at + stop - start]:
            page, place = divmod(slot, page_size)
            if start % page_size and page == last // page_size:
                described.append(("last page", place))
            else:
                described.append((names.setdefault(page, len(names)), place))
        at += stop - start
    assert at == len(slots)
    return described


class Rows:
    """Requests that grow, shrink and end on one allocator; only lengths are decided outside."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.rows: dict[int, list[int]] = {}

    def last_slots(self, names):
        return [self.rows[name][-1] if self.rows[name] else -1 for name in names]

    def extend(self, names, new_tokens):
        before = [len(self.rows.setdefault(name, [])) for name in names]
        after = [length + new for length, new in zip(before, new_tokens, strict=True)]
        last = self.last_slots(names)
        slots = self.allocator.alloc_extend(
            *lengths(*before), *lengths(*after), torch.tensor(last, dtype=torch.int64), sum(new_tokens)
        )
        return self._take(slots, names, before, after, last)

    def decode(self, names):
        before = [len(self.rows[name]) for name in names]
        after = [length + 1 for length in before]
        last = self.last_slots(names)
        slots = self.allocator.alloc_decode(*lengths(*after), torch.tensor(last, dtype=torch.int64))
        return self._take(slots, names, before, after, last)

    def end(self, name):
        row = torch.tensor(self.rows.pop(name), dtype=torch.int64)
        self.allocator.free_segment(row, start_pos=0)

    def _take(self, slots, names, before, after, last):
        if slots is None:
            return None
        assert slots.dtype == torch.int64
        found, at = slots.tolist(), 0
        described = structure(found, before, after, last, self.allocator.page_size)
        for name, start, stop in zip(names, before, after, strict=True):
            self.rows[name] += found[at : at + stop - start]
            at += stop - start
        return described

    def assert_rows_are_pages(self):
        """Every row fills its pages from the first slot on, and no page serves two rows."""
        page_size, seen = self.allocator.page_size, []
        for row in self.rows.values():
            assert [slot % page_size for slot in row] == [place % page_size for place in range(len(row))]
            pages = [row[place] // page_size for place in range(0, len(row), page_size)]
            assert all(slot // page_size == pages[place // page_size] for place, slot in enumerate(row))
            seen += pages
        assert len(set(seen)) == len(seen)
        assert held(self.allocator.ledger()) == set(seen)


def grow_and_end_at_random(both, seed, steps):
    """The same random requests on both; yields what each step gave them."""
    rng = random.Random(seed)
    names: list[int] = []
    for step in range(steps):
        roll = rng.random()
        if roll < 0.35 or not names:
            chosen = [*rng.sample(names, min(len(names), rng.randrange(3))), *range(1000 * step, 1000 * step + 2)]
            new_tokens = [rng.choice([1, 2, 3, 4, 5, 15, 16, 17, 40]) for _ in chosen]
            got = [rows.extend(chosen, new_tokens) for rows in both]
            if got[0] is not None:
                names += [name for name in chosen if name not in names]
            else:
                for rows in both:
                    for name in chosen:
                        if not rows.rows[name]:
                            del rows.rows[name]
            yield got
        elif roll < 0.8:
            yield [rows.decode(names) for rows in both]
        else:
            gone = names.pop(rng.randrange(len(names)))
            for rows in both:
                rows.end(gone)
            yield [None, None]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("frame_pages", FRAMES)
@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_slots_mean_what_stocks_mean_while_requests_grow_and_end(page_size, frame_pages, placement):
    """256 pages, which run out now and then: both refuse the same steps."""
    ours = Rows(our_allocator(page_size, 256, frame_pages=frame_pages, placement=placement))
    stock = Rows(stock_allocator(page_size, 256))
    refused = 0
    for got, expected in grow_and_end_at_random((ours, stock), seed=page_size, steps=150):
        assert got == expected
        refused += expected is None
        assert ours.allocator.available_size() == stock.allocator.available_size()
        ours.assert_rows_are_pages()
    assert_whole(ours.allocator)
    assert refused


def same_calls_on_both(page_size, seed):
    """Allocations and frees of every kind, random but legal, on ours with stock's order and on stock's."""
    ours, stock = our_allocator(page_size, 64, placement="stock"), stock_allocator(page_size, 64)
    rng = random.Random(seed)
    owned: list[torch.Tensor] = []
    for _ in range(200):
        roll = rng.random()
        if roll < 0.5:
            room = page_size * rng.randrange(1, 9)
            got, expected = ours.alloc(room), stock.alloc(room)
            yield got, expected
            if expected is not None:
                owned.append(expected)
        elif owned:
            slots = owned.pop(rng.randrange(len(owned)))
            how = rng.randrange(4)
            for allocator in (ours, stock):
                if how == 0:
                    allocator.free(slots)
                elif how == 1:
                    allocator.free_segment(slots, start_pos=0)
                elif how == 2:
                    allocator.free_page_ids(slots[::page_size] // page_size)
                else:
                    allocator.free_group_begin()
                    allocator.free_segment(slots, start_pos=0)
                    allocator.free_group_end()
        yield ours.free_pages, stock.free_pages


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_placement_stock_hands_out_the_very_pages_that_sglang_would(page_size, seed):
    for got, expected in same_calls_on_both(page_size, seed):
        assert (got is None) == (expected is None)
        assert got is None or got.tolist() == expected.tolist()


def test_placement_stock_gives_batches_the_very_slots_that_sglang_would():
    ours = Rows(our_allocator(16, 256, placement="stock"))
    stock = Rows(stock_allocator(16, 256))
    for _ in grow_and_end_at_random((ours, stock), seed=7, steps=150):
        assert ours.rows == stock.rows
        assert ours.allocator.free_pages.tolist() == stock.allocator.free_pages.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_placement_stock_puts_freed_slots_back_in_the_order_of_their_pages(seed):
    """`free` takes slots in any order; SGLang sorts the pages before it puts them in front."""
    ours, stock = our_allocator(4, 32, placement="stock"), stock_allocator(4, 32)
    slots = [allocator.alloc(64) for allocator in (ours, stock)][1]
    pages = slots.view(-1, 4)[random.Random(seed).sample(range(16), 5)]
    for allocator in (ours, stock):
        allocator.free(pages.flatten())
    assert ours.free_pages.tolist() == stock.free_pages.tolist()


def test_slots_are_int64_also_when_a_requests_last_one_is_read_off_its_int32_row():
    """As `alloc_for_decode` reads it; SGLang's allocators answer int64."""
    last = [torch.tensor([4 * 9 + 3, 4 * 2 + 1], dtype=dtype) for dtype in (torch.int32, torch.int64)]
    for allocator in (our_allocator(4, 16), stock_allocator(4, 16)):
        allocator.alloc(40)
        inside, beyond = (allocator.alloc_decode(*lengths(length, 3), last[0]) for length in (4, 5))
        assert (inside.dtype, beyond.dtype) == (torch.int64, torch.int64)
        extended = allocator.alloc_extend(*lengths(4, 2), *lengths(9, 3), last[0], 6)
        assert extended.dtype == torch.int64


def test_alloc_gives_whole_pages_in_order():
    allocator = our_allocator(4, 8)
    slots = allocator.alloc(12)
    assert slots.dtype == torch.int64
    assert torch.equal(slots % 4, torch.arange(12) % 4)
    assert len(torch.unique(slots // 4)) == 3
    assert allocator.alloc(24) is None
    assert allocator.available_size() == 20
    assert_whole(allocator)


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


# the device's store and the host's


class Shadow:
    """Who should hold what, from what a store handed out and took back."""

    def __init__(self, store):
        self.store = store
        self.owned: dict[int, list[int]] = {}
        self.half_freed: dict[int, int] = {}

    def take(self, name, count):
        pages = self.store.take([count]).tolist()
        assert len(pages) == count
        assert self.pages.isdisjoint(pages)
        self.owned[name] = pages

    def take_batch(self, names, counts):
        pages = self.store.take(counts).tolist()
        for name, count in zip(names, counts, strict=True):
            self.owned[name], pages = pages[:count], pages[count:]

    def give(self, name):
        pages = self.owned.pop(name)
        for page in pages:
            self.half_freed.pop(page, None)
        self.store.give(torch.tensor(pages, dtype=torch.int64))

    def give_slots_of_first_page(self, name, count, page_size):
        """The next `count` slots of the first page; with the last one the page goes."""
        page = self.owned[name][0]
        start = self.half_freed.get(page, 0)
        stop = min(start + count, page_size)
        self.store.give_slots(torch.arange(page * page_size + start, page * page_size + stop))
        self.half_freed[page] = stop
        if stop == page_size:
            del self.half_freed[page]
            del self.owned[name][0]

    @property
    def pages(self):
        return {page for pages in self.owned.values() for page in pages}

    def assert_agrees(self):
        ledger = self.store.ledger()
        assert held(ledger) == self.pages
        assert_counts_are_right(ledger)
        free = self.store.free_pages().tolist()
        assert len(set(free)) == len(free) == self.store.num_free
        assert set(free) | self.pages == set(range(1, ledger.num_pages + 1))
        return ledger


def drive(shadows, seed, *, page_size, num_pages, whole_pages_only=False):
    rng = random.Random(seed)
    for step in range(300):
        names = list(shadows[0].owned)
        free = shadows[0].store.num_free
        roll = rng.random()
        if roll < 0.4 and free:
            count = rng.randrange(1, min(free, num_pages // 6) + 1)
            for shadow in shadows:
                shadow.take(step, count)
        elif roll < 0.5 and free >= 8:
            counts = [rng.randrange(3) for _ in range(4)]
            for shadow in shadows:
                shadow.take_batch([f"{step}.{i}" for i in range(4)], counts)
        elif roll < 0.85 and names:
            name = rng.choice(names)
            for shadow in shadows:
                shadow.give(name)
        elif names and not whole_pages_only:
            name, count = rng.choice(names), rng.randrange(1, page_size + 1)
            for shadow in shadows:
                if shadow.owned[name]:
                    shadow.give_slots_of_first_page(name, count, page_size)
        elif rng.random() < 0.05:
            for shadow in shadows:
                shadow.store.clear()
                shadow.owned.clear()
                shadow.half_freed.clear()
        yield


def both_stores(page_size, frame_pages, num_pages, placement):
    geometry = Geometry(page_size, pages_per_frame=frame_pages)
    device = DevicePages(geometry, num_pages, placement, torch.device("cpu"))
    return Shadow(HostPages(geometry, num_pages, placement)), Shadow(device)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("page_size", "frame_pages"), [(1, 1), (1, 16), (4, 1), (4, 4), (16, 64), (16, 128)])
def test_the_devices_store_keeps_the_ledger_that_the_hosts_keeps(page_size, frame_pages, placement):
    """Driven on CPU tensors. Which pages they choose may differ; what is held, and its count, may not."""
    host, device = both_stores(page_size, frame_pages, 300, placement)
    for _ in drive((host, device), frame_pages, page_size=page_size, num_pages=300):
        ledgers = [host.assert_agrees(), device.assert_agrees()]
        assert host.store.num_free == device.store.num_free
        assert ledgers[0].num_held == ledgers[1].num_held
        assert ledgers[0].occupancy_report().packed_floor == ledgers[1].occupancy_report().packed_floor
        if placement == "stock":
            assert host.store.free_pages().tolist() == device.store.free_pages().tolist()
            assert ledgers[0].occupancy_report() == ledgers[1].occupancy_report()


@pytest.mark.parametrize("which", [0, 1], ids=["host", "device"])
def test_a_store_forgets_which_slots_of_a_page_were_freed_once_it_is_released_as_a_whole(which):
    """One slot of the page, the page, and in its next life three slots: one is still alive."""
    store = both_stores(4, 4, 1, "pack")[which].store
    page = store.take([1])
    store.give_slots(page * 4)
    store.give(page)
    assert store.take([1]).tolist() == page.tolist()
    store.give_slots(page * 4 + torch.arange(1, 4))
    assert store.num_free == 0
    store.give_slots(page * 4)
    assert store.num_free == 1


def test_the_devices_store_packs_too():
    """Frames of 4: pages 5 and 9, 10 are free beside an empty frame 3; three pages leave that one empty."""
    store = DevicePages(Geometry(4, pages_per_frame=4), 15, "pack", torch.device("cpu"))
    store.take([15])
    store.give(torch.tensor([12, 13, 14, 15, 10, 9, 5]))
    assert store.take([3]).tolist() == [5, 9, 10]
    assert store.ledger().occupancy_report().empty_frames == 1


def test_the_devices_store_names_a_double_free_when_it_is_read():
    store = DevicePages(Geometry(4, pages_per_frame=4), 15, "pack", torch.device("cpu"))
    pages = store.take([3])
    store.give(pages)
    store.give(pages[:1])
    with pytest.raises(LedgerError, match=rf"pages \[{pages[0]}\] are in the free list more than once"):
        store.ledger()


@pytest.mark.parametrize("kind", [HostPages, DevicePages])
def test_a_store_can_be_made_again_in_another_size(kind):
    device = () if kind is HostPages else (torch.device("cpu"),)
    store = kind(Geometry(4, pages_per_frame=4), 15, "pack", *device)
    store.take([9])
    other = store.resized(40)
    assert (other.num_pages, other.num_free, type(other)) == (40, 40, kind)
    assert isinstance(other.ledger(), Ledger)
    assert other.ledger().num_held == 0


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
