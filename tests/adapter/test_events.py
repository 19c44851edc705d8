"""KV cache events say what is in the tree, no more and no less (case C12).

A listener that only reads events must know every cached block. The hash of a block is computed here from the whole
prefix, with SGLang's own functions, and never taken from the tree.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

from radix_pages.order import ORDER_NAMES
from tests.adapter.caches import OURS, PLAIN, STOCK, Cache, Namespace, Request, build, run

pytestmark = pytest.mark.usefixtures("published_config")

SALTED, KEYED, BOTH = Namespace(None, "s"), Namespace("k"), Namespace("k", "s")


# What a listener knows


class Listener:
    """Replays an event stream; `blocks` counts the stored blocks by hash.

    Without LoRA names SGLang's plain format leaves the extra key out of a hash, so two namespaces may share one.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.blocks: Counter[int] = Counter()

    def listen(self) -> list:
        events = self.cache.tree.take_events()
        for event in events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for block_hash in event.block_hashes:
                    assert parent is None or self.blocks[parent], f"the parent of {block_hash} is not stored"
                    self.blocks[block_hash] += 1
                    parent = block_hash
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    assert self.blocks[block_hash], f"{block_hash} is removed, but not stored"
                    self.blocks[block_hash] -= 1
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks.clear()
        return events

    def known(self) -> Counter[int]:
        self.listen()
        return +self.blocks


def block_hashes(cache: Cache, tokens, namespace: Namespace = PLAIN, dynamo: bool = False) -> list[int]:
    """The hash of every whole page of a prefix."""
    salt = namespace.cache_salt
    start = None if salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).hexdigest()
    key = cache.key(tokens, namespace)
    key.is_bigram = cache.is_eagle
    pages = get_hash_str(key.page_aligned(cache.page_size), start, page_size=cache.page_size)
    seed = kv_event_namespace_seed(extra_key=namespace.extra_key, cache_salt=salt) if dynamo else None
    return [namespaced_block_hash(hash_str_to_int64(page), namespace_seed=seed) for page in pages]


def blocks_in(cache: Cache, dynamo: bool = False) -> Counter[int]:
    """The blocks of every node, from the tokens of its whole path."""
    found: Counter[int] = Counter()
    for node in cache.core.tree.nodes():
        tokens = [
            int.from_bytes(step.tokens[i : i + 8], "little")
            for step in cache.core.tree.path(node)
            for i in range(0, len(step.tokens), 8)
        ]
        if cache.is_eagle:
            tokens = [*tokens[::2], tokens[-1]]
        found.update(block_hashes(cache, tokens, Namespace(*node.namespace or PLAIN), dynamo)[node.start :])
    return found


# C12


def test_c12_events_mirror_the_tree():
    """A[12]; then A0-A1A2 split by a match; then A0-D; then nothing; then A[12] again; then reset."""
    c = build(OURS, page_size=4, events=True)
    tokens = run(1000, 12)

    c.insert(tokens)
    (stored,) = c.tree.take_events()
    first, second, third = stored.block_hashes
    assert stored == BlockStored(
        block_hashes=[first, second, third],
        parent_block_hash=None,
        token_ids=tokens,
        block_size=4,
        lora_id=None,
        medium=stored.medium,
    )
    assert len({first, second, third}) == 3

    assert c.matched(tokens[:4]) == 4
    assert c.tree.take_events() == []

    c.insert([*tokens[:4], *run(9000, 4)])
    (stored,) = c.tree.take_events()
    (fourth,) = stored.block_hashes
    assert (stored.parent_block_hash, stored.token_ids) == (first, run(9000, 4))

    assert c.evict(16) == 16
    removed = c.tree.take_events()
    assert {type(event) for event in removed} == {BlockRemoved}
    assert sorted(h for event in removed for h in event.block_hashes) == sorted([first, second, third, fourth])

    c.insert([7] * 12)
    (stored,) = c.tree.take_events()
    assert len(set(stored.block_hashes)) == 3

    c.reset()
    assert [type(event) for event in c.tree.take_events()] == [AllBlocksCleared]


def test_a_trimmed_tail_is_removed_block_by_block_and_the_rest_is_not():
    """A[12] loses its last page, then the one before."""
    c = build(OURS, page_size=4, events=True)
    c.insert(run(1000, 12))
    first, second, third = block_hashes(c, run(1000, 12))
    c.tree.take_events()
    for gone in (third, second, first):
        assert c.evict(4) == 4
        (removed,) = c.tree.take_events()
        assert removed.block_hashes == [gone]


def test_what_was_trimmed_is_stored_again_under_the_block_that_stayed():
    c = build(OURS, page_size=4, events=True)
    c.insert(run(1000, 12))
    c.evict(4)
    c.tree.take_events()
    c.insert(run(1000, 12))
    _, second, third = block_hashes(c, run(1000, 12))
    (stored,) = c.tree.take_events()
    assert (stored.parent_block_hash, stored.block_hashes) == (second, [third])


def test_the_second_insert_of_a_finished_request_stores_nothing():
    c = build(OURS, page_size=4, events=True)
    request = Request(c, run(1000, 8)).serve(run(2000, 9))
    assert [event.block_hashes for event in c.tree.take_events()] == [block_hashes(c, request.tokens[:16])]


def test_a_session_is_named_in_what_its_request_stored():
    c = build(OURS, page_size=4, events=True)
    request = Request(c, run(1000, 8))
    request.req.session_id = "s1"
    request.serve()
    assert [event.session_id for event in c.tree.take_events()] == ["s1"]


def test_no_events_are_kept_when_nobody_asked_for_them():
    c = build(OURS, page_size=4)
    c.insert(run(1000, 12))
    c.evict(4)
    assert c.tree.take_events() == []
    assert all(node.labels is None for node in c.core.tree.nodes())


# Namespaces


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_salt_makes_every_hash_of_equal_tokens_distinct(dynamo):
    c = build(OURS, page_size=4, events=True, dynamo=dynamo)
    for namespace in (PLAIN, SALTED, Namespace(None, "t")):
        c.insert(run(1000, 8), namespace)
    assert len({h for event in c.tree.take_events() for h in event.block_hashes}) == 6


def test_dynamos_format_makes_extra_keys_distinct_and_never_joins_key_and_salt():
    c = build(OURS, page_size=4, events=True, dynamo=True)
    for namespace in (PLAIN, KEYED, Namespace("l"), Namespace("ab", "c"), Namespace("a", "bc")):
        c.insert(run(1000, 8), namespace)
    assert len({h for event in c.tree.take_events() for h in event.block_hashes}) == 10


def test_the_plain_format_leaves_an_extra_key_without_a_lora_name_out():
    """As in stock: the namespace is the server's own business, only a LoRA name is published."""
    c = build(OURS, page_size=4, events=True)
    for namespace in (PLAIN, KEYED):
        c.insert(run(1000, 8), namespace)
    plain, keyed = c.tree.take_events()
    assert plain.block_hashes == keyed.block_hashes == block_hashes(c, run(1000, 8))


def test_the_plain_format_makes_an_extra_key_with_a_lora_name_distinct():
    c = build(OURS, page_size=4, events=True)
    request = Request(c, run(1000, 8), KEYED)
    request.req.lora_id = "id"
    c.core.kv_events.lora_names.register(request.req, "adapter")
    c.insert(run(1000, 8))
    request.serve()
    c.evict(16)
    plain, named, *removed = c.tree.take_events()
    assert (plain.lora_name, named.lora_name) == (None, "adapter")
    assert not set(plain.block_hashes) & set(named.block_hashes)
    gone = [h for event in removed for h in event.block_hashes]
    assert sorted(gone) == sorted(plain.block_hashes + named.block_hashes)


# Whatever happens


steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "match", "evict", "evict", "request", "lock", "reset"]),
        st.lists(st.integers(1, 2), min_size=2, max_size=24),
        st.sampled_from([PLAIN, PLAIN, KEYED, SALTED, BOTH]),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_listener_knows_the_blocks_of_the_tree_after_every_step(page_size, is_eagle, dynamo):
    """Splits, trims, evictions by an allocation, chunked requests, resets under a lock."""

    @settings(derandomize=True, database=None)
    @given(steps)
    def check(steps):
        c = build(
            OURS, page_size=page_size, pool_tokens=48, is_eagle=is_eagle, events=True, dynamo=dynamo, policy="fifo"
        )
        listener = Listener(c)
        locked = False
        for name, tokens, namespace in steps:
            if name == "insert" and not locked:
                c.insert(tokens, namespace)
            elif name == "match":
                c.match(tokens, namespace)
            elif name == "evict":
                c.evict(len(tokens))
            elif name == "request" and not locked:
                Request(c, tokens, namespace).admit().prefill(7).publish().abort()
            elif name == "lock":
                c.tree.lock(c.match(tokens, namespace).last_device_node)
                locked = True
            elif name == "reset":
                c.reset()
                locked = False
            assert listener.known() == blocks_in(c, dynamo)

    check()


# Beside stock


def flat(events) -> list[tuple]:
    """Events block by block: how they are batched is no claim."""
    told = []
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for number, block_hash in enumerate(event.block_hashes):
                tokens = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
                tokens = tuple(tuple(t) if isinstance(t, list) else t for t in tokens)
                told.append(("stored", block_hash, parent, tokens, event.cache_salt, event.lora_name, event.medium))
                parent = block_hash
        elif isinstance(event, BlockRemoved):
            told += [("removed", block_hash, event.medium) for block_hash in event.block_hashes]
        else:
            told.append(("cleared",))
    return told


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("backend", STOCK)
def test_the_same_inserts_and_splits_are_told_as_stock_tells_them(backend, page_size, is_eagle):
    """No eviction between: the same blocks with the same hashes, parents and tokens, in the same order."""
    rng = random.Random(3)
    ours, stock = (
        build(name, page_size=page_size, pool_tokens=1024, is_eagle=is_eagle, events=True) for name in (OURS, backend)
    )
    for _ in range(60):
        tokens, namespace = rng.choices([1, 2], k=rng.randint(2, 30)), rng.choice([PLAIN, KEYED, SALTED, BOTH])
        for c in (ours, stock):
            if len(tokens) % 3:
                Request(c, tokens, namespace).serve()
            else:
                c.match(tokens, namespace)
        assert flat(ours.tree.take_events()) == flat(stock.tree.take_events())
    ours.reset()
    stock.reset()
    assert flat(ours.tree.take_events()) == flat(stock.tree.take_events()) == [("cleared",)]


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("policy", ORDER_NAMES)
@pytest.mark.parametrize("backend", STOCK)
def test_the_same_evictions_are_told_as_stock_tells_them(backend, policy, dynamo):
    """Leaves of one page, so that both evict the same ones; removals are compared as a set for each eviction."""
    rng = random.Random(5)
    caches = [
        build(name, page_size=4, pool_tokens=64, policy=policy, events=True, dynamo=dynamo)
        for name in (OURS, backend)
    ]
    for _ in range(40):
        pages = [rng.choice("abc") for _ in range(rng.randint(1, 4))]
        namespace = rng.choice([PLAIN, KEYED, SALTED])
        for length in range(1, len(pages) + 1):
            tokens = [token for page in pages[:length] for token in run(1000 * ord(page), 4)]
            for c in caches:
                c.publish(tokens, namespace, counted_tokens=4 * (length - 1))
        told = [flat(c.tree.take_events()) for c in caches]
        assert sorted(told[0], key=str) == sorted(told[1], key=str)
        assert [t for t in told[0] if t[0] == "stored"] == [t for t in told[1] if t[0] == "stored"]
