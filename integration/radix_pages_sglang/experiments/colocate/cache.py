"""One model's cache and its part of the shared memory: the real tree, ledger, planner, moves and residency.

Only KV and its memory are imaginary. A page of a prompt is one slot of the tree here: its id stands for its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from radix_pages.backing import CommitError
from radix_pages.check import disagreements
from radix_pages.frame_planner import HeldFrames, plan_frames
from radix_pages.ledger import Frames, Ledger, Pages
from radix_pages.node import Node
from radix_pages.order import LeafQueue, make_order
from radix_pages.placement import PackPlacement
from radix_pages.planner import plan_pages
from radix_pages.reclaim import Moves, reclaim, relocated
from radix_pages.residency import Residency
from radix_pages.results import Removal
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry
from radix_pages_sglang.experiments.colocate.whole_frames import evict_whole_frames


class Device:
    """The memory that both models share, in frames."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.free_frames = num_frames


class Share:
    """A model's backing: frames of the shared device, of one byte each. Counts what was mapped and unmapped."""

    frame_bytes = 1

    def __init__(self, device: Device) -> None:
        self._device = device
        self._is_mapped = np.zeros(device.num_frames, dtype=np.bool_)
        self.mapped = self.unmapped = 0

    def commit(self, frames: Frames) -> None:
        if len(frames) > self._device.free_frames:
            raise CommitError(f"{len(frames)} frames are wanted and {self._device.free_frames} are free")
        self._is_mapped[frames] = True
        self._device.free_frames -= len(frames)
        self.mapped += len(frames)

    def decommit(self, frames: Frames) -> None:
        count = int(np.count_nonzero(self._is_mapped[frames]))
        self._is_mapped[frames] = False
        self._device.free_frames += count
        self.unmapped += count

    def bytes_of(self, frames: Frames) -> int:
        return len(frames)

    def resident_bytes(self) -> int:
        return int(np.count_nonzero(self._is_mapped))


class Cache:
    """A prefix cache over a pool that could take the whole device. It is also the mover, which counts what it copies.

    `shrink` is what it does above its ceiling: `evict` in its order, `whole` frames by kvcached's rule, or `move`.
    At most `cached_pages` pages are cached and not in use (None: no bound); what is more goes by whole frames.
    """

    def __init__(self, device: Device, pages_per_frame: int, shrink: str, cached_pages: int | None) -> None:
        self.geometry = Geometry(1, pages_per_frame=pages_per_frame)
        self.leaves = LeafQueue(make_order("lru"))
        self.tree = RadixTree(self.geometry, np.copy, self.leaves)
        self.ledger = Ledger(self.geometry, device.num_frames * pages_per_frame - 1)
        self.placement = PackPlacement(self.ledger)
        self.share = Share(device)
        self.residency = Residency(self.placement, self.share)
        self.residency.start_returned()
        self.share.mapped = 0
        self.evicted_pages = self.moved_pages = 0
        self._device = device
        self._shrink = shrink
        self._cached_pages = cached_pages

    # -- room --

    @property
    def ceiling_frames(self) -> int:
        return self._device.num_frames if self.residency.max_frames is None else self.residency.max_frames

    @property
    def used_pages(self) -> int:
        """Pages that running requests use."""
        return self.ledger.num_held - self.tree.evictable_pages

    @property
    def most_free_pages(self) -> int:
        """Pages that could be free: those that are, those that may be committed, and all that is cached."""
        frames = min(self.ceiling_frames - self.residency.committed_frames, self._device.free_frames)
        growth = min(self.ledger.num_returned_pages, max(frames, 0) * self.geometry.pages_per_frame)
        return self.placement.num_free + growth + self.tree.evictable_pages

    def make_room(self, num_pages: int) -> bool:
        """Commit, then evict, until so many pages are free; whether they are."""
        lacking = num_pages - self.placement.num_free
        if lacking > 0:
            self._grow(lacking)
            self.evict(num_pages - self.placement.num_free)
        return self.placement.num_free >= num_pages

    def _grow(self, num_pages: int) -> None:
        """Commit what the ceiling and the device have: everybody asks the device before, as kvcached does."""
        frames = min(self.geometry.frames_to_hold(num_pages), self._device.free_frames)
        if frames > 0:
            self.residency.grow(min(num_pages, frames * self.geometry.pages_per_frame))

    def keep_ceiling(self) -> None:
        """Come below the ceiling as far as that is possible now: what running requests use stays."""
        residency = self.residency
        ceiling = residency.max_frames
        if ceiling is None:
            return
        residency.trim(ceiling)
        if self._shrink == "move" and residency.over_ceiling_frames:
            self._move_below(ceiling)
            return
        if self._shrink == "whole" and residency.over_ceiling_frames:
            evict_whole_frames(self, max_frames=residency.over_ceiling_frames)
            residency.trim(ceiling)
        while residency.over_ceiling_frames and self.tree.evictable_pages:
            self.evict(residency.over_ceiling_frames * self.geometry.pages_per_frame)
            residency.trim(ceiling)

    def _move_below(self, ceiling: int) -> None:
        plan = plan_frames(self.leaves, self.ledger, HeldFrames(ceiling), self.pages_of)
        self.give_evicted(reclaim(self.tree, plan))
        Moves(self.tree, self.placement, self, plan).step(len(plan.sources))
        self.residency.trim(ceiling)

    def keep_cap(self) -> None:
        """Evict what is cached beyond the cap: whole frames that are small enough, the rest by age."""
        if self._cached_pages is not None and self.tree.evictable_pages > self._cached_pages:
            evict_whole_frames(self, max_pages=self.tree.evictable_pages - self._cached_pages)
            self.evict(self.tree.evictable_pages - self._cached_pages)

    def evict(self, num_pages: int) -> None:
        """Evict so many pages in the order of the queue, or all there are."""
        if num_pages > 0:
            self.give_evicted(reclaim(self.tree, plan_pages(self.leaves, num_pages)))

    def give_evicted(self, removals: Sequence[Removal]) -> int:
        """Nobody needs the pages that left the tree; how many those were."""
        pages = [page for removal in removals for page in removal.payload.tolist()]
        self.evicted_pages += len(pages)
        self.give(pages)
        return len(pages)

    def give(self, pages: list[int]) -> None:
        if pages:
            self.placement.give(np.array(pages))

    # -- the mover --

    def pages_of(self, nodes: Sequence[Node]) -> Pages:
        return np.concatenate([node.payload for node in nodes]) if nodes else np.zeros(0, dtype=np.int64)

    def copy(self, sources: Pages, targets: Pages) -> None:
        self.moved_pages += len(sources)

    def repointed(self, payload: Pages, sources: Pages, targets: Pages) -> Pages:
        return relocated(payload, sources, targets)

    # -- reading --

    def path(self, node: Node) -> list[int]:
        """The pages from the root down to `node`."""
        return [page for one in self.tree.path(node) for page in one.payload.tolist()]

    def check(self, own_pages: list[int]) -> None:
        """Raises RuntimeError when tree, requests (who have `own_pages` beside the tree's) and ledger disagree."""
        found = disagreements(self.tree, self.leaves) + self.residency.disagreements()
        pages = own_pages + [page for node in self.tree.nodes() for page in node.payload.tolist()]
        if sorted(pages) != (np.flatnonzero(self.ledger.is_held[1:]) + 1).tolist():
            found.append("the pages of tree and requests are not those that the ledger has as held")
        if self.share.resident_bytes() != self.residency.committed_bytes:
            found.append("the device has mapped other frames than those committed")
        if found:
            raise RuntimeError("; ".join(found))


def key(pages: Sequence[int]) -> bytes:
    """Page ids as a key of the tree."""
    return array("q", pages).tobytes()
