#!/usr/bin/env python
"""Touch every n-th page, then shrink the cache: how many frames come free, and how many touched pages survive?

The shape of kvcached's published table (github.com/ovg-project/kvcached, benchmarks/bench_frag, bench_evict.py; its
page is our frame, its block our page): 4,096 cached pages in slot order, each a leaf of its own, in frames of 128;
every 1st, 2nd, 4th or 8th is touched, so that it is younger than all others; then all but 512 pages have to go. Last
row: case C5, 256 pages in frames of 8, every 8th touched, 32 kept. Every side starts from the same tree, queue and
ledger and evicts equally many pages:

  LRU          `plan_pages`: the oldest leaves
  whole frame  kvcached's published rule, written anew: frames that hold nothing but evictable pages, those with the
               fewest first, among equals the one whose youngest page is oldest; a frame goes as a whole or not at all
               and the first that is too large ends it; what is still missing goes by age. Nothing moves
  ours         `plan_frames` with `CachedPages`: the oldest pages go, kept ones move into holes

Frame 0 holds the padding page and never comes free, and the last frame holds one page only; so LRU frees 27 frames at
stride 1, as in kvcached's table (0.84 GB of 2 MiB pages for 16 buffers). Not measured: time, KV, hit rates.

    scripts/bench_reclaim.py --png scripts/results/bench_reclaim.png > scripts/results/bench_reclaim.txt
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from plan_quality import TOKEN_BYTES, carry_out, pages_of
from radix_pages.frame_planner import CachedPages, FramePlan, plan_frames
from radix_pages.ledger import Ledger
from radix_pages.node import Node
from radix_pages.order import LeafQueue, make_order
from radix_pages.planner import Eviction, plan_pages
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry, Span
from radix_pages_sglang.experiments.provenance import first_line

STRIDES = (1, 2, 4, 8)
NO_PAGES = np.zeros(0, dtype=np.int64)


class Cache:
    """One-page leaves in slot order, every `stride`-th of them touched afterwards."""

    def __init__(self, num_pages: int, pages_per_frame: int, stride: int) -> None:
        self.geometry = Geometry(1, TOKEN_BYTES, pages_per_frame)
        self.leaves = LeafQueue(make_order("lru"))
        self.tree = RadixTree(self.geometry, np.copy, self.leaves)
        self.ledger = Ledger(self.geometry, num_pages)
        self.ledger.hold(np.arange(1, num_pages + 1))
        self.nodes: list[Node] = []
        for page in range(1, num_pages + 1):
            key = np.array([page], dtype=np.int64)
            self.nodes.append(self.tree.insert(key.tobytes(), key).node)
        self.touched = self.nodes[::stride]
        for node in self.touched:
            self.tree.match(node.tokens)

    def touched_kept(self) -> int:
        """Touched pages that are still cached."""
        return sum(self.tree.find(node.tokens).num_pages for node in self.touched)


def evict_only(evictions: list[Eviction]) -> FramePlan:
    return FramePlan(tuple(evictions), NO_PAGES, NO_PAGES, (), NO_PAGES, 0, 0.0)


def by_age(cache: Cache, keep: int) -> FramePlan:
    """LRU."""
    return evict_only(list(plan_pages(cache.leaves, len(cache.nodes) - keep).evictions))


def by_whole_frames(cache: Cache, keep: int) -> FramePlan:
    """kvcached's rule."""
    num_missing = len(cache.nodes) - keep
    oldest_first = [one.leaf for one in plan_pages(cache.leaves, len(cache.nodes)).evictions]
    in_frame: dict[int, list[int]] = {}
    for age, node in enumerate(oldest_first):
        in_frame.setdefault(int(cache.geometry.frame_of(node.payload)[0]), []).append(age)
    can_empty = [ages for frame, ages in in_frame.items() if len(ages) == cache.ledger.occupancy[frame]]
    chosen: dict[int, None] = {}
    for ages in sorted(can_empty, key=lambda ages: (len(ages), max(ages))):
        if len(chosen) + len(ages) > num_missing:
            break
        chosen.update(dict.fromkeys(ages))
    for age in range(len(oldest_first)):
        if len(chosen) == num_missing:
            break
        chosen.setdefault(age)
    return evict_only([Eviction(oldest_first[age], Span(0, 1)) for age in chosen])


def ours(cache: Cache, keep: int) -> FramePlan:
    return plan_frames(cache.leaves, cache.ledger, CachedPages(keep), pages_of)


SIDES: dict[str, Callable[[Cache, int], FramePlan]] = {"lru": by_age, "whole_frame": by_whole_frames, "ours": ours}


def shrink(num_pages: int, pages_per_frame: int, stride: int, keep: int) -> dict[str, Any]:
    """One row: each side shrinks a fresh cache."""
    row: dict[str, Any] = {"stride": stride}
    for name, side in SIDES.items():
        cache = Cache(num_pages, pages_per_frame, stride)
        before = cache.ledger.num_held_frames
        plan = side(cache, keep)
        carry_out(cache.tree, cache.ledger, plan)
        if cache.tree.evictable_pages != keep or cache.ledger.num_held != keep:
            raise RuntimeError(f"{name} kept {cache.tree.evictable_pages} pages, not {keep}")
        prefix = "" if name == "ours" else f"{name}_"
        row[f"{prefix}frames"] = before - cache.ledger.num_held_frames
        row[f"{prefix}touched_kept"] = cache.touched_kept()
        row["touched_possible"] = min(len(cache.touched), keep)
        if name == "ours":
            row["moved"] = len(plan.sources)
            row["frames_possible"] = before - cache.geometry.frames_to_hold(keep + 1)  # and the padding page
    return row


def line(name: str, row: dict[str, Any]) -> str:
    return (
        f"{name:>8} {row['lru_frames']:>6} {row['whole_frame_frames']:>6} {row['frames']:>6} "
        f"{row['frames_possible']:>9} {row['lru_touched_kept']:>7} {row['whole_frame_touched_kept']:>6} "
        f"{row['touched_kept']:>6} {row['touched_possible']:>9} {row['moved']:>7}"
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Left: frames that come free, right: touched pages that survive; a group of bars for each stride."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = {"LRU": ("lru_", "tab:gray"), "whole frame": ("whole_frame_", "tab:orange"), "ours": ("", "tab:blue")}
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for panel, what, possible in zip(panels, ("frames", "touched_kept"), ("frames", "touched"), strict=True):
        for place, (name, (prefix, colour)) in enumerate(sides.items()):
            heights = [row[f"{prefix}{what}"] for row in rows]
            panel.bar(np.arange(len(rows)) + 0.27 * (place - 1), heights, 0.25, color=colour, label=name)
        most = [row[f"{possible}_possible"] for row in rows]
        panel.step(np.arange(len(rows) + 1) - 0.5, [*most, most[-1]], "k:", where="post", label="possible")
        panel.set_xticks(range(len(rows)), [str(row["stride"]) for row in rows])
        panel.set_xlabel("every n-th page touched")
    panels[0].set_ylabel("frames that come free")
    panels[1].set_ylabel("touched pages that survive")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--frame-pages", type=int, default=128)
    parser.add_argument("--keep", type=int, default=512)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", action="store_true", help="end with one line holding the rows as a JSON object")
    args = parser.parse_args()

    print(first_line())
    print(f"# {args.pages} pages in frames of {args.frame_pages}, {args.keep} are kept")
    print(f"{'':8} {'frames that come free':^31}{'touched pages that survive':^31} {'ours':>7}")
    head = ("LRU", "whole", "ours", "possible")
    print(
        f"{'stride':>8} {head[0]:>6} {head[1]:>6} {head[2]:>6} {head[3]:>9} "
        f"{head[0]:>7} {head[1]:>6} {head[2]:>6} {head[3]:>9} {'moved':>7}"
    )
    rows = []
    for stride in STRIDES:
        rows.append(shrink(args.pages, args.frame_pages, stride, args.keep))
        print(line(str(stride), rows[-1]))
    case = shrink(256, 8, 8, 32)
    print(line("C5", case))
    if args.png:
        draw(rows, args.png)
    if args.json:
        print(json.dumps({"rows": rows, "c5": case}))


if __name__ == "__main__":
    main()
