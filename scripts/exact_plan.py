#!/usr/bin/env python
"""The least-cost plan for a small instance, by integer programming (HiGHS), with moves and without.

It knows the problem from the instance alone and shares no code with the planner it is compared with. The cost is the
planner's: every evicted page costs its value, every moved page `prices.move`. The value of a page comes from the rank
of its node's key: keys are raised to the highest key below them, the distinct raised keys are numbered from 0 among
the unlocked nodes, and rank r is worth `first + later * r`.

An instance is a JSON object; FILE holds a list of them, or one on each line:

    {"pages_per_frame": 4,            pages in a frame
     "num_pages": 23,                 pages are 1..num_pages, page 0 is the padding page; the last frame may be short
     "nodes": [                       parents before children
       {"parent": null, "key": 7, "pages": [5, 6], "locked": false},
       {"parent": 0, "key": 9, "pages": [8], "locked": true}],
     "held": [1, 2],                  pages that requests or sessions hold outside the tree: they never move
     "need": {"free_frames": 3},      so many empty frames; or {"held_frames": 3}: at most so many that are not empty,
                                      frame 0 included; or {"cached_pages": 9}: keep at most so many pages of
                                      unlocked nodes and, with no more evictions than that takes, the fewest frames
     "prices": {"move": 0.1, "first": 1.0, "later": 1.0}}

`parent` is a node's place in the list or null, `key` an integer that says when it goes (smaller first), `pages` its
pages in the order of the tokens. A locked node locks everything above it. Every page appears once.

    scripts/exact_plan.py FILE        prints a line for each instance
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array


@dataclass(frozen=True, slots=True)
class Optimum:
    """The least cost, the frames that come free in it and how many of those that were asked for cannot."""

    cost: float
    num_frames: int
    shortfall_frames: int
    num_evicted: int
    num_moved: int


@dataclass(frozen=True, slots=True)
class Problem:
    """What an instance says, in the program's terms. Pages are numbered 0..n-1 here: those of unlocked nodes."""

    frame: np.ndarray
    value: np.ndarray
    goes_after: list[tuple[int, int]]
    """(page, page that has to go before it)"""
    candidates: list[int]
    """Frames without a page that must stay, by number; `size` is theirs."""
    size: np.ndarray
    num_holes: int
    num_frames: int
    num_evicted: int
    """Frames to empty; pages to evict at least."""
    shortfall_frames: int
    move: float


def unlocked(nodes: list[dict[str, Any]]) -> list[int]:
    """Places of the nodes that no lock protects."""
    locked = [bool(node.get("locked")) for node in nodes]
    for place in range(len(nodes) - 1, -1, -1):
        parent = nodes[place]["parent"]
        if locked[place] and parent is not None:
            locked[parent] = True
    return [place for place in range(len(nodes)) if not locked[place]]


def ranks(nodes: list[dict[str, Any]], free: list[int]) -> dict[int, int]:
    """The rank of each unlocked node: that of the highest key at it or below it."""
    raised = {place: nodes[place]["key"] for place in free}
    for place in reversed(free):
        parent = nodes[place]["parent"]
        if parent in raised:
            raised[parent] = max(raised[parent], raised[place])
    rank_of = {key: rank for rank, key in enumerate(sorted(set(raised.values())))}
    return {place: rank_of[key] for place, key in raised.items()}


def problem_of(instance: dict[str, Any]) -> Problem:
    nodes, per_frame, num_pages = instance["nodes"], instance["pages_per_frame"], instance["num_pages"]
    free = unlocked(nodes)
    rank_of = ranks(nodes, free)
    number = {page: n for n, page in enumerate(page for place in free for page in nodes[place]["pages"])}
    goes_after = []
    for place in free:
        pages, parent = nodes[place]["pages"], nodes[place]["parent"]
        goes_after += [(number[page], number[later]) for page, later in pairwise(pages)]
        if parent in rank_of:
            goes_after.append((number[nodes[parent]["pages"][-1]], number[pages[0]]))
    prices = instance["prices"]
    value = [prices["first"] + prices["later"] * rank_of[place] for place in free for _ in nodes[place]["pages"]]

    num_all_frames = num_pages // per_frame + 1
    size = np.full(num_all_frames, per_frame)
    size[-1] = num_pages + 1 - per_frame * (num_all_frames - 1)
    stay = [0, *instance["held"], *(page for node in nodes for page in node["pages"] if page not in number)]
    fixed = np.bincount(np.array(stay) // per_frame, minlength=num_all_frames)
    frame = np.array(list(number), dtype=np.int64) // per_frame
    occupied = fixed + np.bincount(frame, minlength=num_all_frames)
    candidates = [f for f in range(num_all_frames) if occupied[f] and not fixed[f]]
    sizes = np.sort(size[candidates])
    num_holes = int((size - occupied)[occupied > 0].sum())
    num_held_frames = int((occupied > 0).sum())

    need, num_evicted = instance["need"], 0
    if "cached_pages" in need:
        num_evicted = max(len(number) - need["cached_pages"], 0)
        asked = int((np.cumsum(sizes) <= num_holes + num_evicted).sum())
    elif "free_frames" in need:
        asked = max(need["free_frames"] - (num_all_frames - num_held_frames), 0)
    else:
        asked = max(num_held_frames - need["held_frames"], 0)
    num_frames = min(asked, len(candidates))
    return Problem(
        frame=frame,
        value=np.array(value),
        goes_after=goes_after,
        candidates=candidates,
        size=size[candidates],
        num_holes=num_holes,
        num_frames=num_frames,
        num_evicted=num_evicted,
        shortfall_frames=asked - num_frames,
        move=prices["move"],
    )


def solve(instance: dict[str, Any], *, moves: bool = True) -> Optimum:
    """The least-cost plan. Without `moves` a frame comes free only when all its pages are evicted."""
    p = problem_of(instance)
    n, c = len(p.value), len(p.candidates)
    if not n:
        return Optimum(0.0, 0, p.shortfall_frames, 0, 0)
    # Unknowns: is page i evicted (0..n-1), is page i moved (n..2n-1), is candidate j emptied (2n..)
    rows: list[tuple[list[tuple[int, float]], float, float]] = []
    column_of = {frame: 2 * n + j for j, frame in enumerate(p.candidates)}
    for i, frame in enumerate(p.frame.tolist()):
        if frame in column_of:
            rows.append(([(i, 1.0), (n + i, 1.0), (column_of[frame], -1.0)], 0.0, np.inf))
    rows += [([(before, 1.0), (page, -1.0)], 0.0, np.inf) for page, before in p.goes_after]
    rows.append(([(2 * n + j, 1.0) for j in range(c)], p.num_frames, p.num_frames))
    rows.append(([(i, 1.0) for i in range(n)], p.num_evicted, np.inf))
    room = [(2 * n + j, -float(size)) for j, size in enumerate(p.size)]
    rows.append(([(i, 1.0) for i in range(n)] + room, -p.num_holes, np.inf))
    entries = [(row, column, factor) for row, (terms, _, _) in enumerate(rows) for column, factor in terms]
    row, column, factor = zip(*entries, strict=True)
    matrix = coo_array((factor, (row, column)), shape=(len(rows), 2 * n + c)).tocsr()
    low, high = [r[1] for r in rows], [r[2] for r in rows]
    cost = np.concatenate((p.value, np.full(n, p.move), np.zeros(c)))
    integral = np.concatenate((np.ones(n), np.zeros(n), np.ones(c)))
    bounds = Bounds(0, np.concatenate((np.ones(n), np.full(n, float(moves)), np.ones(c))))
    found = milp(
        cost,
        constraints=LinearConstraint(matrix, low, high),
        integrality=integral,
        bounds=bounds,
        options={"mip_rel_gap": 0.0},
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS found no optimum: {found.message}")
    x = np.round(found.x, 6)
    num_evicted, num_moved = round(x[:n].sum()), round(x[n : 2 * n].sum())
    return Optimum(float(cost @ x), p.num_frames, p.shortfall_frames, num_evicted, num_moved)


def read_instances(path: Path) -> list[dict[str, Any]]:
    """The instances in `path`: one JSON list, or an object on each line."""
    text = path.read_text()
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines() if line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(f"{'frames':>6} {'short':>5} | {'cost':>10} {'evicted':>7} {'moved':>5} | without moves: cost, evicted")
    for instance in read_instances(args.instances):
        best, still = solve(instance), solve(instance, moves=False)
        print(
            f"{best.num_frames:6} {best.shortfall_frames:5} | {best.cost:10.3f} {best.num_evicted:7} "
            f"{best.num_moved:5} | {still.cost:10.3f} {still.num_evicted:7}"
        )


if __name__ == "__main__":
    main()
