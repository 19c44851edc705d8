"""What is measured in which order: starts of the servers, pairs of bursts in turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from radix_pages_sglang.experiments.chat.found import Burst, Found
from radix_pages_sglang.experiments.chat.load import Bench, Load, measured
from radix_pages_sglang.experiments.chat.sides import OURS, STOCK, Servers, Side, memory_watched, started

WARM_UP_SHARE = 4
"""Servers begin with this part of a burst, not measured: torch prepares things at the first requests."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`pairs` pairs of bursts of `load`, with servers started anew for each of `starts` blocks of pairs.

    Both bursts of pair p have the seed `seed` + p. Waits of more than `stall_ms` between tokens count as long.
    `servers` are servers that run already, in which case none is started, or how they are started.
    """

    load: Load
    pairs: int
    starts: int
    seed: int
    stall_ms: float
    servers: Servers | dict[str, Side]

    def blocks(self) -> Iterator[tuple[int, range]]:
        """Each start with its pairs, as evenly as can be."""
        first = 0
        for start in range(self.starts):
            after = self.pairs * (start + 1) // self.starts
            yield start, range(first, after)
            first = after

    def sides(self) -> AbstractContextManager[dict[str, Side]]:
        """The servers of a block."""
        return started(self.servers) if isinstance(self.servers, Servers) else nullcontext(self.servers)


def order(pair: int, sides: dict[str, Side]) -> list[Side]:
    """Who goes first in a pair: each side every other time."""
    return [sides[name] for name in ((OURS, STOCK) if pair % 2 else (STOCK, OURS)) if name in sides]


def measure(plan: Plan, generator: Bench, side: Side, pair: int, start: int) -> Burst:
    """One burst, on a cache that is empty at its start."""
    side.flush()
    before = side.counts()
    seen = measured(generator.burst(side.url, plan.load, pair, plan.seed + pair), plan.stall_ms)
    counts = {key: value - before[key] for key, value in side.counts().items()}
    return Burst(side.name, pair, start, seen, counts)


def run(plan: Plan, generator: Bench) -> Found:
    """Measure all pairs and show how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    found = Found(stall_ms=plan.stall_ms)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=plan.pairs)
        for start, pairs in plan.blocks():
            progress.update(bar, description=f"starting servers, {start + 1} of {plan.starts}")
            with plan.sides() as sides, memory_watched(sides) as samples:
                if start == 0:
                    generator.wait()  # for its imports, which went on beside the servers' start
                if OURS in sides:
                    found.page_bytes = sides[OURS].page_bytes
                for side in sides.values():
                    progress.update(bar, description=f"warming up {side.name}")
                    generator.burst(side.url, plan.load, pairs[0], plan.seed + plan.pairs, share=WARM_UP_SHARE)
                for pair in pairs:
                    for side in order(pair, sides):
                        progress.update(bar, description=f"start {start + 1}, pair {pair + 1}: {side.name}")
                        found.bursts.append(measure(plan, generator, side, pair, start))
                    progress.advance(bar)
            found.memory.append(samples)
    return found
