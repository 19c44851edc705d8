#!/usr/bin/env python
"""How many frames does a cache hold while requests run, and what does it cost to hold fewer? One stream, every side.

The stream of scripts/stream.py (cold prompts come again, so that an eviction can cost a hit) is recorded once for
each load: how many requests start in each step. Every side serves that record with the real tree, queue, ledger,
placement, planner, moves and residency; only KV and its memory are imaginary. Running requests hold about 20% and 60%
of the pool, and on every side at most 819 pages (20%) are cached and not in use. From a third of the requests on,
the sides that trim are to keep so many frames free and returned that `ideal` + 1 frames are left (the standing
target, RADIX_PAGES_FREE_FRAMES). They do as the adapter: they are asked when more than an eighth of the target lacks,
and rest for 8 to 64 steps afterwards, longer and longer while they fall short. While the target stands, an
allocation evicts before it takes a frame from the neighbour.

Sides (placement; what it does when asked):
  nothing      stock; nothing is returned
  flush_cache  stock; drops all that is cached and not in use, as /flush_cache would if it worked under load
  whole_frame  stock; kvcached's published rule (github.com/ovg-project/kvcached; its page is our frame), written
               anew: frames without a page in use, those that cost the fewest pages first, among equals the one whose
               youngest page is oldest. A page takes with it what is below it in the tree. The cap is kept by the same
               rule: a frame goes as a whole or not at all, the first that is too large ends it, the rest goes by age
  placement    pack; nothing is returned
  moves        stock; `plan_frames` with `FreeFrames`, then moves, a slice a step; what came free goes back at the end
  ours         pack; the same
Beside them:
  pack_whole   pack; as whole_frame: what selection alone finds where pages are well placed
  target       pack; returns what is empty and plans nothing: what the target alone brings
  packing      pack; no target: packs what is cached (`CachedPages`) whenever the frames held are 3 more than could
               hold it, evicting nothing: what moves bring at the hit rate of `nothing`
  at_once      as ours, but asked as soon as one frame lacks

`ideal` is ceil((locked + kept pages) / pages of a frame): locked pages are those that running requests use, kept ones
those cached and not in use. `nothing - ideal` is the gap, and `closed` says by how much of it a side holds less. All
are means over samples, taken every 4th step from 100 steps after the target was set to the start of the last request.
`held` are frames with a page, `memory` those that are committed (where nothing is returned: held). `held_20` and
`held_60` are the memory of `ours`: a frame that is empty but was not returned counts against it. `closed_by_target`
is what `target` closes beyond `placement`, `closed_by_moves` what `ours` closes beyond that, `closed_by_packing` what
`packing` closes beyond `placement`. `copied_per_returned` is pages moved over the pages of frames that came back at
the end of a plan, the worst of `ours` and `packing` at both loads; frames that were empty anyway do not count, frames
that were needed again (`regrown`) do. A hit rate is prompt tokens found in the cache over prompt tokens, after the
target was set; so are evicted pages. Last table: the lower load with bursts of the higher, 300 steps each, and the
target of the lower: does a pool that loses its free frames again and again copy in circles?

Not measured here: time. `p99_itl_ratio` and `longest_stall_ms` are those that scripts/served_trims.py measured on
real servers and left in its results file; `--serve` runs it first, which takes some minutes.

    scripts/under_load.py --png scripts/results/under_load.png > scripts/results/under_load.txt
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from radix_pages.check import disagreements
from radix_pages.frame_planner import CachedPages, FrameNeed, FreeFrames, plan_frames
from radix_pages.ledger import Ledger, Pages
from radix_pages.node import Node
from radix_pages.placement import PLACEMENTS
from radix_pages.planner import Plan
from radix_pages.reclaim import Moves, reclaim, relocated
from radix_pages.residency import Residency
from radix_pages.units import Geometry
from radix_pages_sglang.experiments.colocate.whole_frames import evicting, with_all_below
from radix_pages_sglang.experiments.no_memory import NoMemory
from radix_pages_sglang.experiments.provenance import RESULTS, first_line
from stream import PAGE_SIZE, Recorder, Request, Serving, make_requests, pages_in

CONCURRENCY = {20: 24, 60: 85}
"""How many requests run, by the percentage of the pool that they hold."""
BURST_STEPS = 300
BURSTS = "bursts"
LOADS = (*CONCURRENCY, BURSTS)
SETTLING_STEPS = 100
SAMPLED = 4
LEAST_REST, MOST_REST = 8, 64
MOST_REPLANS = 8
SERVED = RESULTS / "served_trims.json"
SERVED_KEYS = ("p99_itl_ratio", "longest_stall_ms")


class Server(Serving):
    """Serves on a pool of pages. It is also the mover, which counts what it copies.

    Room is made as the allocator does it: commit frames but spare the neighbour's, then evict, then take those, too.
    """

    def __init__(self, placement: str, num_pages: int, pages_per_frame: int, cached_pages: int) -> None:
        super().__init__(Geometry(PAGE_SIZE, pages_per_frame=pages_per_frame), cached_pages)
        self.ledger = Ledger(self.geometry, num_pages)
        self.placement = PLACEMENTS[placement](self.ledger)
        self.residency = Residency(self.placement, NoMemory())
        self.taken = 0
        self.evicted = 0
        self.moved = 0

    def extend(self, num_pages: int, near: int | None) -> list[int]:
        self.make_room(num_pages)
        return self.placement.take(num_pages, near).tolist()

    def grow(self, near: list[int]) -> list[int]:
        self.make_room(len(near))
        return [self.placement.take_one(one) for one in near]

    def make_room(self, num_pages: int) -> None:
        self.taken += num_pages
        for make in (
            lambda lacking: self.residency.grow(lacking, spare_neighbour=True),
            self.evict,
            self.residency.grow,
        ):
            lacking = num_pages - self.placement.num_free
            if lacking > 0:
                make(lacking)

    def give(self, pages: list[int], is_eviction: bool = False) -> None:
        if pages:
            self.evicted += len(pages) * is_eviction
            self.placement.give(np.array(pages))

    def pages_of(self, nodes: Sequence[Node]) -> Pages:
        return np.concatenate([node.payload for node in nodes])[::PAGE_SIZE]

    def copy(self, sources: Pages, targets: Pages) -> None:
        self.moved += len(sources)

    def repointed(self, payload: np.ndarray, sources: Pages, targets: Pages) -> np.ndarray:
        return np.repeat(relocated(payload[::PAGE_SIZE], sources, targets), PAGE_SIZE)

    def locked_frames(self) -> int:
        """Frames with a page that a running request uses."""
        pages = [page for request in self.running for page in request.pages]
        return len(np.unique(self.geometry.frame_of(np.array(pages, dtype=np.int64))))

    def check(self) -> None:
        """Raises RuntimeError when tree, requests and ledger disagree about who holds what."""
        found = disagreements(self.tree, self.leaves) + self.residency.disagreements()
        pages = [page for node in self.tree.nodes() for page in node.payload[::PAGE_SIZE].tolist()]
        pages += [page for request in self.running for page in request.pages[request.shared :]]
        if sorted(pages) != (np.flatnonzero(self.ledger.is_held[1:]) + 1).tolist():
            found.append("the pages of tree and requests are not those that the ledger has as held")
        if found:
            raise RuntimeError("; ".join(found))


def evict_frames(server: Server, *, max_pages: int | None = None, max_frames: int | None = None) -> None:
    """Evict frames that no running request uses, as `whole_frame` above, within both limits."""
    while max_frames is None or max_frames > 0:
        plan = cheapest_frame(server)
        if plan is None or (max_pages is not None and plan.num_pages > max_pages):
            return
        held = server.ledger.num_held_frames
        server.carry_out(plan)
        if max_pages is not None:
            max_pages -= plan.num_pages
        if max_frames is not None:
            max_frames -= held - server.ledger.num_held_frames


def cheapest_frame(server: Server) -> Plan | None:
    """What has to be evicted so that the frame comes free that costs the fewest pages; None when none can."""
    nodes = [node for node in server.tree.nodes() if not node.locks]
    if not nodes:
        return None
    frames = server.geometry.frame_of(server.pages_of(nodes))
    lengths = [node.num_pages for node in nodes]
    owner = np.repeat(np.arange(len(nodes)), lengths)
    place = np.arange(len(frames)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_free_of_locks = server.ledger.occupancy == np.bincount(frames, minlength=server.ledger.num_frames)
    best = None
    for frame in np.unique(frames[is_free_of_locks[frames]]).tolist():
        starts: dict[int, int] = {}
        for page in np.flatnonzero(frames == frame).tolist():
            starts.setdefault(int(owner[page]), int(place[page]))
        lost = with_all_below({nodes[i]: start for i, start in starts.items()})
        num_pages = sum(node.num_pages - start for node, start in lost.items())
        cost = (num_pages, max(node.tick for node in lost), frame)
        if best is None or cost < best[0]:
            best = cost, lost
    return None if best is None else evicting(best[1])


class WholeFrameServer(Server):
    """Keeps the cap by whole frames."""

    def keep_cap(self) -> None:
        evict_frames(self, max_pages=max(self.tree.evictable_pages - self.cached_pages, 0))
        super().keep_cap()


# -- trimming --


class Trimmer:
    """Keeps `free_frames` frames returned as the adapter does: acts when more than `slack` lack. This one returns
    what is empty and frees nothing."""

    def __init__(self, server: Server, free_frames: int, slack: int) -> None:
        self.server = server
        self.free_frames = free_frames
        self.slack = slack
        self.rest = 0
        self.next_rest = LEAST_REST
        self.returned = self.tries = 0
        server.residency.free_frames = free_frames

    @property
    def lacking(self) -> int:
        return self.free_frames - self.server.ledger.num_returned_frames

    def step(self) -> None:
        """What is done between two batches."""
        if self.rest:
            self.rest -= 1
        elif self.lacking > self.slack:
            self.give_back()
            if self.lacking > 0:
                self.free()
                self.end()

    def free(self) -> None:
        """Evict so that frames come free, at once."""

    def end(self) -> None:
        self.tries += 1
        self.returned += self.give_back()
        self.next_rest = min(2 * self.next_rest, MOST_REST) if self.lacking > 0 else LEAST_REST
        self.rest = self.next_rest

    def give_back(self) -> int:
        return self.server.residency.trim(self.server.ledger.num_frames - self.free_frames)


class Flushing(Trimmer):
    """Drops all that is cached and not in use."""

    def free(self) -> None:
        self.server.evict(self.server.tree.evictable_pages)


class ByWholeFrames(Trimmer):
    """Evicts whole frames, those that no running request uses."""

    def free(self) -> None:
        evict_frames(self.server, max_frames=self.lacking)


class Moving(Trimmer):
    """Plans, evicts, and moves a slice a step; what came free goes back at the end of the plan."""

    def __init__(self, server: Server, free_frames: int, slack: int, *, moves_a_step: int) -> None:
        super().__init__(server, free_frames, slack)
        self.moves_a_step = moves_a_step
        self.need: FrameNeed | None = None
        self.moves: Moves | None = None
        self.void = self.replans = 0

    def find_need(self) -> FrameNeed | None:
        """What to plan for now, if anything."""
        if self.lacking <= self.slack:
            return None
        self.give_back()
        return FreeFrames(self.lacking) if self.lacking > 0 else None

    def step(self) -> None:
        if self.rest:
            self.rest -= 1
            return
        if self.need is None:
            self.need = self.find_need()
        if self.need is None:
            return
        if self.moves is None:
            self.moves = self.begin(self.need)
        self.moves.step(self.moves_a_step)
        if not self.moves.is_done:
            return
        is_stale, self.moves = self.moves.is_stale, None
        self.void += is_stale
        self.replans += is_stale
        if not is_stale or self.replans > MOST_REPLANS:
            self.need, self.replans = None, 0
            self.end()

    def begin(self, need: FrameNeed) -> Moves:
        server = self.server
        plan = plan_frames(server.leaves, server.ledger, need, server.pages_of)
        server.give(pages_in(reclaim(server.tree, plan)), is_eviction=True)
        return Moves(server.tree, server.placement, server, plan)


class Packing(Moving):
    """Packs what is cached, evicting nothing, when the frames held are `slack` more than could hold it."""

    def find_need(self) -> FrameNeed | None:
        ledger = self.server.ledger
        floor = ledger.geometry.frames_to_hold(ledger.num_held + 1)  # and the padding page
        is_due = ledger.num_held_frames - floor >= self.slack
        return CachedPages(self.server.tree.evictable_pages) if is_due else None

    def give_back(self) -> int:
        return self.server.residency.trim()


@dataclass(frozen=True, slots=True)
class Side:
    """How a side places pages, and what it does when it is asked to trim."""

    placement: str
    trim: str = ""

    def server(self, *pool: int) -> Server:
        return (WholeFrameServer if self.trim == "whole" else Server)(self.placement, *pool)

    def trimmer(self, server: Server, free_frames: int, moves_a_step: int) -> Trimmer | None:
        slack = free_frames // 8
        match self.trim:
            case "flush":
                return Flushing(server, free_frames, slack)
            case "whole":
                return ByWholeFrames(server, free_frames, slack)
            case "move":
                return Moving(server, free_frames, slack, moves_a_step=moves_a_step)
            case "move at once":
                return Moving(server, free_frames, 0, moves_a_step=moves_a_step)
            case "pack":
                return Packing(server, 0, 3, moves_a_step=moves_a_step)
            case "return":
                return Trimmer(server, free_frames, slack)
        return None


SIDES = {
    "nothing": Side("stock"),
    "flush_cache": Side("stock", "flush"),
    "whole_frame": Side("stock", "whole"),
    "placement": Side("pack"),
    "moves": Side("stock", "move"),
    "ours": Side("pack", "move"),
    "pack_whole": Side("pack", "whole"),
    "target": Side("pack", "return"),
    "packing": Side("pack", "pack"),
    "at_once": Side("pack", "move at once"),
}


# -- serving --


class Bursts(Recorder):
    """Bursts of the higher load in between the lower."""

    def admit(self) -> bool:
        self.concurrency = CONCURRENCY[60 if len(self.starts) // BURST_STEPS % 2 else 20]
        return super().admit()


@dataclass(frozen=True, slots=True)
class Sample:
    """Frames and pages at one moment."""

    step: int
    held: int
    memory: int
    locked_frames: int
    held_pages: int
    locked_pages: int


@dataclass(frozen=True, slots=True)
class Run:
    """One side at one load: samples of the whole run, and of the part that counts; totals since the target."""

    all_samples: list[Sample]
    samples: list[Sample]
    hit_rate: float
    copied: int
    evicted: int
    taken: int
    returned: int
    regrown: int
    plans: int
    void_plans: int


def serve(
    side: Side, server: Server, requests: list[Request], starts: list[int], free_frames: int, moves_a_step: int
) -> Run:
    """Serve the record until the last request has started."""
    waiting = iter(requests)
    started = 0
    trimmer: Trimmer | None = None
    begun: int | None = None
    before = (0, 0, 0, 0)
    samples: list[Sample] = []
    for step, num_starts in enumerate(starts):
        for _ in range(num_starts):
            server.start(next(waiting))
        if not num_starts:
            server.decode()
        started += num_starts
        if begun is None and started >= len(requests) // 3:
            begun = step
            trimmer = side.trimmer(server, free_frames, moves_a_step)
            before = (server.hit_tokens, server.prompt_tokens, server.evicted, server.taken)
        if trimmer is not None:
            trimmer.step()
        if step % SAMPLED == 0:
            samples.append(sample(server, step, returns=trimmer is not None))
        if started == len(requests):
            break
    server.check()
    assert begun is not None
    hits, tokens, evicted, taken = before
    return Run(
        samples,
        [one for one in samples if one.step >= begun + SETTLING_STEPS],
        (server.hit_tokens - hits) / (server.prompt_tokens - tokens),
        server.moved,
        server.evicted - evicted,
        server.taken - taken,
        trimmer.returned if trimmer else 0,
        server.residency.counts.committed_again_total,
        trimmer.tries if trimmer else 0,
        trimmer.void if isinstance(trimmer, Moving) else 0,
    )


def sample(server: Server, step: int, *, returns: bool) -> Sample:
    ledger = server.ledger
    held = ledger.num_held_frames
    memory = server.residency.committed_frames if returns else held
    locked_pages = ledger.num_held - server.tree.evictable_pages
    return Sample(step, held, memory, server.locked_frames(), ledger.num_held, locked_pages)


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def ideal(run: Run, geometry: Geometry) -> float:
    return mean([geometry.frames_to_hold(one.held_pages) for one in run.samples])


# -- the report --

HEAD = (
    f"{'side':12} {'memory':>7} {'held':>6} {'locked':>7} {'ideal':>6} {'closed':>7} {'hits':>7} {'evicted':>8} "
    f"{'moved':>6} {'returned':>9} {'regrown':>8} {'copied/ret.':>12} {'plans':>6} {'void':>5}"
)


def row_of(name: str, load: int, run: Run, geometry: Geometry) -> dict[str, Any]:
    returned_pages = run.returned * geometry.pages_per_frame
    return {
        "side": name,
        "load": load,
        "memory": round(mean([one.memory for one in run.samples]), 2),
        "held": round(mean([one.held for one in run.samples]), 2),
        "locked_frames": round(mean([one.locked_frames for one in run.samples]), 2),
        "ideal": round(ideal(run, geometry), 2),
        "hit_rate": round(run.hit_rate, 4),
        "evicted_pages": run.evicted,
        "taken_pages": run.taken,
        "copied_pages": run.copied,
        "returned_frames": run.returned,
        "regrown_frames": run.regrown,
        "copied_per_returned": round(run.copied / returned_pages, 3) if returned_pages else None,
        "plans": run.plans,
        "void_plans": run.void_plans,
    }


def closed(row: dict[str, Any], nothing: dict[str, Any]) -> float:
    """The part of `nothing` - `ideal` by which a side holds less memory."""
    return (nothing["memory"] - row["memory"]) / (nothing["memory"] - nothing["ideal"])


def line(row: dict[str, Any], nothing: dict[str, Any]) -> str:
    ratio = row["copied_per_returned"]
    return (
        f"{row['side']:12} {row['memory']:7.1f} {row['held']:6.1f} {row['locked_frames']:7.1f} {row['ideal']:6.1f} "
        f"{closed(row, nothing):7.1%} {row['hit_rate']:7.2%} {row['evicted_pages']:8} {row['copied_pages']:6} "
        f"{row['returned_frames']:9} {row['regrown_frames']:8} {'-' if ratio is None else f'{ratio:.2f}':>12} "
        f"{row['plans']:6} {row['void_plans']:5}"
    )


def draw(runs: dict[int, dict[str, Run]], geometry: Geometry, path: Path) -> None:
    """Memory over the steps, a panel for each load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {
        "nothing": "tab:gray",
        "flush_cache": "tab:red",
        "whole_frame": "tab:orange",
        "placement": "tab:green",
        "moves": "tab:purple",
        "packing": "tab:cyan",
        "ours": "tab:blue",
    }
    figure, panels = pyplot.subplots(1, len(runs), figsize=(14, 5), layout="constrained")
    for panel, (load, sides) in zip(panels, runs.items(), strict=True):
        for name, colour in colours.items():
            samples = sides[name].all_samples
            samples = samples[:: max(len(samples) // 400, 1)]
            memory = [one.memory for one in samples]
            panel.plot([one.step for one in samples], memory, color=colour, label=name, linewidth=1)
        samples = sides["nothing"].all_samples
        samples = samples[:: max(len(samples) // 400, 1)]
        floor = [geometry.frames_to_hold(one.held_pages) for one in samples]
        panel.plot([one.step for one in samples], floor, color="black", label="ideal", linewidth=1)
        panel.axvline(sides["nothing"].samples[0].step - SETTLING_STEPS, color="black", linewidth=0.8, linestyle=":")
        panel.set_title("bursts" if load == BURSTS else f"{load}% of the pool in use")
        panel.set_xlabel("steps; dotted: the target is set")
        top = max(one.memory for name in colours for one in sides[name].samples)
        panel.set_ylim(min(floor[len(floor) // 4 :]) - 4, top + 2)
    panels[0].set_ylabel("frames with memory")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


def read_served(path: Path) -> dict[str, float]:
    served = json.loads(path.read_text())
    if missing := [name for name in SERVED_KEYS if name not in served]:
        raise SystemExit(f"{path} lacks {', '.join(missing)}")
    return {name: served[name] for name in SERVED_KEYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("--requests", type=int, default=2400)
    parser.add_argument("--cold", type=int, default=100, help="so many cold prompts come again and again")
    parser.add_argument("--pages", type=int, default=4095, help=f"pages of {PAGE_SIZE} slots; page 0 comes on top")
    parser.add_argument("--frame-pages", type=int, default=64, help="pages of a frame")
    parser.add_argument("--cached-pages", type=int, default=819, help="at most so many are cached and not in use")
    parser.add_argument("--margin", type=int, default=1, help="frames that the target leaves beyond the ideal")
    parser.add_argument("--moves", type=int, default=32, help="pages that a slice may move")
    parser.add_argument(
        "--served", type=Path, metavar="FILE", help="what a real server measured, to merge", default=SERVED
    )
    parser.add_argument("--serve", action="store_true", help="measure that first")
    parser.add_argument("--png", type=Path, help="also draw the memory of the sides into this file")
    parser.add_argument("--json", action="store_true", help="end with one line holding the result as a JSON object")
    args = parser.parse_args()
    if args.serve:
        subprocess.run([sys.executable, str(Path(__file__).with_name("served_trims.py"))], check=True)
    served = read_served(args.served)

    geometry = Geometry(PAGE_SIZE, pages_per_frame=args.frame_pages)
    pool = (args.pages, args.frame_pages, args.cached_pages)
    print(first_line(args.seed))
    print(
        f"# {args.requests} requests, {args.pages} pages of {PAGE_SIZE} slots in frames of {args.frame_pages}, "
        f"{args.cached_pages} cached at most, {args.moves} moves a slice"
    )
    result: dict[str, Any] = {"rows": []}
    runs: dict[int, dict[str, Run]] = {}
    num_frames = geometry.frame_of(args.pages) + 1
    targets: dict[str, int] = {}
    for load in LOADS:
        requests = make_requests(args.requests, args.seed, args.cold)
        if load == BURSTS:
            recorder: Recorder = Bursts(requests, 0, args.pages, args.cached_pages)
        else:
            recorder = Recorder(requests, CONCURRENCY[load], args.pages, args.cached_pages)
        recorder.record()
        free_frames = targets.get(20, 0)
        rows: dict[str, dict[str, Any]] = {}
        runs[load] = {}
        for name, side in SIDES.items():
            requests = make_requests(args.requests, args.seed, args.cold)
            run = serve(side, side.server(*pool), requests, recorder.starts, free_frames, args.moves)
            runs[load][name] = run
            rows[name] = row_of(name, load, run, geometry)
            if name == "nothing":
                share = mean([one.locked_pages for one in run.samples]) / args.pages
                if load != BURSTS:
                    free_frames = targets[load] = num_frames - round(rows[name]["ideal"]) - args.margin
                print(
                    f"\n{load}: running requests hold {share:.0%} of the pool; target: {free_frames} of {num_frames} "
                    f"frames free, so {num_frames - free_frames} with memory\n{HEAD}"
                )
            print(line(rows[name], rows["nothing"]), flush=True)
        result["rows"] += rows.values()
        if load != BURSTS:
            result |= summary(load, rows)
    result["copied_per_returned"] = max(
        row["copied_per_returned"] or 0.0
        for row in result["rows"]
        if row["side"] in ("ours", "packing") and row["load"] != BURSTS
    )
    print(
        f"\npages moved over pages of frames returned, ours and packing, at most {result['copied_per_returned']:.2f}"
    )
    for name, value in served.items():
        print(f"on a real server ({args.served.name}): {name} {value}")
    if args.png:
        draw(runs, geometry, args.png)
    if args.json:
        print(json.dumps(result | served))


def summary(load: int, rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The numbers of one load, and a line that says what brought them."""
    nothing, ours = rows["nothing"], rows["ours"]
    placement, target, packing, all_of_it = (
        closed(rows[name], nothing) for name in ("placement", "target", "packing", "ours")
    )
    print(
        f"ours closes {all_of_it:.0%} of the gap: placement {placement:.0%}, the target {target - placement:.0%}, "
        f"moves {all_of_it - target:.0%}; packing without a target {packing:.0%}: placement {placement:.0%}, "
        f"moves {packing - placement:.0%}"
    )
    return {
        f"held_{load}": ours["memory"],
        f"ideal_{load}": nothing["ideal"],
        f"nothing_{load}": nothing["memory"],
        f"locked_frames_{load}": ours["locked_frames"],
        f"closed_{load}": round(all_of_it, 3),
        f"closed_by_placement_{load}": round(placement, 3),
        f"closed_by_target_{load}": round(target - placement, 3),
        f"closed_by_moves_{load}": round(all_of_it - target, 3),
        f"closed_by_packing_{load}": round(packing - placement, 3),
    }


if __name__ == "__main__":
    main()
