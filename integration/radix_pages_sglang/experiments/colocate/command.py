"""The command `radix-pages experiment colocate`. Loads no torch before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from radix_pages_sglang.experiments.provenance import provenance
from radix_pages_sglang.experiments.report import finish
from radix_pages_sglang.serve import CommandError

if TYPE_CHECKING:
    from radix_pages_sglang.experiments.colocate.findings import Measured
    from radix_pages_sglang.experiments.colocate.scenarios import Scenario

TRAINING, HELD_OUT_STREAMS, SERVED_STREAMS = 3, 8, 2
QUICK_TRAINING, QUICK_HELD_OUT, QUICK_HALF_SECONDS = 2, 3, 30.0


def colocate(
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Prompts of this trace; given twice, one for each model."),
    ] = None,
    streams: Annotated[int, typer.Option(min=2, help="Held-out pairs of streams.")] = HELD_OUT_STREAMS,
    training: Annotated[int, typer.Option(min=1, help="Pairs of streams on which settings are chosen.")] = TRAINING,
    frame_pages: Annotated[int, typer.Option(min=1, help="Pages of 16 tokens in a frame, in the replay.")] = 64,
    served: Annotated[
        bool, typer.Option("--served/--no-served", help="Also on two real servers, which takes ten minutes.")
    ] = True,
    served_streams: Annotated[int, typer.Option(min=1, help="Pairs of streams for the servers.")] = SERVED_STREAMS,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the report into this directory.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers to this file.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two minutes: short and few streams, no servers.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Chooses streams; held-out ones differ from training ones.")] = 0,
) -> None:
    """Two models whose bursts are opposed share one memory budget: who may have how much of it?

    Compared by replay in virtual time, with modelled speeds, and on two real servers with random weights: the best
    static split, SGLang's release_memory_occupation (an idle model loses its cache and gives all back), kvcached's
    rules (whole frames, nothing moves) and ours, where a small script moves the ceilings of both, without and with
    moves. Every rule has one setting, chosen on training streams; all are then measured on the same held-out ones.

    \b
    JSON keys: `rows`, `best_static_split` (part of the first model), `gain_points`, `gain_low`, `gain_high` (joint
    hit rate of ours above that split on held-out streams, replayed, in points, with its 95% interval). A row has
      rule kind (replay or served) split (the rule's setting) joint_hit_rate low high
      goodput (requests a second whose first token came in time) bytes_lent (mean beyond the static split's shares)
      lend_seconds (mean time until lent memory is free) failed_commits failed_requests moved_pages
    """
    paths = trace or []
    if len(paths) > 2:
        raise CommandError(f"--trace was given {len(paths)} times: one for both models, or one each")
    from radix_pages_sglang.experiments.colocate.findings import result

    if quick:
        streams, training, served = min(streams, QUICK_HELD_OUT), min(training, QUICK_TRAINING), False
    scenario = _scenario(paths, frame_pages, quick)
    replayed = _replayed(scenario, streams, training, seed)
    on_servers = _served(training, served_streams, seed) if served else None
    parameters = {"traces": [path.name for path in paths] or "none: synthetic streams", "held-out streams": streams}
    parameters |= {"training streams": training, "pages of a frame": frame_pages, "quick": quick}
    finish(result(replayed, on_servers, provenance(seed), parameters), out, json_file)


def _scenario(paths: list[Path], frame_pages: int, quick: bool) -> Scenario:
    from dataclasses import replace

    from radix_pages_sglang.experiments.colocate.scenarios import REPLAYED, paths_for
    from radix_pages_sglang.experiments.traces import open_trace

    for path in paths:
        open_trace(path)
    memory = REPLAYED.memory
    if memory.budget_frames * memory.pages_per_frame % frame_pages:
        raise CommandError(f"--frame-pages {frame_pages}: take a power of two, at most 256")
    scenario = replace(REPLAYED, traces=paths_for(paths)).with_frames(frame_pages)
    return scenario.lasting(QUICK_HALF_SECONDS, 3) if quick else scenario


def _replayed(scenario: Scenario, streams: int, training: int, seed: int) -> Measured:
    from rich.progress import Progress

    from radix_pages_sglang.experiments.colocate.findings import Measured
    from radix_pages_sglang.experiments.colocate.rules import RULES
    from radix_pages_sglang.experiments.colocate.training import HELD_OUT, choose_all, evaluate, runner

    total = sum(len(rule.settings) for rule in RULES) * training + len(RULES) * streams
    with Progress(transient=True) as progress:
        task = progress.add_task("replaying", total=total)
        with runner(None, lambda count: progress.advance(task, count)) as run:
            choices, scenario = choose_all(RULES, scenario, range(seed, seed + training), run)
            held_out = range(HELD_OUT + seed, HELD_OUT + seed + streams)
            return Measured(scenario, choices, evaluate(choices, scenario, held_out, run))


def _served(training: int, streams: int, seed: int) -> Measured:
    from rich.progress import Progress

    from radix_pages_sglang.experiments.colocate.findings import Measured
    from radix_pages_sglang.experiments.colocate.outcome import Outcome
    from radix_pages_sglang.experiments.colocate.rules import SERVED_RULES
    from radix_pages_sglang.experiments.colocate.scenarios import SERVED
    from radix_pages_sglang.experiments.colocate.served import serve, two_servers
    from radix_pages_sglang.experiments.colocate.training import HELD_OUT, choose_all, runner

    with runner(None, lambda count: None) as run:
        choices, scenario = choose_all(SERVED_RULES, SERVED, range(seed, seed + training), run)
    found: dict[str, list[Outcome]] = {choice.rule.name: [] for choice in choices}
    with two_servers(scenario.memory) as models, Progress(transient=True) as progress:
        task = progress.add_task("serving", total=streams * len(choices))
        for place in range(streams):
            both = scenario.streams(HELD_OUT + seed + place)
            for choice in choices if place % 2 else choices[::-1]:
                found[choice.rule.name].append(serve(choice.rule, choice.setting, models, both, scenario))
                progress.advance(task)
    return Measured(scenario, choices, found)
