"""Carries a plan out: the only code that turns a choice into a change."""

from __future__ import annotations

from radix_pages.planner import Plan
from radix_pages.results import Removal
from radix_pages.tree import RadixTree


def reclaim(tree: RadixTree, plan: Plan) -> list[Removal]:
    """Evict what `plan` says and return what left the tree, in that order. The caller owns the payloads now.

    Raises TreeError at the first span whose leaf has changed since the plan was made; earlier spans stay evicted.
    """
    removals = []
    for eviction in plan.evictions:
        if eviction.span.start:
            removals.append(tree.trim(eviction.leaf, len(eviction.span)))
        else:
            removals.append(tree.remove(eviction.leaf))
    return removals
