"""Requests, tree, ledger and allocator against a plain model: who owns a page is never in doubt.

The requests are real and go through the calls that SGLang's scheduler makes. The model knows only the tokens of every
live request and, page by page, who owns it; KV is drawn (see `caches`), so a page that two owners write to is seen in
what the other one reads.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.adapter.caches import Namespace, Request, prefix_marks
from tests.adapter.framed import assert_whole, framed, held

pytestmark = pytest.mark.usefixtures("published_config")

POOL_PAGES = {1: 30, 4: 11}
"""By page size: room for two or three requests at a time."""
TOKENS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=24)
"""Two tokens only: requests share prefixes, and publish what another one published before."""
ROWS = 6
OUTPUT = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=8)
NAMESPACES = st.sampled_from([Namespace(), Namespace("tenant")])


class Ownership(RuleBasedStateMachine):
    """`live` are the requests that hold a row; everything else is in the tree or free."""

    page_size, frame_pages, placement = 4, 4, "pack"

    @initialize()
    def start(self) -> None:
        self.num_pages = POOL_PAGES[self.page_size]
        self.cache = framed(
            page_size=self.page_size,
            pool_tokens=self.num_pages * self.page_size,
            frame_pages=self.frame_pages,
            placement=self.placement,
            rows=ROWS,
        )
        self.live: list[Request] = []

    # -- what the model knows --

    def row(self, request: Request) -> list[int]:
        kv = request.req.kv
        return self.cache.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len].tolist()

    def own_pages(self, request: Request) -> set[int]:
        """Pages of this request that are not the tree's, the last one even if it has begun it only."""
        return {slot // self.page_size for slot in self.row(request)[request.req.kv.cache_protected_len :]}

    def owners(self) -> dict[int, list[str]]:
        """Every page of the pool with everybody who says that it is theirs."""
        owners: dict[int, list[str]] = {page: [] for page in range(1, self.num_pages + 1)}
        for page in self.cache.allocator.get_all_free_pages().tolist():
            owners[page].append("nobody")
        for page in (
            self.cache.core.all_values_flatten()[:: self.cache.core.page_size] // self.cache.core.page_size
        ).tolist():
            owners[page].append("the tree")
        for request in self.live:
            for page in self.own_pages(request):
                owners[page].append(request.req.rid)
        return owners

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def expecting(self, num_pages: int):
        """Whether `num_pages` more can be had, and how many tokens must be evicted for them: no page too many."""
        sizes = self.cache.sizes
        free, evictable = sizes.available // self.page_size, sizes.evictable // self.page_size
        missing = max(num_pages - free, 0)
        self.evicted_before = self.cache.tree.eviction_counts.evicted_tokens
        return missing <= evictable, missing * self.page_size

    def evicted(self) -> int:
        return self.cache.tree.eviction_counts.evicted_tokens - self.evicted_before

    def drawn(self, data, *, decoding: bool) -> Request:
        requests = [r for r in self.live if bool(r.num_left_to_prefill and not r.req.output_ids) != decoding]
        return data.draw(st.sampled_from(requests))

    def some(self, *, decoding: bool) -> bool:
        return any(bool(r.num_left_to_prefill and not r.req.output_ids) != decoding for r in self.live)

    # -- what requests do --

    @precondition(lambda self: len(self.live) < ROWS)
    @rule(tokens=TOKENS, namespace=NAMESPACES, chunk=st.integers(1, 24))
    def admit_and_prefill(self, tokens, namespace, chunk) -> None:
        """The first chunk of a prompt; one that finds no room is sent back before it owns anything."""
        request = Request(self.cache, tokens, namespace).admit()
        start = request.req.prefix_len
        stop = start + min(chunk, request.num_left_to_prefill)
        possible, to_evict = self.expecting(self.pages_of(stop) - self.pages_of(start))
        if not possible:
            self.cache.tree.unlock(request.req.lock)
            return
        request.prefill(chunk)
        self.live.append(request)
        assert self.evicted() == to_evict
        assert self.cache.holds_computed_kv(tokens, namespace)

    @precondition(lambda self: self.some(decoding=False))
    @rule(data=st.data(), chunk=st.integers(1, 24), publish_first=st.booleans())
    def prefill_another_chunk(self, data, chunk, publish_first) -> None:
        request = self.drawn(data, decoding=False)
        if publish_first:
            request.publish()
        else:
            request.req.prefix_len = request.req.extend_end
        start = request.req.prefix_len
        stop = start + min(chunk, request.num_left_to_prefill)
        possible, to_evict = self.expecting(self.pages_of(stop) - self.pages_of(start))
        if possible and stop > start:
            request.prefill(chunk)
            assert self.evicted() == to_evict

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def checkpoint(self, data) -> None:
        """Publishing moves pages to the tree or gives copies back; it never needs one."""
        request = data.draw(st.sampled_from([r for r in self.live if not r.req.output_ids] or [None]))
        if request is not None:
            available = self.cache.sizes.available
            request.publish()
            assert self.cache.sizes.available >= available

    @precondition(lambda self: self.some(decoding=True))
    @rule(data=st.data(), output=OUTPUT)
    def decode(self, data, output) -> None:
        request = self.drawn(data, decoding=True)
        for token in output:
            length = request.req.kv.kv_allocated_len
            more = bool(request.req.output_ids)
            possible, to_evict = self.expecting(self.pages_of(length + more) - self.pages_of(length))
            if not possible:
                return
            request.decode([token])
            assert self.evicted() == to_evict

    @precondition(lambda self: self.some(decoding=True))
    @rule(data=st.data())
    def finish(self, data) -> None:
        request = self.drawn(data, decoding=True)
        tokens, kept = request.tokens, request.req.kv.kv_committed_len
        request.finish()
        self.live.remove(request)
        whole = kept - kept % self.page_size
        assert self.cache.cached(tokens[:kept], request.namespace) == whole

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data) -> None:
        request = data.draw(st.sampled_from(self.live))
        own, available = self.own_pages(request), self.cache.sizes.available
        request.abort()
        self.live.remove(request)
        assert self.cache.sizes.available == available + len(own) * self.page_size

    @rule(tokens=TOKENS, namespace=NAMESPACES, output=OUTPUT)
    def a_whole_life(self, tokens, namespace, output) -> None:
        """It is let in when there is room for all that it will need, as a scheduler that never retracts would do."""
        request = Request(self.cache, tokens, namespace).admit()
        most = self.pages_of(len(tokens) + len(output)) - self.pages_of(request.req.prefix_len)
        possible, _ = self.expecting(most)
        if len(self.live) == ROWS or not possible:
            self.cache.tree.unlock(request.req.lock)
            return
        request.prefill().publish().decode(output).finish()

    # -- what others do --

    @rule(num_pages=st.integers(1, 8))
    def evict(self, num_pages) -> None:
        possible = min(num_pages * self.page_size, self.cache.sizes.evictable)
        assert self.cache.evict(num_pages * self.page_size) == possible

    @precondition(lambda self: not self.live)
    @rule()
    def flush(self) -> None:
        self.cache.reset()
        assert self.cache.sizes.available == self.num_pages * self.page_size

    # -- what must hold after every step --

    @invariant()
    def every_page_has_exactly_one_owner(self) -> None:
        if not hasattr(self, "cache"):
            return
        wrong = {page: owners for page, owners in self.owners().items() if len(owners) != 1}
        assert wrong == {}

    @invariant()
    def the_ledger_holds_what_somebody_owns(self) -> None:
        if not hasattr(self, "cache"):
            return
        owned = {page for page, owners in self.owners().items() if owners != ["nobody"]}
        assert held(self.cache.allocator.ledger()) == owned
        assert_whole(self.cache.allocator)

    @invariant()
    def sizes_add_up_to_the_pool(self) -> None:
        if not hasattr(self, "cache"):
            return
        counted = Counter(owner for owners in self.owners().values() for owner in owners)
        sizes = self.cache.sizes
        uncached = sum(request.held_tokens for request in self.live)
        assert sizes.available == counted["nobody"] * self.page_size
        assert sizes.evictable + sizes.protected == counted["the tree"] * self.page_size
        assert sizes.total + uncached == self.num_pages * self.page_size

    @invariant()
    def every_request_reads_the_kv_that_it_computed(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request in self.live:
            row = self.cache.rows.req_to_token[request.req.kv.req_pool_idx, : request.req.kv.kv_allocated_len]
            marks = prefix_marks(request.tokens[: len(row)], request.namespace)
            assert self.cache.marks_of(row.long()) == marks

    @invariant()
    def the_tree_agrees_with_itself_and_an_idle_recount_with_everybody(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.core.disagreements() == []
        if not self.live:
            assert self.cache.allocator.verify_byte_accounting() == []


@pytest.mark.parametrize("placement", ["pack", "stock"])
@pytest.mark.parametrize("frame_pages", [1, 4])
@pytest.mark.parametrize("page_size", [1, 4])
def test_every_page_has_one_owner_after_every_step(page_size, frame_pages, placement):
    choice = {"page_size": page_size, "frame_pages": frame_pages, "placement": placement}
    machine = type(f"Ownership_{page_size}_{frame_pages}_{placement}", (Ownership,), choice)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=60))
