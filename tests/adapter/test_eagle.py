"""EAGLE: a position is a pair of neighbouring tokens, and a draft model's KV lies in the same slots as the target's.

N + 1 tokens make N pairs. The last token of a key has no pair yet, so its slot is never the tree's.
"""

import pytest
from hypothesis import given, settings

from radix_pages.order import ORDER_NAMES
from tests.adapter.caches import BACKENDS, OURS, Namespace, Request, Sizes, build, run
from tests.adapter.test_differential import Conversations, Requests, conversation_steps, hold, serve_under_pressure

pytestmark = pytest.mark.usefixtures("published_config")

A = run(1000, 9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_nine_tokens_are_eight_pairs(backend, page_size):
    c = build(backend, page_size=page_size, is_eagle=True)
    result = c.insert(A)
    assert (result.prefix_len, c.sizes) == (0, Sizes(248, 8, 0))
    assert c.matched(A) == 8
    assert len(c.tree.path_device_indices(result.last_device_node)) == 8
    assert c.insert(A).prefix_len == 8
    assert c.sizes == Sizes(248, 8, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shorter_key_misses_the_pair_it_cannot_form(backend):
    """A[:8] are seven pairs: seven match at page size 1, one page of four at page size 4."""
    for page_size, expected in ((1, 7), (4, 4)):
        c = build(backend, page_size=page_size, is_eagle=True)
        c.insert(A)
        assert c.matched(A[:8]) == expected
        assert c.matched(A[:1]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_tokens_do_not_match_where_the_pair_differs(backend):
    """1 2 3 4 5 and 1 2 3 4 9 share four tokens and three pairs: (4, 5) is not (4, 9)."""
    c = build(backend, is_eagle=True)
    c.insert([1, 2, 3, 4, 5])
    assert c.matched([1, 2, 3, 4, 9]) == 3
    assert c.insert([1, 2, 3, 4, 9]).prefix_len == 3
    assert c.sizes.evictable == 3 + 1 + 1
    assert (c.matched([1, 2, 3, 4, 5]), c.matched([1, 2, 3, 4, 9])) == (4, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_is_shared_only_with_the_token_that_follows_it(backend):
    """Page size 4: four equal tokens are no equal page, five are."""
    c = build(backend, page_size=4, is_eagle=True)
    c.insert(A)
    assert c.insert([*A[:4], *run(2000, 5)]).prefix_len == 0
    assert c.insert([*A[:5], *run(3000, 4)]).prefix_len == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_pairs_in_another_namespace_do_not_match(backend):
    c = build(backend, page_size=4, is_eagle=True)
    c.insert(A, Namespace("k"))
    assert (c.matched(A), c.matched(A, Namespace("k"))) == (0, 8)


def test_a_trim_takes_whole_pages_of_pairs():
    """A[9] holds two pages; one goes, and four pairs still match."""
    c = build(OURS, page_size=4, is_eagle=True)
    c.insert(A)
    assert c.evict(1) == 4
    assert c.matched(A) == 4
    assert c.sizes == Sizes(252, 4, 0)


def test_a_request_keeps_the_slot_of_its_last_token_until_it_ends():
    """Eight tokens are seven pairs: one page for the tree, the other stays the request's."""
    c = build(OURS, page_size=4, is_eagle=True)
    request = Request(c, A[:8]).admit().prefill().publish()
    assert (request.req.kv.cache_protected_len, request.held_tokens) == (4, 4)
    assert c.sizes == Sizes(248, 0, 4)
    request.finish()
    assert c.sizes == Sizes(252, 4, 0)


# Beside stock


class EagleRequests(Requests):
    """The same requests as without EAGLE."""

    is_eagle = True


TestEagleRequests = EagleRequests.TestCase
TestEagleRequests.settings = settings(derandomize=True, database=None)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", ORDER_NAMES)
def test_the_same_conversations_survive_evictions_with_eagle(policy, page_size):
    @settings(max_examples=4, database=None, derandomize=True)
    @given(conversation_steps)
    def check(steps):
        hold(Conversations(policy, page_size, is_eagle=True), steps)

    check()


# Draft pools


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_eviction_frees_every_slot_once_for_target_and_draft(page_size):
    """The draft's KV has no allocator of its own: its pool is indexed by the target's slots."""
    c = build(OURS, page_size=page_size, pool_tokens=64, is_eagle=True, num_drafts=1)
    c.insert(A)
    c.insert(run(2000, 17))
    assert c.holds_computed_kv(A)
    assert c.holds_computed_kv(run(2000, 17))
    assert c.evict(12) == 12
    assert c.cached(run(2000, 17)) == 12
    assert c.holds_computed_kv(run(2000, 17))
    assert c.evict(64) == 12
    assert c.free_pages() == list(range(1, 64 // page_size + 1))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_target_and_draft_agree_on_every_slot_under_pressure(page_size):
    """Slots that an eviction frees are written again in both pools; what stays cached is untouched in both."""
    serve_under_pressure(build(OURS, page_size=page_size, pool_tokens=192, is_eagle=True, num_drafts=1))
