"""Which prompts and chunks are admitted on memory that is there, and how long answers may be (`returning.py`)."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from radix_pages_sglang.budget import CommittedPrefillBudget
from tests.adapter.caches import Request, run
from tests.adapter.framed import framed
from tests.adapter.returning import FRAME, admits, assert_sound, budget, evicted, frames, residency, returning

pytestmark = pytest.mark.usefixtures("published_config")

A16 = run(1000, 16)

# admission


def may_allocate(found, num_tokens):
    return found.can_allocate_prefill(
        paged_input=num_tokens, extend_input_len=num_tokens, max_new_tokens=0, chunk_limit=None
    )


def fitted(found, num_tokens, limit):
    return found.fit_chunk(extend_input_len=num_tokens, max_new_tokens=0, chunk_limit=limit)


def test_only_a_backed_pool_has_a_budget_of_its_own():
    assert type(budget(returning())) is CommittedPrefillBudget
    plain = framed()
    assert type(plain.allocator.create_prefill_budget(plain.tree)) is PrefillBudget


def test_admitting_a_request_commits_the_memory_of_its_prompt():
    """Its 16 tokens and the page that SGLang allows for rounding."""
    c = returning()
    assert admits(budget(c), 16, new_tokens=40) == (True, None)
    assert frames(c).startswith("#. .. .. --")


def test_what_was_admitted_before_counts():
    c = returning()
    found = budget(c, num_mixed_decode_tokens=2)
    assert admits(found, 8)[0]
    found.reserve(8, 20)
    assert found.current_offset == 14
    assert admits(found, 9)[0]
    assert c.allocator.committed_size() >= 14 + 12 + 4
    assert may_allocate(found, 20)
    assert c.allocator.committed_size() >= 14 + 20 + 4


def test_only_the_next_chunk_needs_memory_now():
    c = returning()
    assert admits(budget(c), 60, chunk_limit=8) == (True, 8)
    assert frames(c).startswith("#. .. --")


def test_a_prompt_larger_than_the_pool_is_not_admitted_and_commits_nothing():
    c = returning()
    assert admits(budget(c), 121) == (False, None)
    assert not may_allocate(budget(c), 125)
    assert frames(c) == " ".join(["#.", *["--"] * 15])


def test_without_memory_a_request_waits_and_with_it_gets_in():
    c = returning()
    residency(c).backing.fail_next()
    assert [admits(budget(c), 16)[0] for _ in range(3)] == [False, False, True]
    residency(c).backing.fail_next()
    assert [may_allocate(budget(c), 40) for _ in range(3)] == [False, False, True]


def test_memory_of_evictable_pages_is_good_enough():
    """20 tokens are cached; 16 and 4 for rounding are asked for, of 24 that have memory."""
    c = returning()
    c.insert(run(1000, 20))
    residency(c).backing.fail_next(1000)
    assert admits(budget(c), 16)[0]
    assert not admits(budget(c), 17)[0]
    assert len(Request(c, run(5000, 20)).admit().prefill().tokens) == 20


def test_pages_that_the_ceiling_withholds_are_no_room():
    c = returning(max_resident_bytes=4 * FRAME)
    found = budget(c)
    assert (found.remaining_total, found.remaining_current) == (28, 28)
    assert found.has_capacity()
    assert admits(found, 23) == (True, None)
    assert admits(found, 24) == (False, None)
    assert residency(c).committed_frames == 4


def test_a_chunk_is_whole_where_its_memory_can_be_had():
    c = returning()
    assert fitted(budget(c), 100, 32) == 32
    assert fitted(budget(c), 10, 32) == 32
    assert c.allocator.committed_size() == 36


@pytest.mark.parametrize(("limit", "fits"), [(16, 16), (20, 20), (24, 20), (64, 20), (7, 7)])
def test_a_chunk_is_shorter_where_memory_is_short(limit, fits):
    """28 tokens can have memory; 4 are another request's, 4 for rounding."""
    c = returning(max_resident_bytes=4 * FRAME)
    c.allocator.alloc(4)
    assert fitted(budget(c), 100, limit) == fits
    assert fits % 4 == 0 or fits == limit


def test_a_chunk_counts_what_can_be_evicted_and_what_was_admitted():
    c = returning(max_resident_bytes=4 * FRAME)
    c.insert(A16)
    found = budget(c)
    found.reserve(4, 0)
    assert fitted(found, 100, 64) == 28 - 8 - 4
    c.tree.evict_surplus(16)
    assert fitted(found, 100, 64) == 28 - 8 - 4


def test_a_chunk_waits_where_not_even_a_page_has_memory():
    c = returning()
    c.allocator.alloc(4)
    residency(c).backing.fail_next()
    assert [fitted(budget(c), 100, 32) for _ in range(3)] == [None, None, 32]


def test_what_fits_can_be_allocated():
    """Chunk by chunk to the very end of what the ceiling allows."""
    c = returning(max_resident_bytes=6 * FRAME)
    request = Request(c, run(1, 40)).admit()
    for expected in (12, 12, 12, 4):
        chunk = fitted(budget(c), request.num_left_to_prefill, 12)
        assert min(chunk, request.num_left_to_prefill) == expected
        request.prefill(chunk)
        request.req.prefix_len = request.req.extend_end
    assert request.num_left_to_prefill == 0
    assert fitted(budget(c), 1, 12) is None
    assert evicted(c) == 0
    request.abort()
    assert_sound(c)


# how long a request may be


def longest(c, num_tokens, new_tokens=10_000):
    return c.allocator.max_new_tokens_for_memory(
        num_tokens, new_tokens, token_capacity=124, sliding_window_size=None, chunk_size=None
    )


def test_without_a_ceiling_answers_are_as_long_as_sglang_allows():
    c = returning()
    assert longest(c, 20) == 124 - 20 - 4 - 1
    assert longest(c, 200) == 0
    assert longest(c, 20, 7) == 7
    assert c.allocator.fits_alone(10_000) is False
    assert framed().allocator.fits_alone(10_000)


def test_a_ceiling_shortens_answers_and_refuses_prompts_that_can_never_fit():
    c = returning(max_resident_bytes=4 * FRAME)
    assert longest(c, 20) == 28 - 20 - 4 - 1
    assert longest(c, 23) == 0
    assert longest(c, 24) is None


@pytest.mark.parametrize("max_frames", [2, 3, 7, 15, 16])
def test_what_fits_alone_is_what_an_empty_pool_admits(max_frames):
    c = returning(max_resident_bytes=max_frames * FRAME)
    for num_tokens in range(1, 130):
        residency(c).trim()
        assert admits(budget(c), num_tokens)[0] == c.allocator.fits_alone(num_tokens), num_tokens


@pytest.mark.parametrize("num_tokens", [1, 5, 8, 19, 23])
def test_the_longest_answer_that_is_promised_can_be_given(num_tokens):
    """With room for all of it, or else by evicting what others left."""
    c = returning(max_resident_bytes=4 * FRAME)
    c.insert(run(9000, 24))
    answer = longest(c, num_tokens)
    assert admits(budget(c), num_tokens, new_tokens=answer)[0]
    Request(c, run(1, num_tokens)).serve(run(500, answer))
    assert residency(c).committed_frames <= 4
    assert_sound(c)
