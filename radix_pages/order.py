"""Eviction orders, and the queue that keeps leaves in one of them without rebuilding or scanning.

The queue is a heap that is repaired only where somebody looks. That is right as long as an entry is never *less*
urgent than its node: an entry that is too urgent is met early and filed again, one that is not urgent enough
would be met too late. Why each order keeps that:

    lru       an access raises `tick`: less urgent
    lfu       hits and ticks only grow: less urgent
    slru      as lfu; crossing the threshold once, upwards
    fifo      the key is `created`, which never changes
    filo      the same, negated
    priority  an insert can only raise a priority; ticks grow
    mru       an access makes a leaf MORE urgent, so `touched_is_urgent` tells the tree to offer the leaf again
    tlru      a deeper branch makes a node less urgent; a split moves a suffix's start, which can make it more
              urgent, and the tree offers the suffix again at every split
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from radix_pages.node import Node

Key: TypeAlias = Any
"""What an order compares: an int or a tuple of ints, the same shape for every node; smaller goes first."""


class Order:
    """How urgent it is to evict a leaf: `key(node)`, smaller first; equal keys go by node id."""

    def __init__(self, name: str, key: Callable[[Node], Key], *, touched_is_urgent: bool = False) -> None:
        self.name = name
        self.key = key
        self.touched_is_urgent = touched_is_urgent


def _slru(page_size: int, protected_threshold: int = 2) -> Order:
    return Order("slru", lambda node: (node.hits >= protected_threshold, node.tick))


def _tlru(page_size: int, threshold: float = 0, next_prompt_estimate: float = 0) -> Order:
    """Tail-optimised LRU (arXiv:2510.15152's idea as SGLang has it); both parameters are in tokens.

    A branch that once was L tokens deep needs only L + next_prompt_estimate - threshold tokens cached to stay
    within its time to first token. Nodes that start beyond that go first, the rest by recency.
    """

    def key(node: Node) -> Key:
        needed = max(node.branch * page_size + next_prompt_estimate - threshold, 0)
        return (node.start * page_size < needed, node.tick)

    return Order("tlru", key)


_ORDERS: dict[str, tuple[Callable[..., Order], tuple[str, ...]]] = {
    "lru": (lambda page_size: Order("lru", lambda node: node.tick), ()),
    "lfu": (lambda page_size: Order("lfu", lambda node: (node.hits, node.tick)), ()),
    "slru": (_slru, ("protected_threshold",)),
    "fifo": (lambda page_size: Order("fifo", lambda node: node.created), ()),
    "mru": (lambda page_size: Order("mru", lambda node: -node.tick, touched_is_urgent=True), ()),
    "filo": (lambda page_size: Order("filo", lambda node: -node.created), ()),
    "priority": (lambda page_size: Order("priority", lambda node: (node.priority, node.tick)), ()),
    "tlru": (_tlru, ("threshold", "next_prompt_estimate")),
}
ORDER_NAMES = tuple(_ORDERS)


def make_order(name: str, parameters: Mapping[str, Any] | None = None, *, page_size: int = 1) -> Order:
    """The order called `name` (any case) with its parameters; `page_size` in tokens turns pages into tokens.

    Raises ValueError for an unknown order, an unknown parameter, or a value that is not a number.
    """
    entry = _ORDERS.get(name.lower())
    if entry is None:
        raise ValueError(f"unknown eviction policy {name!r}; choose one of {', '.join(ORDER_NAMES)}")
    factory, accepted = entry
    given = dict(parameters or {})
    for parameter, value in given.items():
        if parameter not in accepted:
            choice = f"it takes {', '.join(accepted)}" if accepted else "it takes none"
            raise ValueError(f"eviction policy {name.lower()!r} has no parameter {parameter!r}; {choice}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"eviction policy {name.lower()!r}: {parameter} must be a number, got {value!r}")
    return factory(page_size, **given)


class LeafQueue:
    """Every evictable leaf, most urgent first, kept current by the tree's offers.

    Each node has at most one live entry, the one whose key equals `node.queued`; other entries are dead and are
    dropped when met, or all at once when they outnumber the live ones.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.touched_is_urgent = order.touched_is_urgent
        self._heap: list[tuple[Key, int, Node]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        """Live entries, which include nodes that grew children or locks since they were filed."""
        return len(self._heap) - self._num_dead

    def offer(self, node: Node) -> None:
        """File `node` unless an entry at least as urgent stands for it already."""
        key = self.order.key(node)
        queued = node.queued
        if queued is not None:
            if not key < queued:
                return
            self._num_dead += 1
        node.queued = key
        heapq.heappush(self._heap, (key, node.id, node))
        self._compact_if_littered()

    def forget(self, node: Node) -> None:
        """Drop `node`, which has left the tree."""
        if node.queued is not None:
            node.queued = None
            self._num_dead += 1
            self._compact_if_littered()

    def clear(self) -> None:
        """Drop everything."""
        self._heap.clear()
        self._num_dead = 0

    def walk(self) -> LeafWalk:
        """Leaves in order, most urgent first, for a planner. The tree must not change during the walk."""
        self._settle()
        return LeafWalk(self.order, self._heap)

    def leaves(self) -> list[Node]:
        """Every evictable leaf, in no particular order."""
        # `is_leaf` written out, which a frame plan over 20,000 leaves gains a tenth of its time by.
        return [node for key, _, node in self._heap if node.queued == key and not node.children and not node.locks]

    def _settle(self) -> None:
        """Repair the top of the heap until a current leaf stands there; each entry is paid for once."""
        heap = self._heap
        while heap:
            key, _, node = heap[0]
            if node.queued != key:
                self._num_dead -= 1
            elif not node.is_leaf:
                node.queued = None
            else:
                current = self.order.key(node)
                if current == key:
                    return
                node.queued = current
                heapq.heapreplace(heap, (current, node.id, node))
                continue
            heapq.heappop(heap)

    def _compact_if_littered(self) -> None:
        if self._num_dead <= 64 or self._num_dead * 2 <= len(self._heap):
            return
        self._heap[:] = [entry for entry in self._heap if entry[2].queued == entry[0]]
        heapq.heapify(self._heap)
        self._num_dead = 0


class LeafWalk:
    """Reads a heap in order without changing it: a second, small heap holds the frontier of what was read."""

    def __init__(self, order: Order, heap: list[tuple[Key, int, Node]]) -> None:
        self._order = order
        self._heap = heap
        # (key, node id, position in the heap or -1 for a node that is not read from there, node)
        self._frontier: list[tuple[Key, int, int, Node]] = []
        self._see(0)

    def add(self, node: Node) -> None:
        """Let `node` take its turn: a parent whose last child the planner has just chosen."""
        heapq.heappush(self._frontier, (self._order.key(node), node.id, -1, node))

    def next(self) -> Node | None:
        """The most urgent leaf not returned yet, None when there is no more."""
        while self._frontier:
            key, _, position, node = heapq.heappop(self._frontier)
            if position < 0:
                return node
            self._see(2 * position + 1)
            self._see(2 * position + 2)
            if node.queued != key or not node.is_leaf:
                continue
            if self._order.key(node) == key:
                return node
            self.add(node)
        return None

    def _see(self, position: int) -> None:
        if position < len(self._heap):
            key, node_id, node = self._heap[position]
            heapq.heappush(self._frontier, (key, node_id, position, node))
