"""Plans: which spans to evict. Pure: reads leaves, changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from radix_pages.node import Node
from radix_pages.order import LeafQueue
from radix_pages.units import Span


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


def plan_pages(leaves: LeafQueue, num_pages: int) -> Plan:
    """Choose exactly `num_pages` pages to evict, or every evictable page when there are fewer.

    Whole leaves go in the queue's order; of the last one only as many tail pages as are still missing. A parent
    takes its turn as soon as its last child is chosen.
    """
    walk = leaves.walk()
    missing = num_pages
    evictions: list[Eviction] = []
    chosen_children: dict[int, int] = {}
    while missing > 0:
        leaf = walk.next()
        if leaf is None:
            break
        taken = min(missing, leaf.num_pages)
        evictions.append(Eviction(leaf, Span(leaf.num_pages - taken, leaf.num_pages)))
        missing -= taken
        parent = leaf.parent
        if missing and parent is not None and parent.parent is not None and not parent.locks:
            chosen = chosen_children.get(parent.id, 0) + 1
            chosen_children[parent.id] = chosen
            if chosen == len(parent.children):
                walk.add(parent)
    return Plan(tuple(evictions), max(missing, 0))
