"""What the tree answers with and complains by: small frozen results, and its two errors.

The results are named tuples because every match, insert and eviction makes one, and a frozen dataclass takes three
times as long to make.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from radix_pages.node import Namespace, Node


class TreeError(RuntimeError):
    """A call that the tree's state forbids; names the node."""


class UnknownNodeError(KeyError):
    """A node id that is not in the tree: evicted, trimmed, or from before a reset."""

    def __str__(self) -> str:
        return str(self.args[0])


class Leaves(Protocol):
    """Who wants to hear of leaves: an eviction queue (`radix_pages.order.LeafQueue`)."""

    touched_is_urgent: bool

    def offer(self, node: Node) -> None:
        """`node` may have become a leaf, or more urgent to evict."""

    def forget(self, node: Node) -> None:
        """`node` has left the tree."""

    def clear(self) -> None:
        """Every node has left the tree."""


class Match(NamedTuple):
    """The longest cached prefix: it ends with `node` (the root when nothing matched) and is `num_pages` long."""

    node: Node
    num_pages: int


class Insertion(NamedTuple):
    """What an insert found and added.

    The key's first `matched_pages` pages were in the tree already. `node` ends the inserted key; `leaf` is the
    node that was added for the rest, None when nothing was. `declined` says that the tree took nothing because
    pages which the caller had put into the tree before no longer belong to this key.
    """

    node: Node
    matched_pages: int
    leaf: Node | None
    declined: bool


class Removal(NamedTuple):
    """Pages that left the tree, with what their node knew of them. The caller owns the payload now."""

    num_pages: int
    tokens: bytes
    payload: Any
    labels: list[Any] | None
    namespace: Namespace | None
    created: int
    tick: int
    hits: int


def removal_of(leaf: Node, num_pages: int, tokens: bytes, payload: Any, labels: list[Any] | None) -> Removal:
    """The removal of `num_pages` of `leaf`'s pages, those with these tokens, payload and labels."""
    return Removal(num_pages, tokens, payload, labels, leaf.namespace, leaf.created, leaf.tick, leaf.hits)
