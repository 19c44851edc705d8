"""Caches of blocks that are told what each block is worth when it is used: farthest next use, and a count that lasts.

The first knows the future: it evicts the block whose next use is farthest, the deepest of equals. No prefix goes
before its continuation then, since it is used whenever that is. It can be had offline and is not a proven optimum:
where blocks hang together in prefixes and a request needs all of its own at once, another choice may be better.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence


class FullError(RuntimeError):
    """Blocks in use leave no room for more."""


class KeyedBlocks:
    """A cache with room for `num_blocks` blocks, of which those in use cannot go.

    Each use of a block comes with its urgency: of the blocks that are not in use the one with the smallest goes, of
    equals the one deepest in its prompt. A prefix must never be more urgent than its continuation; where both are
    equal, depth decides, so that only ends of prefixes go.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._num_other = 0
        self._filed: dict[int, tuple[int, int, int]] = {}
        """The latest entry of every cached block: urgency, depth negated, block."""
        self._heap: list[tuple[int, int, int]] = []
        self._pins: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks that are cached."""
        return len(self._filed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._filed)

    def __contains__(self, block: object) -> bool:
        return block in self._filed

    def start(self, blocks: Sequence[int], urgencies: Sequence[int], num_other: int = 0) -> int:
        """Use the blocks of a prompt, and `num_other` that are never cached; how many of `blocks` were here, from the
        first on. Raises FullError."""
        filed = self._filed
        hits = 0
        while hits < len(blocks) and blocks[hits] in filed:
            hits += 1
        for depth, (block, urgency) in enumerate(zip(blocks, urgencies, strict=True)):
            if depth < hits:
                filed[block] = (urgency, -depth, block)
            self._pins[block] = self._pins.get(block, 0) + 1
        self._num_other += num_other
        self._evict(len(filed) + len(blocks) - hits + self._num_other - self.num_blocks)
        for depth in range(hits, len(blocks)):
            filed[blocks[depth]] = (urgencies[depth], -depth, blocks[depth])
        return hits

    def end(self, blocks: Sequence[int], num_other: int = 0) -> None:
        """Undo one `start` of these: who is used no more can go."""
        self._num_other -= num_other
        for block in blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
                heapq.heappush(self._heap, self._filed[block])
        if len(self._heap) > 2 * len(self._filed) + 1024:
            self._drop_dead_entries()

    def _evict(self, num_blocks: int) -> None:
        while num_blocks > 0:
            if not self._heap:
                raise FullError(f"the blocks in use leave no room in {self.num_blocks} for {num_blocks} more")
            entry = heapq.heappop(self._heap)
            if self._is_live(entry):
                del self._filed[entry[2]]
                self.num_evicted += 1
                num_blocks -= 1

    def _is_live(self, entry: tuple[int, int, int]) -> bool:
        """Whether this entry is its block's latest, and the block not in use: then it is filed again at its end."""
        return self._filed.get(entry[2]) is entry and entry[2] not in self._pins

    def _drop_dead_entries(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_live(entry)]
        heapq.heapify(self._heap)
