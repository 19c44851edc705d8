"""Carries a plan out: the only code that turns a choice into a change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from radix_pages.frame_planner import FramePlan
from radix_pages.ledger import Pages
from radix_pages.node import Node
from radix_pages.placement import Placement
from radix_pages.planner import Plan
from radix_pages.results import Removal, UnknownNodeError
from radix_pages.tree import RadixTree


class Mover(Protocol):
    """Where the contents of pages are, and what a payload is: whoever owns the pool's memory knows."""

    def pages_of(self, nodes: Sequence[Node]) -> Pages:
        """The page ids of some nodes in one array, node by node, each in the order of its tokens."""

    def copy(self, sources: Pages, targets: Pages) -> None:
        """Copy the contents of page `sources[i]` to page `targets[i]`, in every buffer. May raise."""

    def repointed(self, payload: Any, sources: Pages, targets: Pages) -> Any:
        """A payload of its own like `payload`, with `targets[i]` wherever it named `sources[i]`."""


def relocated(pages: Pages, sources: Pages, targets: Pages) -> Pages:
    """`pages` with `targets[i]` wherever they name `sources[i]`; for movers. There must be a source."""
    by_page = np.argsort(sources)
    place = by_page[np.minimum(np.searchsorted(sources[by_page], pages), len(sources) - 1)]
    found: Pages = np.where(sources[place] == pages, targets[place], pages)
    return found


def reclaim(tree: RadixTree, plan: Plan | FramePlan) -> list[Removal]:
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


class Moves:
    """The moves of a frame plan, carried out in slices after its evictions.

    A slice happens as a whole or not at all. Between slices the tree and the ledger may change: as soon as a page or
    a node of the next slice is no longer what the plan was made for, the rest is void (`is_stale`) and somebody has
    to plan anew.
    """

    def __init__(self, tree: RadixTree, placement: Placement, mover: Mover, plan: FramePlan) -> None:
        self._tree = tree
        self._placement = placement
        self._mover = mover
        self._sources, self._targets = plan.sources, plan.targets
        pages = mover.pages_of(plan.movers) if plan.movers else plan.sources[:0]
        owner = np.repeat(np.arange(len(plan.movers)), [node.num_pages for node in plan.movers])
        by_page = np.argsort(pages)
        found = np.searchsorted(pages[by_page], plan.sources)
        self._nodes = [plan.movers[place] for place in owner[by_page][found].tolist()]
        self._payloads = {node.id: node.payload for node in plan.movers}
        self.num_moved = 0
        self.is_stale = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, because all has moved or the rest is void."""
        return self.is_stale or self.num_moved == len(self._sources)

    def step(self, most: int) -> int:
        """Move up to `most` pages; how many moved. An exception of the mover leaves every page as it was."""
        end = min(self.num_moved + most, len(self._sources))
        sources, targets = self._sources[self.num_moved : end], self._targets[self.num_moved : end]
        nodes = {node.id: node for node in self._nodes[self.num_moved : end]}
        if self.is_done or not self._still_holds(nodes, targets):
            self.is_stale |= not self.is_done
            return 0
        self._placement.take_these(targets)
        try:
            self._mover.copy(sources, targets)
            payloads = [self._mover.repointed(node.payload, sources, targets) for node in nodes.values()]
        except BaseException:
            self._placement.give(targets)
            raise
        for node, payload in zip(nodes.values(), payloads, strict=True):
            node.payload = self._payloads[node.id] = payload
        self._placement.give(sources)
        self.num_moved = end
        return len(sources)

    def _still_holds(self, nodes: dict[int, Node], targets: Pages) -> bool:
        """Whether `nodes` are as they were and unlocked, and `targets` free and with memory."""
        ledger = self._placement.ledger
        if ledger.is_held[targets].any() or ledger.is_returned[ledger.geometry.frame_of(targets)].any():
            return False
        try:
            return all(
                self._tree.node(node_id) is node and not node.locks and node.payload is self._payloads.get(node_id)
                for node_id, node in nodes.items()
            )
        except UnknownNodeError:
            return False
