"""The command `radix-pages experiment prefix-sharing`: what is replayed, and in which order."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from radix_pages_sglang.experiments.prefix_sharing.findings import Findings, result_of
from radix_pages_sglang.experiments.prefix_sharing.plan import (
    CORES,
    POLICIES,
    Plan,
    check_frames,
    make_plan,
    opened,
)
from radix_pages_sglang.experiments.provenance import provenance
from radix_pages_sglang.experiments.report import finish
from radix_pages_sglang.experiments.traces import Trace
from radix_pages_sglang.serve import CommandError, check_sglang

if TYPE_CHECKING:
    from radix_pages_sglang.experiments.prefix_sharing.running import Peak
    from radix_pages_sglang.experiments.prefix_sharing.spool import Spool
    from radix_pages_sglang.experiments.prefix_sharing.sweep import Case

LENT = {False: "always", True: "by turns"}


def prefix_sharing(
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A trace to replay; may be given several times.", show_default=False),
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Pool sizes, in blocks of the trace. Default: 1, 5 and 10% of its distinct blocks, and 3M tokens.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="P,P",
            help=f"Eviction policies, of {', '.join(POLICIES)}. Default: all where requests last no time, lru where "
            "they do.",
        ),
    ] = None,
    core: Annotated[str, typer.Option(metavar="C,C", help=f"Caches, of {', '.join(CORES)}.")] = "ours,rust",
    ms_per_token: Annotated[
        str,
        typer.Option(
            metavar="MS,MS",
            help="How long a request runs for each token of its answer. 0: only the current request is in use.",
        ),
    ] = "0,20,40",
    frame_tokens: Annotated[
        str,
        typer.Option(
            metavar="N,N",
            help="Sizes of a frame, in tokens: the first for the sweep, all for the frontier. 2,048 are what fills "
            "2 MiB in each buffer of Llama-3.2-1B's KV.",
        ),
    ] = "2048,8192",
    token_bytes: Annotated[
        int, typer.Option(min=1, help="KV bytes of a token, for the bytes returned. 32,768 are Llama-3.2-1B's.")
    ] = 32_768,
    block_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a block, where they are not 512 (Mooncake) or 16 (the others)."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Pass over lines that do not parse, and say how many.")
    ] = False,
    frontier: Annotated[bool, typer.Option(help="Also measure what caps return, and what they cost.")] = True,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Two minutes on two cores: the first 300,000 blocks of a trace, lru, one duration, one frame size, "
            "fewer caps.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Recorded; nothing here is left to chance.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a report into this folder.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was found as JSON.")
    ] = None,
) -> None:
    """Replay request traces through SGLang's prefix cache and ours, without a model.

    Reads Mooncake traces (blocks of 512 tokens), Qwen-Bailian ones (16) and lines of tokens, {"tokens": [...]} with
    timestamp (seconds) and output_length if you like. None comes with this package. Every pool size and policy is
    replayed through both caches, in this process and with SGLang's and our own allocators; beside them
    farthest-next-use, which knows the future. A block is a page here, with one token in it: a replay costs by the
    block. Then the frontier: what a cap on cached blocks returns, with moves and without.

    Durations are modelled. A pool smaller than what running requests need at once is infeasible and has no hit rate.

    The trace is read once and kept in the temporary folder, 16 bytes a block. The full run takes minutes a trace.

    Keys of --json: `rows`, one a replay, with `trace`, `blocks`, `policy`, `core` (ours, rust, python; bound and
    model for policies without a cache), `ms_per_token`, `hit_rate`, `frames_held`, `reclaimed_frames`,
    `evicted_per_asked`, `evicted_blocks`, `evictions`, `eviction_seconds`, `seconds`, `infeasible`, `note`; `traces`;
    `frontier`, one a cap and rule, with `cap_blocks`, `rule`, `lent`, `hit_rate`, `returned_bytes`,
    `returned_share`, `returned_share_after_trims`, `floor_share`, `moved_blocks`.
    """
    plan = make_plan(blocks, policy, core, ms_per_token, frame_tokens, token_bytes, frontier=frontier, quick=quick)
    traces = opened(trace, skip_bad, block_tokens)
    check_frames(traces, plan)
    check_sglang()
    found = Findings()
    start = time.perf_counter()
    with ExitStack() as stack:
        # All are read before any is replayed: a bad line should not be found after minutes.
        spools = {name: stack.enter_context(_read(name, one, plan)) for name, one in traces.items()}
        _prepare_caches()
        stack.enter_context(_small_garbage())
        for name, spool in spools.items():
            _replay(name, spool, plan, found)
    parameters = {
        "traces": list(traces),
        "frame_tokens": plan.frame_tokens,
        "token_bytes": token_bytes,
        "policies": plan.policies,
        "cores": plan.cores,
        "ms_per_token": plan.ms_per_token,
        "blocks": plan.sizes,
        "quick": quick,
        "seconds": round(time.perf_counter() - start, 1),
    }
    finish(result_of(found, provenance(seed), parameters), out, json_file)


# -- the run --


def _read(name: str, trace: Trace, plan: Plan) -> Spool:
    """The trace on disk. Raises CommandError for one that does not go with the plan."""
    from radix_pages_sglang.experiments.prefix_sharing.spool import Spool

    with _bar(f"{name}: reading", trace.path.stat().st_size) as progress:
        spool = Spool(trace, plan.most_blocks, progress)
    if any(plan.ms_per_token) and not spool.has_arrivals:
        with spool:
            raise CommandError(
                f"all requests of {trace.path} arrive at the same time: --ms-per-token above 0 needs timestamps; "
                "give --ms-per-token 0"
            )
    return spool


def _prepare_caches() -> None:
    with warnings.catch_warnings():  # SGLang says of some modules which GPUs they want
        warnings.simplefilter("ignore")
        from radix_pages_sglang.experiments import cores
    cores.prepare()


def _replay(name: str, spool: Spool, plan: Plan, found: Findings) -> None:
    """Everything of one trace."""
    from radix_pages_sglang.experiments.prefix_sharing.running import pinned_peak
    from radix_pages_sglang.experiments.prefix_sharing.sweep import cases, default_sizes

    peaks = {ms: pinned_peak(spool, ms) for ms in plan.ms_per_token}
    found.traces.append(_described(name, spool, peaks))
    sizes = plan.sizes or default_sizes(spool)
    grid = [
        case
        for ms in plan.ms_per_token
        for case in cases(sizes, plan.others if ms else plan.policies, plan.cores, ms)
    ]
    _sweep(name, spool, grid, peaks, plan, found)
    if plan.caps:
        _frontier(name, spool, sizes, peaks, plan, found)


def _described(name: str, spool: Spool, peaks: dict[float, Peak]) -> dict[str, object]:
    return {
        "trace": name,
        "format": spool.format,
        "block_tokens": spool.block_tokens,
        "requests": len(spool),
        "is_whole": spool.is_whole,
        "skipped_lines": spool.num_skipped,
        "requests_without_prompt": spool.num_blank,
        "blocks_asked": spool.num_asked,
        "distinct_blocks": spool.num_distinct,
        "endless_hit_rate": spool.endless_hit_rate,
        "pinned_peak_blocks": {f"{ms:g}": peak.all for ms, peak in peaks.items()},
        "pinned_peak_prompt_blocks": {f"{ms:g}": peak.prompts for ms, peak in peaks.items()},
    }


def _sweep(
    name: str, spool: Spool, grid: Sequence[Case], peaks: dict[float, Peak], plan: Plan, found: Findings
) -> None:
    from radix_pages_sglang.experiments.prefix_sharing.sweep import row_of

    frame_blocks = _frame_blocks(plan.frame_tokens[0], spool)
    with _bar(f"{name}: {len(grid)} replays", len(grid) * len(spool)) as progress:
        for case in grid:
            found.rows.append(asdict(row_of(name, spool, case, frame_blocks, peaks[case.ms_per_token], progress)))


def _frame_blocks(frame_tokens: int, spool: Spool) -> int:
    from radix_pages.units import Geometry

    return Geometry(spool.block_tokens).whole_pages(frame_tokens)


def _frontier(
    name: str, spool: Spool, sizes: Sequence[int], peaks: dict[float, Peak], plan: Plan, found: Findings
) -> None:
    """The middle of the sizes that are feasible, with the shortest duration above 0 if there is one."""
    from radix_pages_sglang.experiments.prefix_sharing.frontier import RULES, Pool, lend

    ms = min((ms for ms in plan.ms_per_token if ms), default=0.0)
    least = max(peaks[ms].all, *(_frame_blocks(tokens, spool) for tokens in plan.frame_tokens))
    feasible = [size for size in sizes if size >= least]
    if not feasible:
        found.left_out.append(
            f"{name}: no pool has the {least:,} blocks that the frontier needs at {ms:g} ms a token."
        )
        return
    blocks = feasible[len(feasible) // 2]
    points = [
        (tokens, by_turns, int(share * blocks), rule)
        for tokens in plan.frame_tokens
        for by_turns in plan.lent
        for share in plan.caps
        for rule in RULES
    ]
    with _bar(f"{name}: {len(points)} caps and rules", len(points) * len(spool)) as progress:
        for tokens, by_turns, cap, rule in points:
            pool = Pool(blocks, _frame_blocks(tokens, spool), ms)
            point = lend(spool, pool, cap, rule, by_turns=by_turns, progress=progress)
            found.frontier.append(
                {
                    "trace": name,
                    "blocks": blocks,
                    "ms_per_token": ms,
                    "frame_tokens": tokens,
                    "lent": LENT[by_turns],
                    "cap_blocks": cap,
                    "rule": rule.name,
                    "hit_rate": point.hit_rate,
                    "returned_frames": point.returned_frames,
                    "returned_bytes": round(point.returned_frames * tokens * plan.token_bytes),
                    "returned_share": point.returned_share,
                    "returned_share_after_trims": point.returned_share_after_trims,
                    "floor_share": point.floor_share,
                    "moved_blocks": point.moved,
                    "trims": point.trims,
                    "seconds": point.seconds,
                }
            )


@contextmanager
def _small_garbage() -> Iterator[None]:
    """Keep the collector from walking over all of SGLang before every replay, which frees the cache before it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal; the function it gives is told of each step, or of so many at once."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        waiting = 0

        def progress(steps: int = 1) -> None:
            nonlocal waiting
            waiting += steps
            if waiting >= total / 500:
                bar.advance(task, waiting)
                waiting = 0

        yield progress
