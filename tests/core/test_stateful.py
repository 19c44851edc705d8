"""The tree against a plain model: a dict from every cached path of pages to its slots, under every order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radix_pages.check import disagreements
from radix_pages.order import ORDER_NAMES, LeafQueue, make_order
from radix_pages.planner import plan_pages
from radix_pages.reclaim import reclaim
from radix_pages.results import UnknownNodeError
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry

LETTERS = st.text(alphabet="ab", max_size=12)
NAMESPACES = st.sampled_from([None, ("a", None), (None, "a"), ("", None)])
PAGE_SIZES = (1, 2, 3)


class TreeAgainstADict(RuleBasedStateMachine):
    """`self.cached[namespace, prefix]` is the slots of the last page of that prefix; nothing else is modelled."""

    order_name = "lru"

    @initialize(page_size=st.sampled_from(PAGE_SIZES))
    def start(self, page_size: int) -> None:
        self.geometry = Geometry(page_size, token_bytes=1)
        self.leaves = LeafQueue(make_order(self.order_name, page_size=page_size))
        self.tree = RadixTree(self.geometry, list, self.leaves)
        self.cached: dict[tuple, list[int]] = {}
        self.locked: list[tuple[int, tuple]] = []
        self.handles: dict[int, tuple] = {}
        self.next_slot = 0

    def prefixes(self, letters: str) -> list[str]:
        size = self.geometry.page_size
        return [letters[:stop] for stop in range(size, len(letters) + 1, size)]

    def matched_by_model(self, namespace, letters: str) -> int:
        matched = 0
        for prefix in self.prefixes(letters):
            if (namespace, prefix) not in self.cached:
                break
            matched += 1
        return matched

    @rule(letters=LETTERS, namespace=NAMESPACES, priority=st.integers(0, 2))
    def insert(self, letters: str, namespace, priority: int) -> None:
        slots = list(range(self.next_slot, self.next_slot + len(letters)))
        self.next_slot += len(letters)
        expected = self.matched_by_model(namespace, letters)
        done = self.tree.insert(letters.encode(), slots, namespace=namespace, priority=priority)
        assert done.matched_pages == expected
        size = self.geometry.page_size
        for prefix in self.prefixes(letters)[expected:]:
            self.cached[namespace, prefix] = slots[len(prefix) - size : len(prefix)]
        self.remember(done.node, namespace, letters)

    @rule(letters=LETTERS, namespace=NAMESPACES)
    def match(self, letters: str, namespace) -> None:
        found = self.tree.find(letters.encode(), namespace)
        match = self.tree.match(letters.encode(), namespace)
        assert found.num_pages == match.num_pages == self.matched_by_model(namespace, letters)
        prefixes = self.prefixes(letters)[: match.num_pages]
        slots = [slot for node in self.tree.path(match.node) for slot in node.payload]
        assert slots == [slot for prefix in prefixes for slot in self.cached[namespace, prefix]]
        self.remember(match.node, namespace, letters)

    def remember(self, node, namespace, letters: str) -> None:
        if node.parent is not None:
            size = self.geometry.page_size
            self.handles[node.id] = (namespace, letters[: (node.start + node.num_pages) * size])

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def lock(self, data) -> None:
        """A handle locks the very prefix that was matched, or fails."""
        handle = data.draw(st.sampled_from(sorted(self.handles)))
        path = self.handles[handle]
        try:
            node = self.tree.lock(handle)
        except UnknownNodeError:
            return
        assert path in self.cached
        assert (node.start + node.num_pages) * self.geometry.page_size == len(path[1])
        self.locked.append((handle, path))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data) -> None:
        handle, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(handle)

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        evictable = self.tree.evictable_pages
        plan = plan_pages(self.leaves, num_pages)
        removals = reclaim(self.tree, plan)
        gone = sum(removal.num_pages for removal in removals)
        assert gone == min(num_pages, evictable) == plan.num_pages
        assert plan.shortfall_pages == num_pages - gone
        payload = [slot for removal in removals for slot in removal.payload]
        held = {slot for slots in self.surviving().values() for slot in slots}
        dropped = {path: slots for path, slots in self.cached.items() if not held.issuperset(slots)}
        assert sorted(payload) == sorted(slot for slots in dropped.values() for slot in slots)
        for path in dropped:
            del self.cached[path]

    def surviving(self) -> dict[tuple, list[int]]:
        """The tree read back as the model is written."""
        size, pages = self.geometry.page_size, {}
        for node in self.tree.nodes():
            path = b"".join(step.tokens for step in self.tree.path(node)).decode()
            for page in range(node.num_pages):
                stop = (node.start + page + 1) * size
                pages[node.namespace, path[:stop]] = node.payload[page * size : (page + 1) * size]
        return pages

    @rule()
    def reset(self) -> None:
        self.tree.reset()
        for handle, _ in self.locked:
            with pytest.raises(UnknownNodeError):
                self.tree.unlock(handle)
        self.cached.clear()
        self.locked.clear()

    @invariant()
    def the_tree_is_what_the_model_says(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert disagreements(self.tree, self.leaves) == []
        assert self.surviving() == self.cached
        protected = {(namespace, prefix) for _, (namespace, path) in self.locked for prefix in self.prefixes(path)}
        assert protected <= set(self.cached)
        assert self.tree.protected_pages >= len(protected)
        if not protected:
            assert self.tree.protected_pages == 0

    @invariant()
    def a_plan_takes_the_most_urgent_leaf_first(self) -> None:
        if not hasattr(self, "tree"):
            return
        leaves = [node for node in self.tree.nodes() if node.is_leaf]
        plan = plan_pages(self.leaves, 1)
        key = self.leaves.order.key
        assert [e.leaf for e in plan.evictions] == sorted(leaves, key=lambda node: (key(node), node.id))[:1]


@pytest.mark.parametrize("order", ORDER_NAMES)
def test_the_tree_agrees_with_a_plain_dict_after_every_step(order):
    machine = type(f"TreeAgainstADict_{order}", (TreeAgainstADict,), {"order_name": order})
    run_state_machine_as_test(machine)
