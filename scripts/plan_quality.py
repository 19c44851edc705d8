#!/usr/bin/env python
"""How far from the optimum are frame plans, and how long do they take?

Quality: random pools (up to 24 frames of 2, 4 or 8 pages, up to 40 leaves, chains, locks, pages held outside the
tree, few holes or many, a last frame that may be shorter, all three kinds of need, moves from a tenth of the cheapest
eviction to ten times that). Each is built as a real tree, queue and ledger, planned, and the plan carried out; the
frames that come free are counted in the ledger and the cost is counted anew from the instance. The ratio is that cost
over the optimum's from scripts/exact_plan.py, which also documents the format of an instance for `--instances`.

Speed: a plan that frees 64 of 1,024 frames (65,536 pages), for several numbers of leaves and shares of held pages;
200 shared prefixes of 4 pages, the leaves below them of random length, pages in random places, default prices.
`plan_ms` is that of 20,000 leaves and a full pool, where every 16th page has to go: the median of nine plans in the
quietest of seven rounds, since neighbours on a shared machine double single rounds. It contains reading the page ids
off the nodes' payloads (numpy arrays, one page a slot); with payloads of torch tensors that part takes longer.

Not measured: carrying plans out, and what an eviction costs a hit rate.

    scripts/plan_quality.py --png scripts/results/plan_quality.png > scripts/results/plan_quality.txt
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exact_plan import Optimum, ranks, read_instances, solve, unlocked
from radix_pages.frame_planner import CachedPages, FrameNeed, FramePlan, FreeFrames, HeldFrames, plan_frames
from radix_pages.frame_search import Prices
from radix_pages.ledger import Ledger
from radix_pages.node import Node
from radix_pages.order import LeafQueue, make_order
from radix_pages.reclaim import reclaim
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry
from radix_pages_sglang.experiments.provenance import first_line

NEEDS = {"free_frames": FreeFrames, "held_frames": HeldFrames, "cached_pages": CachedPages}
PRICES = (
    {"move": 0.1, "first": 1.0, "later": 1.0},
    {"move": 0.5, "first": 1.0, "later": 1.0},
    {"move": 1.0, "first": 1.0, "later": 0.25},
    {"move": 3.0, "first": 1.0, "later": 1.0},
    {"move": 10.0, "first": 1.0, "later": 0.5},
)
TOKEN_BYTES = 8
LEAVES = (5_000, 10_000, 20_000, 40_000)


# -- instances --


def make_instance(rng: random.Random) -> dict[str, Any]:
    """A random instance in the format of scripts/exact_plan.py."""
    per_frame, num_frames = rng.choice((2, 4, 4, 8)), rng.randrange(3, 25)
    num_pages = num_frames * per_frame - 1 - rng.choice((0, rng.randrange(per_frame)))
    held = held_pages(rng, num_pages)
    outside = [held.pop() for _ in range(int(len(held) * rng.choice((0, 0, 0.1, 0.3))))]
    nodes = make_nodes(rng, held)
    share_locked = rng.choice((0, 0, 0.1, 0.3))
    for node in nodes:
        node["locked"] = rng.random() < share_locked
    num_held_frames = len({page // per_frame for page in (0, *held, *outside)})
    num_all_frames = num_pages // per_frame + 1
    asked = rng.randrange(1, num_held_frames + 1)
    need = rng.choice(
        (
            {"free_frames": num_all_frames - num_held_frames + asked},
            {"held_frames": asked},
            {"cached_pages": rng.randrange(len(held) + 1)},
        )
    )
    return {
        "pages_per_frame": per_frame,
        "num_pages": num_pages,
        "nodes": nodes,
        "held": outside,
        "need": need,
        "prices": rng.choice(PRICES),
    }


def held_pages(rng: random.Random, num_pages: int) -> list[int]:
    """Pages in the order in which nodes get them: all over the pool, or mostly in a row; holes few or many."""
    pages = list(range(1, num_pages + 1))
    if rng.random() < 0.5:
        rng.shuffle(pages)
    else:
        for _ in range(num_pages // 4):
            one, other = rng.randrange(num_pages), rng.randrange(num_pages)
            pages[one], pages[other] = pages[other], pages[one]
    num_held = max(1, int(num_pages * rng.choice((0.3, 0.6, 0.8, 0.95, 1.0))))
    return [pages[place] for place in sorted(rng.sample(range(num_pages), num_held))]


def make_nodes(rng: random.Random, pages: list[int]) -> list[dict[str, Any]]:
    """Nodes with these pages: single leaves, small trees or deep chains; parents mostly as young as what is below."""
    nodes: list[dict[str, Any]] = []
    leaves: set[int] = set()
    mean = max(1, len(pages) // rng.randrange(1, 41))
    share_below = rng.choice((0, 0.3, 0.8, 1.0))
    start = 0
    while start < len(pages):
        stop = start + rng.randrange(1, 2 * mean + 1)
        parent = None
        if nodes and (len(leaves) == 40 or rng.random() < share_below):
            parent = max(leaves) if len(leaves) == 40 else rng.randrange(max(0, len(nodes) - 3), len(nodes))
        leaves = (leaves - {parent}) | {len(nodes)}
        nodes.append({"parent": parent, "key": rng.randrange(1, 200), "pages": pages[start:stop], "locked": False})
        start = stop
    if rng.random() < 0.7:
        for node in reversed(nodes):
            if node["parent"] is not None:
                above = nodes[node["parent"]]
                above["key"] = max(above["key"], node["key"])
    return nodes


# -- planning --


def pages_of(nodes: Sequence[Node]) -> np.ndarray:
    """The pages of nodes whose payload is an array of slots, one slot a page."""
    return np.frombuffer(b"".join([node.payload for node in nodes]), dtype=np.int64)


def build(instance: dict[str, Any]) -> tuple[RadixTree, LeafQueue, Ledger]:
    """The instance as a real tree under lru, whose ticks are set to the keys, with queue and ledger."""
    geometry = Geometry(1, TOKEN_BYTES, instance["pages_per_frame"])
    leaves = LeafQueue(make_order("lru"))
    tree = RadixTree(geometry, np.copy, leaves)
    ledger = Ledger(geometry, instance["num_pages"])
    paths: list[np.ndarray] = []
    nodes: list[Node] = []
    for entry in instance["nodes"]:
        above = [] if entry["parent"] is None else paths[entry["parent"]]
        paths.append(np.array([*above, *entry["pages"]], dtype=np.int64))  # a page's number does as its token
        node = tree.insert(paths[-1].tobytes(), paths[-1]).node
        nodes.append(node)
    for node, entry in zip(nodes, instance["nodes"], strict=True):
        node.tick = entry["key"]
        if node.is_leaf:
            leaves.offer(node)
    for node, entry in zip(nodes, instance["nodes"], strict=True):
        if entry["locked"]:
            tree.lock(node.id)
    held = [*instance["held"], *(page for entry in instance["nodes"] for page in entry["pages"])]
    ledger.hold(np.array(held, dtype=np.int64))
    return tree, leaves, ledger


def need_of(instance: dict[str, Any]) -> FrameNeed:
    ((name, number),) = instance["need"].items()
    return NEEDS[name](number)


def carry_out(tree: RadixTree, ledger: Ledger, plan: FramePlan) -> None:
    """Evict, move (page numbers only, there is no KV here) and check that the plan's frames are empty."""
    for removal in reclaim(tree, plan):
        ledger.release(removal.payload)
    ledger.hold(plan.targets)
    target_of = np.arange(ledger.num_pages + 1)
    target_of[plan.sources] = plan.targets
    for node in plan.movers:
        node.payload = target_of[node.payload]
    ledger.release(plan.sources)
    if ledger.occupancy[plan.frames].any():
        raise RuntimeError("a frame of the plan is not empty")


def cost_of(instance: dict[str, Any], plan: FramePlan) -> float:
    """The plan's cost counted anew: the pages of its spans by their rank in the instance, and its moves."""
    nodes, prices = instance["nodes"], instance["prices"]
    rank_of = ranks(nodes, unlocked(nodes))
    rank_of_page = {page: rank for place, rank in rank_of.items() for page in nodes[place]["pages"]}
    gone = [page for one in plan.evictions for page in one.leaf.payload[one.span.start : one.span.stop].tolist()]
    evicted = sum(prices["first"] + prices["later"] * rank_of_page[page] for page in gone)
    return evicted + prices["move"] * len(plan.sources)


def weigh(instance: dict[str, Any]) -> dict[str, Any]:
    """One instance planned, carried out and compared."""
    tree, leaves, ledger = build(instance)
    num_held_frames = ledger.num_held_frames
    plan = plan_frames(leaves, ledger, need_of(instance), pages_of, Prices(**instance["prices"]))
    cost = cost_of(instance, plan)
    carry_out(tree, ledger, plan)
    best, still = solve(instance), solve(instance, moves=False)
    freed = num_held_frames - ledger.num_held_frames
    too_many = "cached_pages" in instance["need"] and tree.evictable_pages > instance["need"]["cached_pages"]
    return {
        "need": next(iter(instance["need"])),
        "move": instance["prices"]["move"],
        "ratio": ratio(cost, best),
        "without_moves": ratio(still.cost, best),
        "evicts": best.num_evicted > 0,
        "moves": best.num_moved > 0,
        "frees_less": freed < best.num_frames or plan.shortfall_frames != best.shortfall_frames or too_many,
    }


def ratio(cost: float, best: Optimum) -> float:
    if best.cost < 1e-9:
        return 1.0 if cost < 1e-9 else float("inf")
    return cost / best.cost


# -- speed --


def large_pool(num_leaves: int, share_held: float, seed: int) -> tuple[LeafQueue, Ledger]:
    """1,024 frames of 64 pages, so many leaves, so many of the pages held."""
    rng = np.random.default_rng(seed)
    geometry = Geometry(1, TOKEN_BYTES, 64)
    leaves = LeafQueue(make_order("lru"))
    tree = RadixTree(geometry, np.copy, leaves)
    ledger = Ledger(geometry, 1024 * 64 - 1)
    pages = rng.permutation(ledger.num_pages)[: int(ledger.num_pages * share_held)] + 1
    num_shared, shared_pages = 200, 4
    shared = pages[: num_shared * shared_pages].reshape(num_shared, shared_pages)
    rest = pages[num_shared * shared_pages :]
    cuts = np.sort(rng.choice(np.arange(1, len(rest)), num_leaves - 1, replace=False))
    for number, own in enumerate(np.split(rest, cuts)):
        path = np.concatenate((shared[number % num_shared], own))
        tree.insert(path.tobytes(), path)
    ledger.hold(pages)
    return leaves, ledger


def plan_ms(num_leaves: int, share_held: float, seed: int) -> dict[str, Any]:
    """The median time of a plan that frees 64 frames more, in the quietest of seven rounds of nine."""
    leaves, ledger = large_pool(num_leaves, share_held, seed)
    need = FreeFrames(int(np.count_nonzero(ledger.occupancy == 0)) + 64)
    rounds: list[list[float]] = [[] for _ in range(7)]
    gc.collect()
    gc.freeze()  # as a warm server does: what lives on is not looked at again and again
    for times in rounds:
        for _ in range(9):
            start = time.perf_counter()
            plan = plan_frames(leaves, ledger, need, pages_of)
            times.append(time.perf_counter() - start)
    gc.unfreeze()
    return {
        "leaves": num_leaves,
        "held": share_held,
        "ms": round(min(map(statistics.median, rounds)) * 1e3, 2),
        "least_ms": round(min(map(min, rounds)) * 1e3, 2),
        "evicted": plan.num_pages,
        "moved": len(plan.sources),
        "frames": len(plan.frames),
    }


# -- the report --


def table(rows: list[dict[str, Any]]) -> None:
    print(f"{'':28} {'':9} {'cost / optimum':^23} {'optimum without':>15}")
    print(f"{'':28} {'instances':>9} {'mean':>7} {'worst':>7} {'equal':>7} {'moves / with':>15}")

    def line(name: str, chosen: list[dict[str, Any]]) -> None:
        ratios = [row["ratio"] for row in chosen]
        equal = sum(one < 1 + 1e-6 for one in ratios)
        still = statistics.median(row["without_moves"] for row in chosen)
        print(f"{name:28} {len(chosen):9} {statistics.mean(ratios):7.4f} {max(ratios):7.4f} {equal:7} {still:15.2f}")

    for need in NEEDS:
        if chosen := [row for row in rows if row["need"] == need]:
            line(f"need: {need}", chosen)
    for move in sorted({row["move"] for row in rows}):
        line(f"a move costs {move}", [row for row in rows if row["move"] == move])
    line("all", rows)
    evicting, moving = (sum(row[what] for row in rows) for what in ("evicts", "moves"))
    print(f"the optimum evicts pages in {evicting} instances and moves pages in {moving}")
    print(f"plans that free less than is possible: {sum(row['frees_less'] for row in rows)}")


def draw(rows: list[dict[str, Any]], times: list[dict[str, Any]], path: Path) -> None:
    """Left: every ratio, sorted, a line for each price of a move. Right: time over leaves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for move in sorted({row["move"] for row in rows}):
        ratios = sorted(row["ratio"] for row in rows if row["move"] == move)
        left.plot(np.linspace(0, 100, len(ratios)), ratios, label=f"a move costs {move}", linewidth=1)
    left.axhline(1.25, color="black", linestyle=":", linewidth=1, label="worst allowed")
    left.set(xlabel="per cent of the instances", ylabel="cost / optimum", xlim=(80, 100))
    left.legend(fontsize=8)
    for held in sorted({one["held"] for one in times}):
        chosen = [one for one in times if one["held"] == held]
        right.plot([one["leaves"] for one in chosen], [one["ms"] for one in chosen], "o-", label=f"{held:.0%} held")
    right.axhline(10, color="black", linestyle=":", linewidth=1)
    right.set(xlabel="leaves", ylabel="ms for a plan of 64 of 1,024 frames", xlim=(0, None), ylim=(0, None))
    right.legend(fontsize=8)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=500, help="random instances")
    parser.add_argument("--instances", type=Path, metavar="FILE", help="plan these instead (see exact_plan.py)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the instances, one on each line")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", action="store_true", help="end with one line holding a JSON object")
    args = parser.parse_args()

    print(first_line(args.seed), flush=True)
    times = [plan_ms(leaves, held, args.seed) for held in (0.75, 0.9, 1.0) for leaves in LEAVES]
    if args.instances:
        instances = read_instances(args.instances)
    else:
        rng = random.Random(args.seed)
        instances = [make_instance(rng) for _ in range(args.num)]
    if args.write:
        args.write.write_text("".join(json.dumps(instance) + "\n" for instance in instances))
    rows = [weigh(instance) for instance in instances]
    table(rows)

    print(f"\n{'leaves':>6} {'held':>5} {'median ms':>9} {'least ms':>8} {'evicted':>7} {'moved':>6} {'frames':>6}")
    for one in times:
        print(
            f"{one['leaves']:6} {one['held']:5.0%} {one['ms']:9.2f} {one['least_ms']:8.2f} {one['evicted']:7} "
            f"{one['moved']:6} {one['frames']:6}"
        )
    if args.png:
        draw(rows, times, args.png)
    if args.json:
        ratios = [row["ratio"] for row in rows]
        asked = next(one for one in times if one["leaves"] == 20_000 and one["held"] == 1.0)
        result = {
            "mean_ratio": round(statistics.mean(ratios), 6),
            "worst_ratio": round(max(ratios), 6),
            "instances": len(rows),
            "plan_ms": asked["ms"],
            "frees_less": sum(row["frees_less"] for row in rows),
            "times": times,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
