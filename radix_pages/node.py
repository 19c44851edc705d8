"""The tree's node: a run of whole pages of tokens and what the cache knows about them."""

from __future__ import annotations

from typing import Any, TypeAlias

Namespace: TypeAlias = tuple[str | None, str | None]
"""What keeps equal tokens apart: (extra_key, cache_salt), compared as a pair and never joined."""

ChildKey: TypeAlias = "bytes | tuple[Namespace, bytes] | int"
"""A child is found by the bytes of its first page; below the root in a namespace, by (namespace, bytes). An
overwritten child is kept under its id, where no key can find it."""


class Node:
    """One edge of the radix tree: `num_pages` whole pages of tokens that follow `parent`'s.

    `tokens` is the key as bytes, `payload` an opaque sequence with one item per slot (the adapter's slot tensor),
    `labels` an optional opaque list with one item per page (the adapter's block hashes); the tree slices all three
    together. `tick` is the last access, `created` the first, both logical. `hits` counts requests. `start` is the
    number of pages before this node on its path and `branch` the deepest path, in pages, that ever ran through
    it (evictions do not lower it). `held` counts the locks taken on this very node, `locks` those on it and below.
    `queued` is the key under which an eviction queue last filed the node, None when it did not. `is_overwritten`
    marks a node whose slots a request has filled with other tokens' KV: it cannot be found and goes when unlocked.
    """

    __slots__ = (
        "branch",
        "children",
        "created",
        "held",
        "hits",
        "id",
        "is_overwritten",
        "labels",
        "locks",
        "namespace",
        "num_pages",
        "parent",
        "payload",
        "priority",
        "queued",
        "start",
        "tick",
        "tokens",
    )

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        tokens: bytes,
        num_pages: int,
        payload: Any,
        namespace: Namespace | None,
        tick: int,
        priority: int,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.tokens = tokens
        self.num_pages = num_pages
        self.payload = payload
        self.namespace = namespace
        self.tick = tick
        self.created = tick
        self.priority = priority
        self.labels: list[Any] | None = None
        self.children: dict[ChildKey, Node] = {}
        self.hits = 0
        self.locks = 0
        self.held = 0
        self.start: int = 0 if parent is None else parent.start + parent.num_pages
        self.branch = self.start + num_pages
        self.queued: Any = None
        self.is_overwritten = False

    @property
    def is_leaf(self) -> bool:
        """Whether an eviction may remove this node: no child, no lock, and in the tree (a root never is)."""
        return not self.children and not self.locks and self.parent is not None

    def __repr__(self) -> str:
        return f"Node({self.id}, pages={self.num_pages}, start={self.start}, locks={self.locks}, tick={self.tick})"
