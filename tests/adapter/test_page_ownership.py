"""Every page has one owner, whoever frees what and how often (`framed.py`)."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache

from radix_pages.ledger import LedgerError
from tests.adapter.caches import Request, Sizes, run
from tests.adapter.framed import PLACEMENTS, assert_whole, framed, our_allocator

pytestmark = pytest.mark.usefixtures("published_config")


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
