"""Our tree on chats that share a prefix, under the same ceilings: whole pages of what no request uses.

Each text becomes four chats on its first half: 2,048 tokens give a prefix of 1,024 and four branches of 256, accessed
in a seeded order; the pages of a text stand in a row, as in the other pools. Where nothing moves, each text is a tree
of its own under the ceiling, as a request is for the other rules. Where pages move, all texts are in one tree.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radix_pages.frame_planner import CachedPages, plan_frames
from radix_pages.ledger import Ledger, Pages
from radix_pages.node import Node
from radix_pages.order import LeafQueue, make_order
from radix_pages.placement import StockPlacement
from radix_pages.planner import plan_pages
from radix_pages.reclaim import Moves, reclaim, relocated
from radix_pages.results import Removal
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry
from radix_pages_sglang.experiments.page_accounting.allocators import FILLER_PAGES, Outcome
from radix_pages_sglang.experiments.page_accounting.strategies import PAGE_TOKENS, Kept
from radix_pages_sglang.serve import CommandError

BRANCHES = 4

OURS_MOVING = "radix_pages, moves"


class Chats:
    """A tree with every chat; slots are those of a pool in which text i has the i-th run of pages."""

    def __init__(self, texts: Sequence[Sequence[int]], seed: int, frame_pages: int = 1) -> None:
        self._num_texts, self._tokens = len(texts), len(texts[0])
        self.geometry = Geometry(PAGE_TOKENS, pages_per_frame=frame_pages)
        self.leaves = LeafQueue(make_order("lru", page_size=PAGE_TOKENS))
        self.tree = RadixTree(self.geometry, np.copy, self.leaves)
        accesses = [(text, branch) for text in range(len(texts)) for branch in range(BRANCHES)]
        random.Random(seed).shuffle(accesses)
        for text, branch in accesses:
            places = self._places(branch)
            key = np.asarray(texts[text], dtype=np.int64)[places].tobytes()
            self.tree.insert(key, self.first_slot(text) + places, namespace=(str(text), None))
        if self.tree.evictable_pages != self.num_pages:
            raise CommandError("a text repeats itself, so that its chats share more than their prefix: leave it out")

    @property
    def num_pages(self) -> int:
        return self._num_texts * self.geometry.whole_pages(self._tokens)

    def first_slot(self, text: int) -> int:
        return self.geometry.first_slot(FILLER_PAGES) + text * self._tokens

    def _places(self, branch: int) -> NDArray[np.int64]:
        """Which of a text's tokens the chat says: the prefix, then its own branch."""
        half = self._tokens // 2
        length = half // BRANCHES
        start = half + branch * length
        return np.concatenate((np.arange(half), np.arange(start, start + length)))

    def kept_after(self, removals: Sequence[Removal]) -> Kept:
        """What stays, [texts, tokens]."""
        kept = np.ones(self._num_texts * self._tokens, dtype=np.bool_)
        for removal in removals:
            kept[removal.payload - self.first_slot(0)] = False
        return kept.reshape(self._num_texts, self._tokens)


def pages_to_keep(num_tokens: int, num_texts: int, kept: int) -> int:
    """Pages that a ceiling of `kept` tokens a text leaves, over all texts."""
    return num_texts * min(kept // PAGE_TOKENS, num_tokens // PAGE_TOKENS)


def evicted(texts: Sequence[Sequence[int]], kept: int, seed: int) -> Kept:
    """What each text's tree keeps, [texts, tokens], when it evicts just as many pages as the ceiling asks for, oldest
    leaves first."""
    found = []
    for index, text in enumerate(texts):
        chats = Chats([text], seed + index)
        num_evicted = chats.num_pages - pages_to_keep(len(text), 1, kept)
        found.append(chats.kept_after(reclaim(chats.tree, plan_pages(chats.leaves, num_evicted))))
    return np.concatenate(found)


class _Mover:
    """Counts the pages that moves copy; nothing is in them here."""

    def __init__(self) -> None:
        self.copied = 0

    def pages_of(self, nodes: Sequence[Node]) -> Pages:
        pages: Pages = np.concatenate([node.payload for node in nodes])[::PAGE_TOKENS] // PAGE_TOKENS
        return pages

    def copy(self, sources: Pages, targets: Pages) -> None:
        self.copied += len(sources)

    def repointed(self, payload: NDArray[np.int64], sources: Pages, targets: Pages) -> NDArray[np.int64]:
        first = relocated(payload[::PAGE_TOKENS] // PAGE_TOKENS, sources, targets) * PAGE_TOKENS
        return (first[:, None] + np.arange(PAGE_TOKENS)).reshape(-1)


def moved(texts: Sequence[Sequence[int]], kept: int, seed: int, frame_pages: int) -> Outcome:
    """The same ceiling by a frame plan: evict, then move what stays into as few frames as can hold it.

    `pages_freed` is the same for every text: moves mix their pages.
    """
    chats = Chats(texts, seed, frame_pages)
    ledger = Ledger(chats.geometry, FILLER_PAGES - 1 + chats.num_pages)
    placement, mover = StockPlacement(ledger), _Mover()
    placement.take_these(np.arange(1, FILLER_PAGES + chats.num_pages))
    need = CachedPages(pages_to_keep(len(texts[0]), len(texts), kept))
    plan = plan_frames(chats.leaves, ledger, need, mover.pages_of)
    removals = reclaim(chats.tree, plan)
    if removals:
        placement.give(np.concatenate([removal.payload for removal in removals])[::PAGE_TOKENS] // PAGE_TOKENS)
    moves = Moves(chats.tree, placement, mover, plan)
    while not moves.is_done:
        moves.step(chats.num_pages)
    freed = int(ledger.sizes[ledger.occupancy == 0].sum())
    share = np.full(len(texts), freed / len(texts))
    held = 100.0 * (1 - freed / chats.num_pages)
    return Outcome(OURS_MOVING, frame_pages, share, held, tokens_copied=mover.copied * PAGE_TOKENS)
