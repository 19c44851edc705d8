"""What an allocation lacks is evicted, in whole pages, and nothing when it lacks nothing (`framed.py`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.adapter.caches import Request, Sizes, run
from tests.adapter.framed import (
    FRAMES,
    PLACEMENTS,
    assert_whole,
    decode,
    evicted_tokens,
    extend,
    framed,
)

pytestmark = pytest.mark.usefixtures("published_config")

A64, B64 = run(1000, 64), run(2000, 64)


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
