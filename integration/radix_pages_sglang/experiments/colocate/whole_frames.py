"""kvcached's rule for what to evict, written anew after its documentation (its page is our frame).

Only frames on which no running request has a page are looked at. Those with the fewest cached pages go first, among
equals the one whose youngest page is oldest; the first that is too large for what may go ends it. In a tree a page
takes with it what is below it, so a frame may cost more pages than it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from radix_pages.planner import Eviction, Plan
from radix_pages.reclaim import reclaim
from radix_pages.units import Span

if TYPE_CHECKING:
    from radix_pages.ledger import Pages
    from radix_pages.node import Node
    from radix_pages_sglang.experiments.colocate.cache import Cache


def evict_whole_frames(cache: Cache, *, max_pages: int | None = None, max_frames: int | None = None) -> None:
    """Evict whole frames, at most so many pages or until so many frames came free."""
    while (max_pages is None or max_pages > 0) and (max_frames is None or max_frames > 0):
        plan = cheapest_frame(cache)
        if plan is None or (max_pages is not None and plan.num_pages > max_pages):
            return
        held = cache.ledger.num_held_frames
        evicted = cache.give_evicted(reclaim(cache.tree, plan))
        if max_pages is not None:
            max_pages -= evicted
        if max_frames is not None:
            max_frames -= held - cache.ledger.num_held_frames


def cheapest_frame(cache: Cache) -> Plan | None:
    """What has to be evicted so that the next frame comes free; None when none can."""
    nodes = [node for node in cache.tree.nodes() if not node.locks]
    if not nodes:
        return None
    ledger = cache.ledger
    lengths = np.array([node.num_pages for node in nodes])
    frames = cache.geometry.frame_of(cache.pages_of(nodes))
    cached = np.bincount(frames, minlength=ledger.num_frames)
    can_go = np.flatnonzero((cached > 0) & (ledger.occupancy == cached))
    if not len(can_go):
        return None
    owner = np.repeat(np.arange(len(nodes)), lengths)
    youngest = np.zeros(ledger.num_frames, dtype=np.int64)
    np.maximum.at(youngest, frames, np.array([node.tick for node in nodes])[owner])
    frame = can_go[np.lexsort((can_go, youngest[can_go], cached[can_go]))][0]
    return _without(nodes, lengths, owner, np.flatnonzero(frames == frame))


def _without(nodes: list[Node], lengths: Pages, owner: Pages, places: Pages) -> Plan:
    """Evict each node from the first of its pages among `places` on, and all that is below it."""
    starts = np.cumsum(lengths) - lengths
    tails: dict[Node, int] = {}
    for place in places.tolist():
        tails.setdefault(nodes[owner[place]], place - int(starts[owner[place]]))
    return evicting(with_all_below(tails))


def with_all_below(tails: Mapping[Node, int]) -> dict[Node, int]:
    """Nodes and the first page that each loses: `tails`, and every node below them as a whole."""
    lost = dict(tails)
    waiting = list(tails)
    while waiting:
        for child in waiting.pop().children.values():
            if lost.get(child) != 0:
                lost[child] = 0
                waiting.append(child)
    return lost


def evicting(lost: Mapping[Node, int]) -> Plan:
    """The plan that evicts each node from a page on, the deepest first."""
    deepest_first = sorted(lost.items(), key=lambda one: -one[0].start)
    return Plan(tuple(Eviction(node, Span(start, node.num_pages)) for node, start in deepest_first), 0)
