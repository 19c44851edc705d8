"""Frame plans: which pages to evict and which to move so that whole frames come free. Pure: reads, changes nothing.

`frame_search` decides which frames and which evictions; here stands what can be asked for and how a plan is written.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np

from radix_pages.frame_search import Choice, Flags, Goal, PagesOf, Pool, Prices, Queue, Search
from radix_pages.ledger import Frames, Ledger, Pages
from radix_pages.node import Node
from radix_pages.order import LeafQueue
from radix_pages.planner import Eviction
from radix_pages.units import Span


@dataclass(frozen=True, slots=True)
class FreeFrames:
    """Let at least `num_frames` frames be empty and not returned."""

    num_frames: int


@dataclass(frozen=True, slots=True)
class HeldFrames:
    """Let at most `num_frames` frames hold a page, frame 0 counted: a ceiling on resident bytes."""

    num_frames: int


@dataclass(frozen=True, slots=True)
class CachedPages:
    """Keep at most `num_pages` pages of unlocked nodes, and all that is held in as few frames as can hold it."""

    num_pages: int


FrameNeed: TypeAlias = FreeFrames | HeldFrames | CachedPages


class FramePlan(NamedTuple):
    """To be carried out in this order: the evictions, children before parents; the moves; then `frames` are empty.

    Page `sources[i]` moves to `targets[i]`, a page of a frame that stays, free after the evictions. Moves out of one
    frame stand together, those out of the emptiest frame first. `movers` are the nodes whose pages move, `frames` all
    that come free, by number. `shortfall_frames` is how many of the frames asked for cannot come free.
    """

    evictions: tuple[Eviction, ...]
    sources: Pages
    targets: Pages
    movers: tuple[Node, ...]
    frames: Frames
    shortfall_frames: int
    cost: float

    @property
    def num_pages(self) -> int:
        """Pages that the plan evicts."""
        return sum(len(eviction.span) for eviction in self.evictions)


def plan_frames(
    leaves: LeafQueue, ledger: Ledger, need: FrameNeed, pages_of: PagesOf, prices: Prices | None = None
) -> FramePlan:
    """The cheapest plan found that meets `need`, as far as that is possible.

    Held pages that belong to no unlocked node stay, and with them their frames, whose holes are filled first. Frame 0
    always stays. Raises LedgerError when an unlocked node has a page that nobody holds.
    """
    prices = prices or Prices()
    pool = Pool(leaves, ledger, pages_of)
    goal, shortfall_frames = _goal(pool, need)
    if goal == Goal(0, 0):
        none = np.zeros(0, dtype=np.int64)
        return FramePlan((), none, none, (), none, shortfall_frames, 0.0)
    room = goal.num_frames * ledger.geometry.pages_per_frame
    most = min(max(goal.num_pages, room - pool.num_holes), len(pool.pages))
    least = max(goal.num_pages, int(pool.least_room()[goal.num_frames]) - pool.num_holes)
    queue = Queue(leaves, pages_of, ledger.geometry, least, most, prices)
    return _written(pool, queue, Search(pool, queue, goal, prices).best(), shortfall_frames)


def _goal(pool: Pool, need: FrameNeed) -> tuple[Goal, int]:
    """What `need` comes to in this pool, and how many frames are out of reach."""
    ledger, num_pages = pool.ledger, 0
    match need:
        case FreeFrames(num_frames):
            is_free = (ledger.occupancy == 0) & ~ledger.is_returned
            asked = num_frames - int(np.count_nonzero(is_free))
        case HeldFrames(num_frames):
            asked = ledger.num_held_frames - num_frames
        case CachedPages(most):
            num_pages = max(len(pool.pages) - most, 0)
            asked = int(np.count_nonzero(pool.least_room() <= pool.num_holes + num_pages)) - 1
    asked = max(asked, 0)
    num_frames = min(asked, len(pool.may_empty))
    return Goal(num_frames, num_pages), asked - num_frames


def _written(pool: Pool, queue: Queue, choice: Choice, shortfall_frames: int) -> FramePlan:
    """The plan that `choice` comes to."""
    ledger = pool.ledger
    counts = np.bincount(queue.owner[choice.is_evicted], minlength=len(queue.nodes)).tolist()
    span = cache(Span)  # most are whole nodes of a few lengths
    evictions = tuple(
        Eviction(node, span(node.num_pages - count, node.num_pages))
        for node, count in zip(queue.nodes, counts, strict=True)
        if count
    )
    is_kept = ledger.is_held.copy()
    is_kept[queue.pages[choice.is_evicted]] = False
    occupancy = ledger.occupancy - np.bincount(queue.frames[choice.is_evicted], minlength=ledger.num_frames)

    outs = np.flatnonzero(choice.is_emptied)
    sources = _pages_in(outs[np.argsort(occupancy[outs], kind="stable")], is_kept, ledger)
    intos = np.flatnonzero((ledger.occupancy > 0) & ~choice.is_emptied)
    intos = intos[np.lexsort((-occupancy[intos], ~pool.is_fixed[intos]))]
    num_intos = int(np.searchsorted(np.cumsum((ledger.sizes - occupancy)[intos]), len(sources))) + 1
    targets = _pages_in(intos[:num_intos], ~is_kept, ledger)[: len(sources)]

    is_free = (ledger.occupancy > 0) & (choice.is_emptied | (occupancy == 0))
    is_free[ledger.geometry.frame_of(targets)] = False
    movers, frames = tuple(_owners(pool, sources)), np.flatnonzero(is_free)
    return FramePlan(evictions, sources, targets, movers, frames, shortfall_frames, choice.cost)


def _pages_in(frames: Frames, is_wanted: Flags, ledger: Ledger) -> Pages:
    """The wanted pages of `frames`, frame by frame and by number in each."""
    turn = np.full(ledger.num_frames, -1)
    turn[frames] = np.arange(len(frames))
    pages: Pages = np.flatnonzero(is_wanted & np.repeat(turn >= 0, ledger.sizes))
    in_turn: Pages = pages[np.argsort(turn[ledger.geometry.frame_of(pages)], kind="stable")]
    return in_turn


def _owners(pool: Pool, pages: Pages) -> list[Node]:
    """The nodes that have one of `pages`."""
    is_wanted = np.zeros(len(pool.ledger.is_held), dtype=np.bool_)
    is_wanted[pages] = True
    ends = np.cumsum(np.frombuffer(array("q", [node.num_pages for node in pool.nodes]), dtype=np.int64))
    is_owner = np.zeros(len(pool.nodes), dtype=np.bool_)
    is_owner[np.searchsorted(ends, np.flatnonzero(is_wanted[pool.pages]), side="right")] = True
    return [pool.nodes[i] for i in np.flatnonzero(is_owner).tolist()]
