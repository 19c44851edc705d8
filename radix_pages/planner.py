"""Plans: which spans to evict. Pure: reads leaves, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from radix_pages.node import Node
from radix_pages.order import LeafQueue
from radix_pages.units import Span

Counts: TypeAlias = NDArray[np.int64]
Costs: TypeAlias = NDArray[np.float64]


class Eviction(NamedTuple):
    """Drop `span`, the last pages of `leaf`; all of it when the span starts at page 0."""

    leaf: Node
    span: Span


class Plan(NamedTuple):
    """Evictions in the order to carry them out (children before parents), and the pages that could not be found."""

    evictions: tuple[Eviction, ...]
    shortfall_pages: int

    @property
    def num_pages(self) -> int:
        """Pages that the plan evicts."""
        return sum(len(eviction.span) for eviction in self.evictions)


def turns(leaves: LeafQueue) -> Iterator[Node]:
    """Every evictable node in the order in which they would go: a leaf as the queue has it, a parent as soon as its
    last child has had its turn. The tree must not change meanwhile."""
    walk = leaves.walk()
    children_gone: dict[int, int] = {}
    while (leaf := walk.next()) is not None:
        yield leaf
        parent = leaf.parent
        if parent is not None and parent.parent is not None and not parent.locks:
            gone = children_gone.get(parent.id, 0) + 1
            children_gone[parent.id] = gone
            if gone == len(parent.children):
                walk.add(parent)


def plan_pages(leaves: LeafQueue, num_pages: int) -> Plan:
    """Choose exactly `num_pages` pages to evict, or every evictable page when there are fewer.

    Whole nodes go in the order of their turns; of the last one only as many tail pages as are still missing.
    """
    missing = num_pages
    evictions: list[Eviction] = []
    if missing > 0:
        for leaf in turns(leaves):
            taken = min(missing, leaf.num_pages)
            evictions.append(Eviction(leaf, Span(leaf.num_pages - taken, leaf.num_pages)))
            missing -= taken
            if not missing:
                break
    return Plan(tuple(evictions), max(missing, 0))


def cheapest_tails(nodes: Sequence[Node], lengths: Sequence[int], weights: Costs, at_least: int) -> list[int]:
    """How many of its last pages each node loses so that at least `at_least` go, at the least sum of their weights.

    `nodes` stand in the order of their turns. The last `lengths[i]` pages of the i-th may go, their `weights` stand
    together, last page first. A node loses pages only after those of `nodes` below it. Exact, in time and memory that
    grow with the square of the pages: `costs[i][k]` is the least weight of k pages of the i-th node and what is below
    it, and the last entry stands for the whole tree.
    """
    place = {node.id: i for i, node in enumerate(nodes)}
    whole = len(nodes)
    costs = [np.zeros(1) for _ in range(whole + 1)]
    below: list[list[tuple[int, Counts]]] = [[] for _ in range(whole + 1)]
    num_below = []
    start = 0
    for i, node in enumerate(nodes):
        num_below.append(len(costs[i]) - 1)
        own = np.cumsum(weights[start : start + lengths[i]])
        start += lengths[i]
        costs[i] = np.concatenate((costs[i], costs[i][-1] + own))
        above = whole if node.parent is None else place.get(node.parent.id, whole)
        costs[above], shares = _both(costs[above], costs[i])
        below[above].append((i, shares))
    num_lost = [0] * whole
    left = at_least + int(np.argmin(costs[whole][at_least:]))
    for above in range(whole, -1, -1):
        if above < whole:
            left = min(num_lost[above], num_below[above])
            num_lost[above] -= left
        for i, shares in reversed(below[above]):
            num_lost[i] = int(shares[left])
            left -= num_lost[i]
    return num_lost


def _both(one: Costs, other: Costs) -> tuple[Costs, Counts]:
    """The least weight of k pages from `one` and `other` together, and how many of them are from `other`."""
    if len(one) == 1:
        return other + one[0], np.arange(len(other))
    if len(one) < len(other):
        costs, shares = _both(other, one)
        return costs, np.arange(len(costs)) - shares
    costs = np.full(len(one) + len(other) - 1, np.inf)
    shares = np.zeros(len(costs), dtype=np.int64)
    for k, cost in enumerate(other.tolist()):
        part = slice(k, k + len(one))
        sums = one + cost
        is_less = sums < costs[part]
        np.copyto(costs[part], sums, where=is_less)
        np.copyto(shares[part], k, where=is_less)
    return costs, shares
