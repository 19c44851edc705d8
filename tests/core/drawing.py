"""Small trees for tests: a letter is a token, a payload is a list of slot numbers."""

from __future__ import annotations

from typing import Any

from radix_pages.node import Namespace
from radix_pages.order import LeafQueue, make_order
from radix_pages.planner import plan_pages
from radix_pages.reclaim import reclaim
from radix_pages.results import Insertion, Match
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry


class LetterTree:
    """A tree whose keys are strings (one letter, one token) under an eviction order."""

    def __init__(self, page_size: int = 1, order: str = "lru", **parameters: Any) -> None:
        self.geometry = Geometry(page_size, token_bytes=1)
        self.leaves = LeafQueue(make_order(order, parameters, page_size=page_size))
        self.tree = RadixTree(self.geometry, list, self.leaves)
        self._next_slot = 0

    def insert(self, letters: str, *, namespace: Namespace | None = None, **options: int) -> Insertion:
        """Insert with fresh slots."""
        slots = list(range(self._next_slot, self._next_slot + len(letters)))
        self._next_slot += len(letters)
        return self.tree.insert(letters.encode(), slots, namespace=namespace, **options)

    def match(self, letters: str, namespace: Namespace | None = None) -> Match:
        return self.tree.match(letters.encode(), namespace)

    def cached(self, letters: str, namespace: Namespace | None = None) -> int:
        """Tokens of `letters` that are cached, without touching anything."""
        return self.geometry.slots(self.tree.find(letters.encode(), namespace).num_pages)

    def evict(self, num_pages: int) -> list[str]:
        """Evict and return what left, as letters, in order."""
        removals = reclaim(self.tree, plan_pages(self.leaves, num_pages))
        return [removal.tokens.decode() for removal in removals]

    def drawing(self) -> list[str]:
        """Every node as its path, a bar between nodes, with the slots of the last one: `ab|cd [2, 3]`."""
        return sorted(
            "|".join(step.tokens.decode() for step in self.tree.path(node)) + f" {node.payload}"
            for node in self.tree.nodes()
        )
