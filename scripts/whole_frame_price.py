#!/usr/bin/env python
"""What does it cost, at best, that only whole frames can be given back? Farthest next use, with moves and without.

Request traces (one JSON object a line with `hash_ids`, a block of 512 tokens each, equal ids for equal blocks after
the same prefix) run over a cache that breathes: for `--period` requests it has twice the frames of the row, then a
neighbour takes half of them for as long, and so on. A page is a block here. Within the frames it has, either side
evicts single pages and reuses their room at once; the difference is what remains when frames are given back:

  moved   any pages that fit into the frames that stay are kept: those that are used again soonest. Where they are
          does not matter, because they can move
  whole   nothing moves: frames go with all that is in them, and with every block whose prefix was in them

Both know the future. What is what:

- Evicting the block whose next use is farthest, the deepest of equals, needs no look at the tree: a prefix is used
  whenever its continuation is. With one-page frames and equal blocks this is a feasible rule, not a proven optimum.
  So `hit_rate_moved` can be had, and the best with moves may be higher.
- Which frames to give up is a heuristic: `wanted` takes the frame with the fewest of those pages that `moved` would
  keep, in it or below its blocks, and counts anew after each; `latest` takes the frame whose first next use is
  farthest. Were no prefix in another frame than its continuations, `wanted` would keep the most wanted pages there
  can be.
- Where pages go is a rule: `radix_pages.placement.PackPlacement`; SGLang's order (`stock`); and `foreseen`, which
  keeps blocks that are used again within two periods and the others in frames apart, as far as there is room.
- `hit_rate_whole` is the best of these six, so it can be had, too, and the best without moves may be higher. The
  table has the best of each placement and of each choice beside it.
- `endless`, every block that was seen before, bounds all of them.

The difference of two feasible rules (`price`, in points) bounds nothing strictly; it is what moves bring a
clairvoyant cache. Only the current request's blocks are in use. Hit rates are blocks found over blocks asked, from
the first shrinking on.
Not measured: concurrency, output tokens, what moving costs.

    scripts/whole_frame_price.py --png scripts/results/whole_frame_price.png > scripts/results/whole_frame_price.txt
"""

from __future__ import annotations

import argparse
import heapq
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from radix_pages.ledger import Frames, Ledger
from radix_pages.placement import PLACEMENTS
from radix_pages.units import Geometry
from radix_pages_sglang.experiments.provenance import first_line
from radix_pages_sglang.experiments.traces import open_trace

Block = int
TRACES = {"conversation": "mooncake_conversation.jsonl", "synthetic": "mooncake_synthetic.jsonl"}
BUDGETS = (1024, 2048, 4096)
"""Pages that the small phases have."""
FRAME_SIZES = (2, 4, 16)
"""Pages of a frame: 1,024, 2,048 and 8,192 tokens."""
RULES = ("wanted", "latest")
PLACED = ("pack", "foreseen", "stock")
NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class Trace:
    """`requests[i]` are the blocks that request i asks for, `next_uses[i]` the request that asks for each again."""

    requests: list[list[Block]]
    next_uses: list[list[int]]
    parents: dict[Block, Block | None]
    depths: dict[Block, int]


def read_trace(path: Path, num_requests: int) -> Trace:
    if not path.is_file():
        raise SystemExit(f"no trace at {path}: name the folder that has {', '.join(TRACES.values())} with --traces")
    requests: list[list[Block]] = []
    for request in islice(open_trace(path), num_requests):
        requests.append(list(dict.fromkeys(request.blocks)))
    parents: dict[Block, Block | None] = {}
    depths: dict[Block, int] = {}
    for blocks in requests:
        for depth, block in enumerate(blocks):
            parent = blocks[depth - 1] if depth else None
            if parents.setdefault(block, parent) != parent:
                raise SystemExit(f"{path}: block {block} follows two different blocks: ids must name prefixes")
            depths[block] = depth
    next_uses: list[list[int]] = []
    seen: dict[Block, int] = {}
    for i in range(len(requests) - 1, -1, -1):
        next_uses.append([seen.get(block, NEVER) for block in requests[i]])
        seen.update(dict.fromkeys(requests[i], i))
    return Trace(requests, next_uses[::-1], parents, depths)


class Moved:
    """A cache of so many pages, wherever they are. `next_use` has the blocks that are cached and not in use."""

    def __init__(self, trace: Trace, num_pages: int) -> None:
        self.trace = trace
        self.num_pages = num_pages
        self.cached: set[Block] = set()
        self.next_use: dict[Block, int] = {}
        self.heap: list[tuple[int, int, Block]] = []

    def serve(self, i: int) -> int:
        """Serve request `i`; how many of its blocks were there."""
        blocks = self.trace.requests[i]
        hits = 0
        while hits < len(blocks) and blocks[hits] in self.cached:
            self.next_use.pop(blocks[hits])
            hits += 1
        new = blocks[hits:]
        self.drop(self.farthest(len(self.cached) + len(new) - self.num_pages))
        self.cached.update(new)
        self.place(new, blocks[hits - 1] if hits else None, self.trace.next_uses[i][hits:], i)
        for block, use in zip(blocks, self.trace.next_uses[i], strict=True):
            self.next_use[block] = use
            heapq.heappush(self.heap, (-use, -self.trace.depths[block], block))
        return hits

    def farthest(self, num_pages: int) -> list[Block]:
        """The blocks to evict if so many pages have to go."""
        found: list[Block] = []
        while len(found) < num_pages:
            use, _, block = heapq.heappop(self.heap)
            if self.next_use.get(block) == -use:
                found.append(block)
                del self.next_use[block]
        return found

    def drop(self, blocks: list[Block]) -> None:
        self.cached.difference_update(blocks)
        for block in blocks:
            self.next_use.pop(block, None)

    def place(self, blocks: list[Block], after: Block | None, uses: list[int], now: int) -> None:
        """Give `blocks` pages; `after` is the block that they continue, `uses` when each is used again."""

    def shrink(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.drop(self.farthest(len(self.cached) - num_pages))

    def expand(self, num_pages: int) -> None:
        self.num_pages = num_pages


class Whole(Moved):
    """A cache whose pages stay where they are. Page 0 is nobody's, so that frame 0 always stays."""

    def __init__(self, trace: Trace, num_pages: int, pages_per_frame: int, placement: str, rule: str) -> None:
        super().__init__(trace, num_pages)
        self.geometry = Geometry(1, pages_per_frame=pages_per_frame)
        self.ledger = Ledger(self.geometry, num_pages)
        self.placement = PLACEMENTS[placement](self.ledger)
        self.rule = rule
        self.page_of: dict[Block, int] = {}

    def place(self, blocks: list[Block], after: Block | None, uses: list[int], now: int) -> None:
        if blocks:
            pages = self.placement.take(len(blocks), None if after is None else self.page_of[after])
            self.page_of.update(zip(blocks, pages.tolist(), strict=True))

    def drop(self, blocks: list[Block]) -> None:
        super().drop(blocks)
        if blocks:
            self.placement.give(np.array([self.page_of.pop(block) for block in blocks]))

    def shrink(self, num_pages: int) -> None:
        self.num_pages = num_pages
        missing = self.geometry.frame_of(self.ledger.num_pages - num_pages) - self.ledger.num_returned_frames
        frames = self.least_wanted(missing) if self.rule == "wanted" else self.latest(missing)
        is_given = np.zeros(self.ledger.num_frames, dtype=np.bool_)
        is_given[frames] = True
        lost: set[Block] = set()
        for block in sorted(self.cached, key=self.trace.depths.__getitem__):
            if is_given[self.geometry.frame_of(self.page_of[block])] or self.trace.parents[block] in lost:
                lost.add(block)
        self.drop(list(lost))
        self.placement.withdraw(np.sort(frames))

    def expand(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.placement.restore(np.flatnonzero(self.ledger.is_returned))

    def first_uses(self) -> np.ndarray:
        """When a page of each frame is used again for the first time."""
        uses = np.full(self.ledger.num_frames, NEVER)
        for block, use in self.next_use.items():
            frame = self.geometry.frame_of(self.page_of[block])
            uses[frame] = min(uses[frame], use)
        return uses

    def latest(self, num_frames: int) -> Frames:
        """Frames whose first use is farthest, empty ones in front."""
        uses = self.first_uses()
        order = np.lexsort((-uses, self.ledger.occupancy > 0))
        return order[(order > 0) & ~self.ledger.is_returned[order]][:num_frames]

    def least_wanted(self, num_frames: int) -> Frames:
        """The frames without which the fewest of the wanted pages are lost, one after the other."""
        uses = self.first_uses()
        soonest = sorted(self.cached, key=lambda block: (self.next_use[block], self.trace.depths[block]))
        needed_by: dict[int, list[Block]] = {}
        frames_of: dict[Block, set[int]] = {}
        for block in soonest[: self.num_pages]:
            if self.next_use[block] == NEVER:
                break
            parent = self.trace.parents[block]  # wanted, too, and in front of its continuations
            above = frames_of[parent] if parent is not None else set()
            frames_of[block] = above | {self.geometry.frame_of(self.page_of[block])}
            for frame in frames_of[block]:
                needed_by.setdefault(frame, []).append(block)
        losses = [len(needed_by.get(frame, ())) for frame in range(self.ledger.num_frames)]
        heap = [(loss, -int(uses[frame]), frame) for frame, loss in enumerate(losses) if self.may_go(frame)]
        heapq.heapify(heap)
        chosen: list[int] = []
        gone: set[int] = set()
        while len(chosen) < num_frames:
            loss, _, frame = heapq.heappop(heap)
            if frame in gone or loss != losses[frame]:
                continue
            gone.add(frame)
            chosen.append(frame)
            for block in needed_by.get(frame, ()):
                for other in frames_of.pop(block, ()):
                    losses[other] -= 1
                    if other not in gone and self.may_go(other):
                        heapq.heappush(heap, (losses[other], -int(uses[other]), other))
        return np.array(chosen, dtype=np.int64)

    def may_go(self, frame: int) -> bool:
        return frame > 0 and not self.ledger.is_returned[frame]


class Foreseen(Whole):
    """Places blocks that are used again by request `now + horizon` apart from the others."""

    def __init__(self, trace: Trace, num_pages: int, pages_per_frame: int, horizon: int, rule: str) -> None:
        super().__init__(trace, num_pages, pages_per_frame, "pack", rule)
        self.horizon = horizon

    def place(self, blocks: list[Block], after: Block | None, uses: list[int], now: int) -> None:
        last = now + self.horizon
        is_late = np.zeros(self.ledger.num_pages + 1, dtype=np.bool_)
        is_late[[self.page_of[block] for block, use in self.next_use.items() if use > last]] = True
        num_late = np.bincount(self.geometry.frame_of(np.flatnonzero(is_late)), minlength=self.ledger.num_frames)
        for want_late in (False, True):
            group = [block for block, use in zip(blocks, uses, strict=True) if (use > last) == want_late]
            others = self.ledger.occupancy - num_late if want_late else num_late
            # Frames of nothing but their like, then empty ones, then those with the fewest others
            turn = np.where(self.ledger.occupancy == 0, 0.5, others)
            free = np.flatnonzero(~self.ledger.is_held)
            frames = self.geometry.frame_of(free)
            free, frames = (ids[~self.ledger.is_returned[frames]] for ids in (free, frames))
            pages = free[np.lexsort((free, turn[frames]))][: len(group)]
            self.placement.take_these(pages)
            self.page_of.update(zip(group, pages.tolist(), strict=True))


def hit_rate(cache: Moved, trace: Trace, small: int, large: int, period: int) -> float:
    """Serve the trace, breathing; block hits over blocks asked from the first shrinking on."""
    hits = asked = 0
    for i, blocks in enumerate(trace.requests):
        if i and i % period == 0:
            if i // period % 2:
                cache.shrink(small)
            else:
                cache.expand(large)
        found = cache.serve(i)
        if i >= period:
            hits += found
            asked += len(blocks)
    return hits / asked


def endless(trace: Trace, period: int) -> float:
    """The hit rate of a cache that keeps everything."""
    seen: set[Block] = set()
    hits = asked = 0
    for i, blocks in enumerate(trace.requests):
        if i >= period:
            hits += sum(block in seen for block in blocks)
            asked += len(blocks)
        seen.update(blocks)
    return hits / asked


def measure(name: str, trace: Trace, budget: int, pages_per_frame: int, period: int) -> dict[str, Any]:
    """One row."""
    small, large = budget - 1, 2 * budget - 1  # page 0 is nobody's

    def whole(placement: str, rule: str) -> float:
        if placement == "foreseen":
            cache: Whole = Foreseen(trace, large, pages_per_frame, 2 * period, rule)
        else:
            cache = Whole(trace, large, pages_per_frame, placement, rule)
        return hit_rate(cache, trace, small, large, period)

    found = {(placement, rule): whole(placement, rule) for placement in PLACED for rule in RULES}
    best = max(found, key=found.__getitem__)
    row: dict[str, Any] = {
        "trace": name,
        "frames": budget // pages_per_frame,
        "frame_pages": pages_per_frame,
        "hit_rate_whole": found[best],
        "hit_rate_moved": hit_rate(Moved(trace, large), trace, small, large, period),
        **{f"hit_rate_{placement}": max(found[placement, rule] for rule in RULES) for placement in PLACED},
        **{f"hit_rate_{rule}": max(found[placement, rule] for placement in PLACED) for rule in RULES},
        "hit_rate_endless": endless(trace, period),
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()} | {
        "placement": best[0],
        "rule": best[1],
    }


HEAD = (
    f"{'trace':14} {'frames':>6} {'pages each':>10} {'moved':>7} {'whole':>7} {'price':>6} | "
    f"{'pack':>7} {'foreseen':>8} {'stock':>7} | {'wanted':>7} {'latest':>7} | {'endless':>7}"
)


def line(row: dict[str, Any]) -> str:
    rate = {name.removeprefix("hit_rate_"): value for name, value in row.items() if name.startswith("hit_rate_")}
    return (
        f"{row['trace']:14} {row['frames']:6} {row['frame_pages']:10} {rate['moved']:7.2%} {rate['whole']:7.2%} "
        f"{100 * (rate['moved'] - rate['whole']):6.2f} | {rate['pack']:7.2%} {rate['foreseen']:8.2%} "
        f"{rate['stock']:7.2%} | {rate['wanted']:7.2%} {rate['latest']:7.2%} | {rate['endless']:7.2%}"
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Hit rates by budget, a panel for each trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["trace"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(6 * len(names), 4.5), layout="constrained", squeeze=False
    )
    for panel, name in zip(panels[0], names, strict=True):
        chosen = [row for row in rows if row["trace"] == name]
        first = [row for row in chosen if row["frame_pages"] == chosen[0]["frame_pages"]]
        pages = [row["frames"] * row["frame_pages"] for row in first]
        panel.plot(pages, [row["hit_rate_moved"] for row in first], "k-o", label="moved", markersize=3)
        panel.axhline(first[0]["hit_rate_endless"], color="gray", linestyle=":", linewidth=1, label="endless")
        sizes = dict.fromkeys(row["frame_pages"] for row in chosen)
        for size, colour in zip(sizes, ("tab:blue", "tab:orange", "tab:red", "tab:purple"), strict=False):
            of_size = [row for row in chosen if row["frame_pages"] == size]
            whole = [row["hit_rate_whole"] for row in of_size]
            panel.plot(pages, whole, "-o", color=colour, label=f"whole, {size} pages a frame", markersize=3)
            stock = [row["hit_rate_stock"] for row in of_size]
            panel.plot(pages, stock, "--", color=colour, label=f"the same, stock order, {size}", linewidth=1)
        panel.set_title(name)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("blocks that the small phases have room for")
        panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel("hit rate")
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces = Path(__file__).parents[2] / "shared" / "traces"
    parser.add_argument("--traces", type=Path, default=traces, help="folder with the traces (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=4000, help="so many requests from the beginning of each")
    parser.add_argument("--period", type=int, default=250, help="requests from one change of size to the next")
    parser.add_argument("--png", type=Path, help="also draw the hit rates into this file")
    parser.add_argument("--json", action="store_true", help="end with one line holding the rows as a JSON object")
    args = parser.parse_args()

    loaded = {name: read_trace(args.traces / file, args.requests) for name, file in TRACES.items()}
    print(first_line())
    print(f"# the first {args.requests} requests, another size every {args.period}")
    print(HEAD)
    rows = []
    for name, trace in loaded.items():
        for budget in BUDGETS:
            for pages_per_frame in FRAME_SIZES:
                rows.append(measure(name, trace, budget, pages_per_frame, args.period))
                print(line(rows[-1]), flush=True)
    if args.png:
        draw(rows, args.png)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
