#!/usr/bin/env python
"""Which rule for choosing pages keeps memory in the fewest frames? One stream of requests, replayed through each.

A simulated scheduler runs the real tree, queue and planner in virtual time (a step is one forward pass) and records
what it asks of an allocator: pages for a prompt, a page for each decode that begins one, pages that come back, pages
that a running request locks. Requests share 16 hot prefixes of 128 tokens (3 in 10, suffix 64) or are cold (192 to
1,024 tokens), and decode 16 to 256 tokens; a new one starts when one ends. Evictions go by age and token position,
so the record is the same whatever page each token is in, and every rule replays the same record. What is cached and
not in use is bounded (as RADIX_PAGES_MAX_CACHED_TOKENS or kvcached's limit does), so that there are holes to choose
among. With a pool that is simply full there are none: an eviction frees exactly what the next allocation takes. That
case is recorded too, and its table shows that rules make no difference there.

Rules (a run is the pages that one request asks for at once):
  stock     SGLang's paged allocator: what was freed last goes first
  kvcached  as its pull request 390 and tests/test_bestfit_page_selection.py describe it (github.com/ovg-project/
            kvcached; its page is our frame, its block our page): the frame with the least room that holds the whole
            run, failing that the one with the most room, an empty one when no other has room; decodes drain the
            smallest holes first. Among equals: the frame that was available first
  pack      `radix_pages.placement.PackPlacement`

Tried on the way to `pack`, each a change of one thing (second table): another order among the frames that hold the
whole run (fullest, latest used, most locked pages), leaving out one of its rules, empty frames also for half a frame,
room left beside a prompt for its decodes, and two rules that need no more than a sorted free list (held frames in
front, their pages by number or those of the fullest first), for pools whose pages the host does not know. What
brings most: the first frame instead of the fullest (64 and 128 pages a frame), empty frames for runs (16). A page
beside its request's last one brings a little everywhere. Knowing which pages are locked brings nothing on top. Empty
frames for half a frame lock fewer but hold more, at 64 pages more than kvcached's rules. The limit costs little and
keeps the peak where every other rule has it.

Phases: load (mean over steps from the first eviction to the end of the last request), peak, idle (all requests have
ended), trimmed (then the older half of the cache was evicted). A frame is locked while a running request uses one of
its pages. Frame 0 counts as held always. Not measured: time, a device, moves.

    scripts/placement.py --png scripts/results/placement.png > scripts/results/placement.txt
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from radix_pages.ledger import Ledger
from radix_pages.placement import PLACEMENTS, Placement
from radix_pages.units import Geometry
from radix_pages_sglang.experiments.provenance import first_line
from stream import PAGE_SIZE, Decode, Extend, Give, Lock, Mark, Recorder, Ticket, make_requests

FRAME_SIZES = (16, 64, 128)
CONCURRENCIES = (32, 96)


# -- rules --


class Rule(Protocol):
    """What a replay needs: pages for a prompt, pages for decodes, pages back."""

    ledger: Ledger
    locked: np.ndarray

    def extend(self, num_pages: int, near: int | None) -> list[int]: ...

    def decode(self, near: list[int]) -> list[int]: ...

    def give(self, pages: np.ndarray) -> None: ...


class Served:
    """A placement that a server offers. `locked` has the number of locked pages of every frame."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.ledger = ledger
        self.locked = np.zeros(ledger.num_frames, dtype=np.int64)
        self.placement: Placement = PLACEMENTS[name](ledger)

    def extend(self, num_pages: int, near: int | None) -> list[int]:
        return self.placement.take(num_pages, near).tolist()

    def decode(self, near: list[int]) -> list[int]:
        return [page for one in near for page in self.extend(1, one)]

    def give(self, pages: np.ndarray) -> None:
        self.placement.give(pages)


class FrameByFrame:
    """A rule that names one frame at a time and takes what it can from it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.locked = np.zeros(ledger.num_frames, dtype=np.int64)

    def choose(self, num_pages: int, near: int | None) -> int:
        """The frame to take from, for a run of which `num_pages` are missing, by a request in the frame `near`."""
        raise NotImplementedError

    def extend(self, num_pages: int, near: int | None) -> list[int]:
        frame_of = self.ledger.geometry.frame_of
        pages: list[int] = []
        while len(pages) < num_pages:
            missing = num_pages - len(pages)
            pages += self.take(self.choose(missing, None if near is None else frame_of(near)), missing)
        return pages

    def decode(self, near: list[int]) -> list[int]:
        return [page for one in near for page in self.extend(1, one)]

    def take(self, frame: int, most: int) -> list[int]:
        first, end = (self.ledger.geometry.first_page(edge) for edge in (frame, frame + 1))
        pages = np.flatnonzero(~self.ledger.is_held[first:end])[:most] + first
        self.ledger.hold(pages)
        return pages.tolist()

    def give(self, pages: np.ndarray) -> None:
        self.ledger.release(pages)


class Kvcached(FrameByFrame):
    """See the top of this file. Frames wait in the order in which they became available, or empty."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.available: dict[int, None] = {0: None}
        self.empty = dict.fromkeys(range(1, ledger.num_frames))

    def room(self, frame: int) -> int:
        return int(self.ledger.sizes[frame] - self.ledger.occupancy[frame])

    def choose(self, num_pages: int, near: int | None) -> int:
        if not self.available:
            return next(iter(self.empty))
        fitting = [frame for frame in self.available if self.room(frame) >= num_pages]
        return min(fitting, key=self.room) if fitting else max(self.available, key=self.room)

    def decode(self, near: list[int]) -> list[int]:
        pages: list[int] = []
        while len(pages) < len(near):
            frame = min(self.available, key=self.room) if self.available else next(iter(self.empty))
            pages += self.take(frame, len(near) - len(pages))
        return pages

    def take(self, frame: int, most: int) -> list[int]:
        pages = super().take(frame, most)
        self.file([frame])
        return pages

    def give(self, pages: np.ndarray) -> None:
        super().give(pages)
        self.file(dict.fromkeys(self.ledger.geometry.frame_of(pages).tolist()))

    def file(self, frames: Iterable[int]) -> None:
        for frame in frames:
            self.available.pop(frame, None)
            self.empty.pop(frame, None)
            if not self.ledger.occupancy[frame]:
                self.empty[frame] = None
            elif self.room(frame):
                self.available[frame] = None


@dataclass(frozen=True, slots=True)
class Variant:
    """`pack` with something changed: `order` among the frames that hold a whole run, whether a page goes beside
    its request, the least part of a frame for which a run gets an empty one, whether the most frames ever held are
    a limit to that, and pages of room that a prompt and a decode want to find beyond what they take. Without
    `whole_run` each page of a run is placed for itself, as a sorted free list does it."""

    order: str = "number"
    whole_run: bool = True
    beside: bool = True
    part: float = 1.0
    limit: bool = True
    spare: int = 0


class Tried(FrameByFrame):
    """Rules that `pack` was chosen from."""

    def __init__(self, ledger: Ledger, variant: Variant) -> None:
        super().__init__(ledger)
        self.variant = variant
        self.most_frames = 1
        self.used = np.zeros(ledger.num_frames, dtype=np.int64)
        self.clock = 0

    def choose(self, num_pages: int, near: int | None) -> int:
        ledger, variant = self.ledger, self.variant
        if not variant.whole_run:
            num_pages = 1
        room = ledger.sizes - ledger.occupancy
        if variant.beside and near is not None and room[near]:
            return near
        is_held = ledger.occupancy > 0
        held = np.flatnonzero(is_held & (room > 0))
        empty = np.flatnonzero(~is_held)
        per_frame = ledger.geometry.pages_per_frame
        may_open = len(empty) and (not variant.limit or ledger.num_held_frames < self.most_frames)
        if may_open and num_pages >= per_frame:
            if variant.part <= 1:
                return int(empty[0])
        elif not len(held):
            return int(empty[0])
        fitting = held[room[held] >= min(num_pages + variant.spare, per_frame)]
        if len(fitting):
            return int(fitting[np.argmin(self.rank(fitting))])
        if may_open and num_pages >= variant.part * per_frame:
            return int(empty[0])
        return int(held[np.argmax(room[held])]) if len(held) else int(empty[0])

    def rank(self, frames: np.ndarray) -> np.ndarray:
        """Smaller is better; equals go by number."""
        ledger = self.ledger
        return {
            "number": lambda: frames,
            "fullest": lambda: ledger.sizes[frames] - ledger.occupancy[frames],
            "latest": lambda: -self.used[frames],
            "locked": lambda: -self.locked[frames],
        }[self.variant.order]()

    def take(self, frame: int, most: int) -> list[int]:
        pages = super().take(frame, most)
        self.clock += 1
        self.used[frame] = self.clock
        self.most_frames = max(self.most_frames, self.ledger.num_held_frames)
        return pages


RULES: dict[str, Callable[[Ledger], Rule]] = {
    "stock": lambda ledger: Served("stock", ledger),
    "kvcached": Kvcached,
    "pack": lambda ledger: Served("pack", ledger),
}
NEVER = float("inf")
TRIED = {
    "fullest instead of first": Variant("fullest"),
    "latest used instead of first": Variant("latest"),
    "most locked instead of first": Variant("locked"),
    "not beside its request": Variant(beside=False),
    "no empty frame for a run": Variant(part=NEVER),
    "fullest, no empty frame": Variant("fullest", part=NEVER),
    "without the limit": Variant(limit=False),
    "empty also for half a frame": Variant(part=0.5),
    "4 pages of spare room": Variant(spare=4),
    "page by page, number": Variant(whole_run=False, beside=False, part=NEVER),
    "page by page, fullest": Variant("fullest", whole_run=False, beside=False, part=NEVER),
}


# -- replaying --


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts of frames at one moment, or means of them."""

    frames_held: float
    locked_frames: float
    packed_floor: float


@dataclass(frozen=True, slots=True)
class Replay:
    """One row for each phase, and every step of the load from the first eviction on."""

    phases: dict[str, Sample]
    steps: list[Sample]


def sample(rule: Rule) -> Sample:
    ledger = rule.ledger
    floor = ledger.geometry.frames_to_hold(ledger.num_held)
    return Sample(ledger.num_held_frames, int(np.count_nonzero(rule.locked)), floor)


def replay(ops: list[Any], make_rule: Callable[[Ledger], Rule], num_pages: int, pages_per_frame: int) -> Replay:
    rule = make_rule(Ledger(Geometry(PAGE_SIZE, pages_per_frame=pages_per_frame), num_pages))
    frame_of = rule.ledger.geometry.frame_of
    page_of: dict[Ticket, int] = {}
    steps: list[Sample] = []
    phases: dict[str, Sample] = {}
    has_evicted = False

    def place(tickets: list[Ticket], pages: list[int]) -> None:
        page_of.update(zip(tickets, pages, strict=True))
        for page in pages:
            rule.locked[frame_of(page)] += 1

    for op in ops:
        match op:
            case Extend(tickets, near):
                place(tickets, rule.extend(len(tickets), None if near is None else page_of[near]))
            case Decode(tickets, near):
                place(tickets, rule.decode([page_of[one] for one in near]))
            case Give(tickets, is_eviction):
                has_evicted = has_evicted or is_eviction
                rule.give(np.array([page_of.pop(ticket) for ticket in tickets]))
            case Lock(tickets, is_over):
                for ticket in tickets:
                    rule.locked[frame_of(page_of[ticket])] += -1 if is_over else 1
            case Mark("load"):
                if has_evicted:
                    steps.append(sample(rule))
            case Mark(phase):
                phases[phase] = sample(rule)
    columns = list(zip(*((s.frames_held, s.locked_frames, s.packed_floor) for s in steps), strict=True))
    load = Sample(*(round(sum(column) / len(column), 1) for column in columns))
    return Replay({"load": load, "peak": Sample(*map(max, columns)), **phases}, steps)


# -- the report --

HEAD = f"{'':30} {'load':^22} {'peak':^17} {'idle':^11} {'trimmed':^11}\n" + (
    f"{'rule':30} {'held':>7} {'locked':>7} {'floor':>6} {'held':>5} {'locked':>6} {'flr':>4} "
    f"{'held':>6} {'flr':>4} {'held':>6} {'flr':>4}"
)


def line(name: str, phases: dict[str, Sample]) -> str:
    load, peak, idle, trimmed = (phases[phase] for phase in ("load", "peak", "idle", "trimmed"))
    return (
        f"{name:30} {load.frames_held:7.1f} {load.locked_frames:7.1f} {load.packed_floor:6.1f} "
        f"{peak.frames_held:5} {peak.locked_frames:6} {peak.packed_floor:4} "
        f"{idle.frames_held:6} {idle.packed_floor:4} {trimmed.frames_held:6} {trimmed.packed_floor:4}"
    )


def rows_of(name: str, phases: dict[str, Sample], frame_pages: int, concurrency: int) -> list[dict[str, Any]]:
    return [
        {
            "rule": name,
            "frame_pages": frame_pages,
            "concurrency": concurrency,
            "phase": phase,
            "frames_held": found.frames_held,
            "packed_floor": found.packed_floor,
            "locked_frames": found.locked_frames,
        }
        for phase, found in phases.items()
    ]


def compare(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many cells there are, and in how many `pack` is at least as good as every other rule."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        for what in ("frames_held", "locked_frames"):
            cell = cells.setdefault((row["frame_pages"], row["concurrency"], row["phase"], what), {})
            cell[row["rule"]] = row[what]
    return len(cells), sum(cell["pack"] <= min(cell.values()) for cell in cells.values())


def draw(replays: dict[tuple[int, int, str], Replay], path: Path) -> None:
    """Held (full) and locked (dashed) frames over the steps of the load, a panel for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"stock": "tab:gray", "kvcached": "tab:orange", "pack": "tab:blue"}
    shape = (len(CONCURRENCIES), len(FRAME_SIZES))
    figure, panels = pyplot.subplots(*shape, figsize=(15, 7.5), sharex="row", layout="constrained")
    for row, concurrency in enumerate(CONCURRENCIES):
        for column, frame_pages in enumerate(FRAME_SIZES):
            panel = panels[row][column]
            for name, colour in colours.items():
                steps = replays[concurrency, frame_pages, name].steps
                shown = range(0, len(steps), max(len(steps) // 400, 1))
                held, locked = ([getattr(steps[i], what) for i in shown] for what in ("frames_held", "locked_frames"))
                panel.plot(shown, held, color=colour, label=f"{name}: held", linewidth=1)
                panel.plot(shown, locked, color=colour, label=f"{name}: locked", linewidth=1, linestyle="--")
            panel.plot(
                shown, [steps[i].packed_floor for i in shown], color="black", label="packed floor", linewidth=1
            )
            panel.set_title(f"{concurrency} running, {frame_pages} pages a frame")
            panel.set_ylim(bottom=0)
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("steps since the first eviction")
    figure.supylabel("frames")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--pages", type=int, default=8192, help=f"pages of {PAGE_SIZE} slots in the pool")
    parser.add_argument("--cached-pages", type=int, default=1024, help="at most so many are cached and not in use")
    parser.add_argument("--png", type=Path, help="also draw the load into this file")
    parser.add_argument("--json", action="store_true", help="end with one line holding the rows as a JSON object")
    args = parser.parse_args()

    print(first_line(args.seed))
    print(f"# {args.requests} requests, {args.pages} pages of {PAGE_SIZE} slots, {args.cached_pages} cached at most")
    result: dict[str, list[dict[str, Any]]] = {"rows": [], "tried": [], "full_pool": []}
    replays: dict[tuple[int, int, str], Replay] = {}
    records = {}
    for concurrency in CONCURRENCIES:
        for bound in (args.cached_pages, None):
            requests = make_requests(args.requests, args.seed)
            recorder = Recorder(requests, concurrency, args.pages, bound)
            records[concurrency, bound] = recorder.record()
            print(
                f"# {concurrency} running, {'pool full' if bound is None else 'cache bounded'}: "
                f"{recorder.num_tickets} pages taken, {recorder.evicted} evicted"
            )

    def table(title: str, part: str, bound: int | None, rules: dict[str, Callable[[Ledger], Rule]]) -> None:
        for concurrency in CONCURRENCIES:
            for frame_pages in FRAME_SIZES:
                print(f"\n{title}: {concurrency} running, {frame_pages} pages a frame\n{HEAD}")
                for name, make_rule in rules.items():
                    done = replay(records[concurrency, bound], make_rule, args.pages, frame_pages)
                    print(line(name, done.phases), flush=True)
                    result[part] += rows_of(name, done.phases, frame_pages, concurrency)
                    if part == "rows":
                        replays[concurrency, frame_pages, name] = done

    table("cache bounded", "rows", args.cached_pages, RULES)
    cells, as_good = compare(result["rows"])
    print(f"\npack holds and locks at most as many frames as the best other rule in {as_good} of {cells} cells")
    tried = {name: lambda ledger, v=variant: Tried(ledger, v) for name, variant in TRIED.items()}
    table("tried, cache bounded", "tried", args.cached_pages, {"pack": RULES["pack"], **tried})
    table("pool full, nothing to choose from", "full_pool", None, RULES)
    if args.png:
        draw(replays, args.png)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
