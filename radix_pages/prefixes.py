"""The prefixes that several cached sequences share, for reports; changes nothing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from radix_pages.node import Node

MOST_NODES = 20_000
"""Nodes that a search visits at most, so that it takes milliseconds in a tree of any size."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A cached prefix after which at least two cached sequences part.

    It is `num_pages` long; `own_pages` of these come after the next shorter shared prefix. `children` ways go on from
    here, to `leaves` cached sequences. `locks` counts the running requests that use it, `hits` all that ever did.
    """

    num_pages: int
    own_pages: int
    children: int
    leaves: int
    locks: int
    hits: int

    @property
    def spared_pages(self) -> int:
        """Pages that would be cached besides, if every sequence kept `own_pages` for itself."""
        return self.own_pages * (self.leaves - 1)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The prefixes whose sharing spares most pages, the best first.

    Without `is_complete` the tree was too large to see all of it: `leaves` are then the least that there can be, and
    a prefix far from the root may be missing.
    """

    largest: tuple[SharedPrefix, ...]
    is_complete: bool


@dataclass(slots=True)
class _Fork:
    """A node with several children, the fork above it, and the page where what only this one shares begins."""

    node: Node
    above: _Fork | None
    start: int
    leaves: int = 0


@dataclass(slots=True)
class _Search:
    """Goes through the tree fork by fork, those near the root first, until `unvisited` nodes have been visited."""

    unvisited: int
    forks: list[_Fork] = field(default_factory=list)

    def run(self, root: Node) -> None:
        self.forks.append(_Fork(root, None, 0))
        for fork in self.forks:
            if self.unvisited > 0:
                self._visit(fork)
            else:
                fork.leaves = len(fork.node.children)  # each leads to one at least
        for fork in reversed(self.forks):
            if fork.above is not None:
                fork.above.leaves += fork.leaves

    def _visit(self, fork: _Fork) -> None:
        """Look at each child, along a chain of only children up to where it ends or forks."""
        for child in fork.node.children.values():
            end = child
            below = end.children
            while len(below) == 1 and self.unvisited > 0:
                (end,) = below.values()
                below = end.children
                self.unvisited -= 1
            self.unvisited -= 1
            if len(below) > 1:
                self.forks.append(_Fork(end, fork, child.start))
            else:
                fork.leaves += 1


def shared_prefixes(root: Node, count: int, most_nodes: int = MOST_NODES) -> SharedPrefixes:
    """The `count` best shared prefixes below `root`, from a visit to about `most_nodes` nodes."""
    search = _Search(most_nodes)
    search.run(root)
    found = [_shared(fork) for fork in search.forks[1:] if not fork.node.is_overwritten]
    largest = heapq.nlargest(count, found, key=lambda prefix: prefix.spared_pages)  # keeps the order of equals
    return SharedPrefixes(tuple(largest), is_complete=search.unvisited > 0)


def _shared(fork: _Fork) -> SharedPrefix:
    node = fork.node
    end = node.start + node.num_pages
    return SharedPrefix(end, end - fork.start, len(node.children), fork.leaves, node.locks, node.hits)
