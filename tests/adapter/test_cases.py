"""Cases from the field through the adapter, each with its one right answer (C12 stands in test_events.py).

A(16) and B(16) are keys of 16 tokens that share nothing; a drawing shows the leaves in eviction order.
"""

import re
from array import array

import pytest
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, EvictParams, TreeLock
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from radix_pages.order import ORDER_NAMES, Order, make_order
from radix_pages.results import TreeError, UnknownNodeError
from tests.adapter.caches import OURS, STOCK, Namespace, Request, Sizes, build, run

pytestmark = pytest.mark.usefixtures("published_config")

A, B, C = run(1000, 16), run(2000, 16), run(3000, 16)


# C3: a partial match refreshes what did not match


def test_c3_a_partial_match_leaves_the_unmatched_suffix_as_old_as_it_was():
    """A0[4]-A1[12] | B[16]: A1 is still the oldest leaf, so all 12 come from it."""
    c = build(OURS, page_size=4)
    c.insert(A)
    c.insert(B)
    assert c.matched(A[:4]) == 4
    assert c.evict(12) == 12
    assert (c.cached(A), c.cached(B)) == (4, 16)


@pytest.mark.parametrize("backend", STOCK)
def test_c3_differs_from_stock_on_purpose(backend):
    """When this fails, SGLang has changed and the differential tests may split nodes freely."""
    c = build(backend, page_size=4)
    c.insert(A)
    c.insert(B)
    c.match(A[:4])
    assert c.evict(12) == 16
    assert (c.cached(A), c.cached(B)) == (16, 0)


def test_c3_a_split_by_an_insert_leaves_the_suffix_as_old_as_it_was():
    """A0[4]-A1[12], A0-D[4] | B[16]: the insert of A0 D is no access to A1."""
    c = build(OURS, page_size=4)
    c.insert(A)
    c.insert(B)
    c.insert([*A[:4], *run(9000, 4)])
    assert c.evict(12) == 12
    assert (c.cached(A), c.cached(B), c.cached([*A[:4], *run(9000, 4)])) == (4, 16, 8)


def test_c3_a_request_that_ends_leaves_its_suffix_where_the_prompt_boundary_split_it():
    """A finished request inserts once more to split at its prompt; what lies behind the prompt is as old as B."""
    c = build(OURS, page_size=4)
    Request(c, A[:8]).serve(A[8:])
    c.insert(B)
    assert c.core.tree.num_nodes == 3
    assert c.evict(4) == 4
    assert (c.cached(A), c.cached(B)) == (8, 16)


@pytest.mark.parametrize(("policy", "survivors"), [("fifo", (4, 16, 16)), ("filo", (16, 16, 4))])
@pytest.mark.parametrize("split", ["match", "insert"])
def test_c3_a_split_makes_no_part_younger_or_older_under_fifo_and_filo(policy, survivors, split):
    """A came first, C last; both are split at 4 when all are there. The end of one of them goes, then its front."""
    c = build(OURS, page_size=4, policy=policy)
    for tokens in (A, B, C):
        c.insert(tokens)
    for tokens in (A, C):
        if split == "match":
            c.match(tokens[:4])
        else:
            c.insert(tokens[:4])
    assert c.evict(12) == 12
    assert (c.cached(A), c.cached(B), c.cached(C)) == survivors
    assert c.evict(4) == 4
    assert (c.cached(A), c.cached(B), c.cached(C)) == tuple(length - length % 16 for length in survivors)


# C4: one request counts as many hits


def test_c4_a_request_counts_one_hit_however_often_it_publishes():
    """A: 1 hit in four chunks, B: 2 hits of two requests; 16 tokens go, and they are A's."""
    c = build(OURS, page_size=4, policy="lfu")
    chunked = Request(c, A).admit()
    for _ in range(4):
        chunked.prefill(4).publish()
    chunked.finish()
    for _ in range(2):
        Request(c, B).serve()
    assert c.evict(16) == 16
    assert (c.cached(A), c.cached(B)) == (0, 16)


def test_c4_the_splitting_insert_at_the_prompt_counts_no_hit():
    """A prompt of 8 with an output: B0[8]-B1[4], split by the request's second insert, one hit each."""
    c = build(OURS, page_size=4, policy="lfu")
    Request(c, B[:8]).serve(B[8:])
    assert [(node.num_pages, node.hits) for node in c.core.tree.nodes()] == [(2, 1), (1, 1)]


def test_c4_every_further_request_is_one_hit_more_also_when_everything_matched():
    """A0[12]-A1[4]: a request matches all but its last token, so the second one splits there."""
    c = build(OURS, page_size=4, policy="lfu")
    for _ in range(3):
        Request(c, A).serve()
    assert [(node.num_pages, node.hits) for node in c.core.tree.nodes()] == [(3, 3), (1, 3)]


# C6: a whole leaf for one page


def test_c6_one_page_is_evicted_for_one_page():
    c = build(OURS, page_size=16, pool_tokens=1024)
    tokens = run(1, 1024)
    c.insert(tokens)
    assert c.evict(16) == 16
    assert c.sizes == Sizes(16, 1008, 0)
    assert c.matched(tokens) == 1008


def test_c6_less_than_a_page_is_a_page():
    c = build(OURS, page_size=16, pool_tokens=1024)
    tokens = run(1, 1024)
    c.insert(tokens)
    assert c.evict(1) == 16
    assert c.matched(tokens) == 1008


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_c6_an_allocation_evicts_the_pages_it_lacks(page_size):
    """Pool of 64, all cached by A; 32 are asked for with 16 free: 16 go, not all that is evictable."""
    c = build(OURS, page_size=page_size, pool_tokens=64)
    tokens = run(1, 64)
    c.insert(tokens)
    assert c.evict(16) == 16
    c.insert(run(7000, 32))
    assert (c.cached(tokens), c.cached(run(7000, 32))) == (32, 32)
    assert c.sizes == Sizes(0, 64, 0)


def test_c6_the_step_wise_walk_of_the_stock_controller_gets_the_same_answer():
    """SGLang's own `_evict` drives the core node by node; here it takes one step."""
    c = build(OURS, page_size=16, pool_tokens=1024)
    tokens = run(1, 1024)
    c.insert(tokens)
    assert UnifiedRadixCache.evict(c.tree, EvictParams(num_tokens=16)).num_tokens_evicted == 16
    assert c.sizes == Sizes(16, 1008, 0)
    assert UnifiedRadixCache.evict(c.tree, EvictParams(num_tokens=5000)).num_tokens_evicted == 1008
    assert c.sizes == Sizes(1024, 0, 0)


# C7: match, evict, then lock


def matched_and_evicted(page_size=4):
    c = build(OURS, page_size=page_size)
    c.insert(A[:8])
    node = c.match(A[:8]).last_device_node
    assert c.evict(8) == 8
    return c, node


def test_c7_locking_an_evicted_node_is_a_clear_error():
    c, node = matched_and_evicted()
    with pytest.raises(UnknownNodeError, match=f"node {node} is not in the tree: it was evicted .* match again"):
        c.tree.lock(node)
    assert c.sizes == Sizes(256, 0, 0)


def test_c7_unlocking_an_evicted_node_is_a_clear_error():
    c, node = matched_and_evicted()
    with pytest.raises(UnknownNodeError, match=f"node {node} is not in the tree"):
        c.tree.unlock(TreeLock(node, DecLockRefParams(node_id=node)))
    assert c.sizes == Sizes(256, 0, 0)


def test_c7_a_second_unlock_is_a_clear_error_and_sizes_stay_right():
    c = build(OURS, page_size=4)
    node = c.insert(A[:8]).last_device_node
    lock = c.tree.lock(node)
    assert c.sizes == Sizes(248, 0, 8)
    c.tree.unlock(lock)
    with pytest.raises(TreeError, match=f"node {node} holds no lock: it was unlocked more often than locked"):
        c.tree.unlock(lock)
    assert c.sizes == Sizes(248, 8, 0)


def test_c7_a_second_unlock_never_takes_the_lock_of_another_request():
    """Two requests lock A(8); one of them unlocks a child it never locked."""
    c = build(OURS, page_size=4)
    short = c.insert(A[:4]).last_device_node
    long = c.insert(A[:8]).last_device_node
    c.tree.lock(long)
    with pytest.raises(TreeError, match=f"node {short} holds no lock"):
        c.tree.unlock(TreeLock(short, DecLockRefParams(node_id=short)))
    assert c.sizes == Sizes(248, 0, 8)


def test_c7_a_receipt_opens_only_the_node_it_was_given_for():
    c = build(OURS, page_size=4)
    one, two = c.insert(A).last_device_node, c.insert(B).last_device_node
    lock = c.tree.lock(one)
    c.tree.lock(two)
    with pytest.raises(TreeError, match=f"lock receipt anchored on node {one} released on node {two}"):
        c.tree.unlock(TreeLock(two, lock.receipt))
    assert c.sizes == Sizes(224, 0, 32)


def test_c7_a_handle_from_before_a_trim_never_passes_for_the_longer_prefix():
    """A[16] is matched, its last 4 are evicted, and the old handle is locked."""
    c = build(OURS, page_size=4)
    c.insert(A)
    old = c.match(A).last_device_node
    assert c.evict(4) == 4
    with pytest.raises(UnknownNodeError, match=re.escape(f"node {old} is not in the tree")):
        c.tree.lock(old)
    assert c.sizes == Sizes(244, 12, 0)


def test_c7_what_a_trim_left_has_a_new_handle_that_works():
    c = build(OURS, page_size=4)
    c.insert(A)
    old = c.match(A).last_device_node
    c.evict(4)
    match = c.match(A)
    assert (match.device_prefix_len, match.last_device_node) == (12, match.best_match_node)
    assert match.last_device_node != old
    lock = c.tree.lock(match.last_device_node)
    assert c.sizes == Sizes(244, 0, 12)
    c.tree.unlock(lock)
    assert c.sizes == Sizes(244, 12, 0)


def test_c7_a_handle_survives_a_split_above_it():
    """Another request splits A at 4 between match and lock; the handle still ends at 16."""
    c = build(OURS, page_size=4)
    c.insert(A)
    node = c.match(A).last_device_node
    c.match(A[:4])
    c.tree.lock(node)
    assert len(c.tree.path_device_indices(node)) == 16
    assert c.sizes == Sizes(240, 0, 16)


# C8: eviction slows down with the cache


class CountingOrder(Order):
    """Counts how often a queue looks at a leaf's urgency."""

    def __init__(self, order):
        super().__init__(order.name, self._counted, touched_is_urgent=order.touched_is_urgent)
        self._key = order.key
        self.looks = 0

    def _counted(self, node):
        self.looks += 1
        return self._key(node)


def looks_per_round(monkeypatch, num_leaves, policy, num_rounds):
    """Keys looked at to evict 64 one-page leaves and insert 64, on average, from a full pool on."""
    order = CountingOrder(make_order(policy))
    monkeypatch.setattr("radix_pages_sglang.tree_core.make_order", lambda *args, **parameters: order)
    c = build(OURS, page_size=1, pool_tokens=num_leaves, policy=policy)
    for token in range(num_leaves):
        c.insert([token])
    before = order.looks
    for round_number in range(1, num_rounds + 1):
        assert c.evict(64) == 64
        for token in range(64):
            c.insert([1000 * num_leaves * round_number + token])
    assert c.sizes == Sizes(0, num_leaves, 0)
    return (order.looks - before) / num_rounds


@pytest.mark.parametrize("policy", ORDER_NAMES)
def test_c8_an_eviction_looks_at_as_many_leaves_in_a_large_cache_as_in_a_small_one(monkeypatch, policy):
    """At least 128 looks are needed a round: 64 leaves leave the queue and 64 enter it."""
    small = looks_per_round(monkeypatch, 256, policy, num_rounds=3)
    large = looks_per_round(monkeypatch, 4096, policy, num_rounds=3)
    assert large == small
    assert small < 4 * 64


# C9: one page owned twice


def test_c9_an_overwritten_span_leaves_the_tree_at_its_last_unlock():
    """A0[4]-A1[4] is published; the request rewrites A1 in the same slots, publishes again and ends."""
    c = build(OURS, page_size=4, pool_tokens=64, events=True)
    request = Request(c, A[:8]).admit().prefill().publish()
    assert c.sizes == Sizes(56, 0, 8)
    rewritten = [*A[:4], *B[:4]]
    request.req.origin_input_ids = array("q", rewritten)
    request.req.full_untruncated_fill_ids = array("q", rewritten)
    request.publish()
    assert (c.sizes, request.held_tokens) == (Sizes(56, 0, 8), 0)
    assert (c.cached(A[:8]), c.cached(rewritten)) == (4, 4)
    request.finish()
    assert c.sizes == Sizes(60, 4, 0)
    assert (c.cached(A[:8]), c.cached(rewritten)) == (4, 4)
    assert c.evict(64) == 4
    assert c.sizes == Sizes(64, 0, 0)
    assert c.free_pages() == list(range(1, 17))
    hashes = [(type(event), block_hash) for event in c.tree.take_events() for block_hash in event.block_hashes]
    stored = {block_hash for kind, block_hash in hashes if kind is BlockStored}
    assert sorted(hashes, key=str) == sorted([(k, h) for k in (BlockStored, BlockRemoved) for h in stored], key=str)


# C11: reset under a lock


def reset_under_a_lock():
    c = build(OURS, page_size=4)
    node = c.insert(A[:8]).last_device_node
    lock = c.tree.lock(node)
    c.reset()
    return c, lock


def test_c11_reset_voids_a_lock_and_the_later_unlock_is_the_error():
    c, lock = reset_under_a_lock()
    assert c.sizes == Sizes(256, 0, 0)
    with pytest.raises(UnknownNodeError, match=f"node {lock.node} is not in the tree: .* the cache was reset"):
        c.tree.unlock(lock)
    assert c.sizes == Sizes(256, 0, 0)


def test_c11_locking_a_handle_from_before_the_reset_is_the_error():
    c, lock = reset_under_a_lock()
    with pytest.raises(UnknownNodeError, match=f"node {lock.node} is not in the tree"):
        c.tree.lock(lock.node)
    assert c.sizes == Sizes(256, 0, 0)


def test_c11_ids_are_not_reused_after_a_reset_and_an_old_lock_never_opens_a_new_node():
    c, lock = reset_under_a_lock()
    seen = {lock.node}
    for _ in range(3):
        seen.add(c.core.root_node_handle())
        node = c.insert(A[:8]).last_device_node
        assert node not in seen
        seen.add(node)
        c.tree.lock(node)
        with pytest.raises(UnknownNodeError):
            c.tree.unlock(lock)
        assert c.sizes == Sizes(248, 0, 8)
        c.reset()
        assert c.core.root_node_handle() not in seen


def test_c11_the_cache_works_on_after_the_reset():
    c, _ = reset_under_a_lock()
    Request(c, A).serve()
    assert c.matched(A) == 16
    assert c.evict(16) == 16
    assert c.sizes == Sizes(256, 0, 0)


# C13: split nodes keep old storage


def bytes_behind(payloads):
    """Bytes of every distinct storage that these tensors keep alive."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in payloads}
    return sum(storages.values())


def payloads_of(c):
    return [node.payload for node in c.core.tree.nodes()]


def test_c13_splits_keep_the_bytes_that_the_tokens_need():
    c = build(OURS, pool_tokens=1024)
    tokens = run(1, 1024)
    c.insert(tokens)
    for length in (1000, 500, 100, 20, 4):
        assert c.matched(tokens[:length]) == length
    assert [len(payload) for payload in payloads_of(c)] == [4, 16, 80, 400, 500, 24]
    assert bytes_behind(payloads_of(c)) == 8 * 1024


def test_c13_trims_keep_the_bytes_that_the_rest_needs():
    """One slot after another is cut off a leaf; no storage of the longer leaf survives."""
    c = build(OURS, page_size=4, pool_tokens=1024)
    tokens = run(1, 1024)
    c.insert(tokens)
    for left in range(1020, 900, -4):
        assert c.evict(4) == 4
        assert bytes_behind(payloads_of(c)) == 8 * left


def test_c13_an_insert_keeps_no_row_alive():
    """A request's row is longer than what is new in the tree; only the new part is kept."""
    c = build(OURS, page_size=4)
    Request(c, A[:8]).serve()
    Request(c, [*A, *B]).serve(C)
    # prompt 32 + output 15 with KV, whole pages only
    assert c.sizes == Sizes(256 - 44, 44, 0)
    assert bytes_behind(payloads_of(c)) == 8 * 44


# namespaces: ("ab", "c") never meets ("a", "bc")


def test_extra_key_and_cache_salt_are_compared_as_a_pair_and_never_joined():
    c = build(OURS, page_size=4)
    spaces = [
        Namespace(),
        Namespace("ab", "c"),
        Namespace("a", "bc"),
        Namespace("abc", None),
        Namespace(None, "abc"),
        Namespace("", None),
    ]
    for number, namespace in enumerate(spaces):
        assert [c.cached(A, other) for other in spaces[number:]] == [0] * (len(spaces) - number)
        c.insert(A, namespace)
        assert all(c.holds_computed_kv(A, other) for other in spaces[: number + 1])
    assert c.sizes == Sizes(256 - 96, 96, 0)
