"""Which frames to empty, and which pages to evict for that, at the least cost. Reads, changes nothing.

A plan empties some frames. Their pages are evicted or move into holes: free pages of held frames that stay. Whichever
frames those are,

    evicted pages >= pages that the emptied frames have room for - holes of all held frames

With enough holes nothing has to go, and the frames with the fewest pages come free. With too few, as many pages go as
are missing, those worth least; one that goes from an emptied frame saves its move. The search starts with the frames
that are cheap to empty at the value of the last page that has to go, finds the cheapest evictions for them, takes the
frames that are cheapest then, and so on while that helps. For given frames the evictions are the cheapest there are;
the choice of frames is the heuristic part. What that costs: scripts/results/plan_quality.txt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from radix_pages.ledger import Frames, Ledger, LedgerError, Pages
from radix_pages.node import Node
from radix_pages.order import LeafQueue
from radix_pages.planner import Costs, Counts, cheapest_tails, turns
from radix_pages.units import Geometry

PagesOf: TypeAlias = Callable[[Sequence[Node]], Pages]
"""The page ids of some nodes in one array: those of the first in the order of its tokens, then the second's, ..."""
Flags: TypeAlias = NDArray[np.bool_]

_MOST_OPEN_PAGES = 128
"""So far from the last page that has to go a plan may evict one and keep another; beyond, the turn alone decides."""
_MOST_SWAPS = 32
_MOST_WEIGHED_PAGES = 2048
"""Open pages times swaps: bounds the time that swaps take."""
_NEAR = 1.001
"""Nothing is tried any more once the cost is so near to the least that any plan can cost."""
_EQUAL = 1e-9
"""Costs that differ by less are equal: the same sum in another order."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a plan's cost is made of, in any one unit.

    A moved page costs `move`, an evicted one `first + later * rank`. Ranks number the distinct order keys of the
    evictable nodes from 0; a node has the highest key at it and below it, since it goes last. While `move` is less
    than `later`, no page goes for one of a lower rank.
    """

    move: float = 0.1
    first: float = 1.0
    later: float = 1.0


class Goal(NamedTuple):
    """Empty `num_frames` frames and evict at least `num_pages` pages."""

    num_frames: int
    num_pages: int


class Pool:
    """Which pages can move, and which frames can come free.

    `nodes` are all unlocked nodes, `pages` and `frames` theirs in the same order. A frame in `is_fixed` holds other
    pages, too; `may_empty` are the held frames that do not, and `num_holes` the free pages of all held frames.
    Raises LedgerError when a node has a page that nobody holds.
    """

    def __init__(self, leaves: LeafQueue, ledger: Ledger, pages_of: PagesOf) -> None:
        self.ledger = ledger
        self.nodes = _unlocked(leaves)
        self.pages = _ids(pages_of, self.nodes)
        self.frames: Frames = ledger.geometry.frame_of(self.pages)
        is_held = ledger.is_held[self.pages]
        if not is_held.all():
            raise LedgerError(f"pages {self.pages[~is_held][:8].tolist()} of the tree are not held by anybody")
        movable = np.bincount(self.frames, minlength=ledger.num_frames)
        is_held_frame = ledger.occupancy > 0
        self.is_fixed: Flags = ledger.occupancy > movable
        self.may_empty: Frames = np.flatnonzero(is_held_frame & ~self.is_fixed)
        self.num_holes = int((ledger.sizes - ledger.occupancy)[is_held_frame].sum())

    def least_room(self) -> Counts:
        """How many pages the 0, 1, 2, ... smallest frames that may come free have room for."""
        room: Counts = np.zeros(len(self.may_empty) + 1, dtype=np.int64)
        room[1:] = np.cumsum(np.sort(self.ledger.sizes[self.may_empty]))
        return room

    def evicted_for(self, is_emptied: Flags, goal: Goal) -> int:
        """How many pages have to go if these frames come free."""
        return max(goal.num_pages, int(self.ledger.sizes[is_emptied].sum()) - self.num_holes)


def _unlocked(leaves: LeafQueue) -> list[Node]:
    """Every node that no lock protects: the leaves, and what is above them."""
    level = leaves.leaves()
    nodes = level.copy()
    seen: set[int] = set()
    while level:
        parents = {node.parent for node in level}
        new = [node for node in parents if node and node.parent and not node.locks and node.id not in seen]
        level = sorted(new, key=lambda node: node.id)
        seen.update(node.id for node in level)
        nodes += level
    return nodes


def _ids(pages_of: PagesOf, nodes: Sequence[Node]) -> Pages:
    return pages_of(nodes) if nodes else np.zeros(0, dtype=np.int64)


class Queue:
    """The pages that may have to go, in the order of their turns: each node's from its last page to its first.

    `most` pages have to go whichever frames come free, `least` if the smallest do (the last frame may be shorter).
    The queue ends where a page costs more than the last of `most` and a move together, for evicting it makes no plan
    cheaper; for the same reason all before page `num_sure` go in any case. Between the two a plan may choose.
    `margin` is the value of the last page that has to go. Page i is one of `nodes[owner[i]]`.
    """

    def __init__(
        self, leaves: LeafQueue, pages_of: PagesOf, geometry: Geometry, least: int, most: int, prices: Prices
    ) -> None:
        self.most = most
        self.nodes: list[Node] = []
        values: list[float] = []
        stops: list[int] = []
        stop, rank, highest, key_of = 0, -1, None, leaves.order.key
        self.margin = last_sure = 0.0
        for node in turns(leaves):
            key = key_of(node)
            if highest is None or highest < key:
                highest, rank = key, rank + 1
            value = prices.first + prices.later * rank
            if stop < most:
                self.margin = value
            elif value > self.margin + prices.move or stop >= most + _MOST_OPEN_PAGES:
                break
            if stop < least:
                last_sure = value
            stop += node.num_pages
            self.nodes.append(node)
            values.append(value)
            stops.append(stop)
        ends = np.array(stops, dtype=np.int64)
        lengths = np.diff(ends, prepend=0)
        owner = np.repeat(np.arange(len(ends)), lengths)
        from_last_to_first = (2 * ends - lengths - 1)[owner] - np.arange(stop)
        shown = slice(most + _MOST_OPEN_PAGES)
        self.owner = owner[shown]
        self.pages: Pages = _ids(pages_of, self.nodes)[from_last_to_first[shown]]
        self.frames: Frames = geometry.frame_of(self.pages)
        self.values: Costs = np.array(values, dtype=np.float64)[self.owner]
        self.num_sure = max(int(np.searchsorted(self.values, last_sure - prices.move)), least - _MOST_OPEN_PAGES, 0)
        open_owner = self.owner[self.num_sure :]
        self._first_open = int(open_owner[0]) if len(open_owner) else len(self.nodes)
        self._open_owner = open_owner - self._first_open
        self._open_lengths = np.bincount(self._open_owner, minlength=len(self.nodes) - self._first_open)

    @property
    def num_open(self) -> int:
        """Pages about which a plan may choose."""
        return len(self._open_owner)

    def cheapest(self, saved: Costs, at_least: int) -> Flags:
        """The pages to evict, at least so many, at the least sum of values less `saved`."""
        weights = (self.values - saved)[self.num_sure :]
        nodes, lengths = self.nodes[self._first_open :], self._open_lengths
        lost = cheapest_tails(nodes, lengths.tolist(), weights, max(at_least - self.num_sure, 0))
        ends = (np.cumsum(lengths) - lengths + np.array(lost, dtype=np.int64))[self._open_owner]
        return np.concatenate((np.ones(self.num_sure, dtype=np.bool_), np.arange(self.num_open) < ends))


class Choice(NamedTuple):
    """A flag for each frame of the pool, a flag for each page of the queue, and what both together cost."""

    is_emptied: Flags
    is_evicted: Flags
    cost: float


class Search:
    """Goes from frames to the evictions that are cheapest for them and from evictions to frames, then tries swaps."""

    def __init__(self, pool: Pool, queue: Queue, goal: Goal, prices: Prices) -> None:
        self.pool, self.queue, self.goal, self.move = pool, queue, goal, float(prices.move)
        ledger = pool.ledger
        self._if_all_move: Costs = self.move * ledger.occupancy.astype(np.float64)
        if queue.most > goal.num_pages:  # holes are scarce, and a frame with less room leaves more of them
            self._if_all_move += queue.margin * (ledger.sizes - ledger.geometry.pages_per_frame)
        # What each page saves in its frame if it may go alone and no dearer than the last that has to
        self._saved_at_margin = self.move - np.clip(queue.values - queue.margin, 0.0, self.move)

    def best(self) -> Choice:
        """The cheapest choice found."""
        near = self._lower_bound() * _NEAR
        best: Choice | None = None
        for is_emptied in self._starts():
            choice = self._settled(self._choice(is_emptied))
            if best is None or choice.cost < best.cost - _EQUAL:
                best = choice
            if best.cost <= near:
                return best
        assert best is not None
        swaps = self._swaps(best)
        for _ in range(_MOST_WEIGHED_PAGES // max(self.queue.num_open, 1)):
            if best.cost <= near or not swaps:
                break
            is_emptied = best.is_emptied.copy()
            is_emptied[list(swaps.pop())] ^= True
            swapped = self._choice(is_emptied)
            if swapped.cost < best.cost - _EQUAL:
                best = self._settled(swapped)
                swaps = self._swaps(best)
        return best

    def _lower_bound(self) -> float:
        """No choice costs less: pages go alone here, and each that goes beyond those that have to pays `margin`."""
        queue, costs = self.queue, self._costs(self._saved_at_margin)[self.pool.may_empty]
        evicted = queue.margin * queue.most + float(np.minimum(queue.values - queue.margin, 0.0).sum())
        return evicted + float(np.sort(costs)[: self.goal.num_frames].sum())

    def _starts(self) -> Iterator[Flags]:
        """The cheapest frames if the first pages go; at the margin; and those whose last page has the first turn."""
        queue, ledger = self.queue, self.pool.ledger
        places = np.arange(len(queue.pages))
        yield self._cheapest_frames(self._costs(np.where(places < queue.most, self.move, 0.0)))
        yield self._cheapest_frames(self._costs(self._saved_at_margin))
        num_shown = np.bincount(queue.frames, minlength=ledger.num_frames)
        last = np.where(num_shown < ledger.occupancy, np.inf, 0.0)
        np.maximum.at(last, queue.frames, places)
        yield self._cheapest_frames(last)

    def _costs(self, saved: Costs) -> Costs:
        """What emptying each frame costs when every page of the queue saves so much in its frame."""
        num_frames = self.pool.ledger.num_frames
        return self._if_all_move - np.bincount(self.queue.frames, saved, num_frames).astype(np.float64)

    def _cheapest_frames(self, costs: Costs) -> Flags:
        may_empty = self.pool.may_empty
        chosen = np.argsort(costs[may_empty], kind="stable")[: self.goal.num_frames]
        is_emptied = np.zeros(self.pool.ledger.num_frames, dtype=np.bool_)
        is_emptied[may_empty[chosen]] = True
        return is_emptied

    def _settled(self, choice: Choice) -> Choice:
        """The choice to which this one leads."""
        while True:
            saved = np.where(choice.is_evicted, self.move, 0.0)
            better = self._choice(self._cheapest_frames(self._costs(saved)))
            if better.cost >= choice.cost - _EQUAL:
                return choice
            choice = better

    def _choice(self, is_emptied: Flags) -> Choice:
        """These frames, emptied at the least cost."""
        queue, pool = self.queue, self.pool
        saved = np.where(is_emptied[queue.frames], self.move, 0.0)
        is_evicted = queue.cheapest(saved, pool.evicted_for(is_emptied, self.goal))
        num_pages = int(pool.ledger.occupancy[is_emptied].sum())
        return Choice(is_emptied, is_evicted, self.move * num_pages + float((queue.values - saved)[is_evicted].sum()))

    def _swaps(self, choice: Choice) -> list[tuple[int, int]]:
        """Pairs of a frame that `choice` empties and one that it might empty instead, the likeliest at the end."""
        costs = self._costs(self._saved_at_margin)
        may_empty = self.pool.may_empty[np.argsort(costs[self.pool.may_empty], kind="stable")]
        outs = may_empty[choice.is_emptied[may_empty]][-_MOST_SWAPS:]
        ins = may_empty[~choice.is_emptied[may_empty]][:_MOST_SWAPS]
        pairs = [(int(out), int(into)) for out in outs for into in ins]
        order = np.argsort((costs[outs][:, None] - costs[ins]).ravel(), kind="stable")
        return [pairs[i] for i in order[-_MOST_SWAPS:].tolist()]
