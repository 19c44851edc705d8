"""What a run found, as tables, charts and sentences. Imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radix_pages_sglang.experiments.results import Chart, Result, Series, Table, Value

NAME = "prefix-sharing"
GIB = 1 << 30
FARTHEST = "farthest-next-use"

Found = dict[str, Any]

CORES = {"ours": "our cache", "rust": "SGLang's cache, Rust core", "python": "SGLang's cache, Python core"}

LIMITS = (
    "A replay computes nothing: no time to first token, no attention, no queueing. A block is a page of one slot "
    "with one token in it, so every operation costs by the block.",
    "A prompt is cached as soon as its request arrives, and one that is cached as a whole hits as a whole; a server "
    "computes a prompt's last token always.",
    "Durations are modelled: ms_per_token for every token of the answer, from the arrival on. Answers take room "
    "while they run and are not cached, because a trace does not say what follows them. With 0 they take no room.",
    "farthest-next-use is a policy that can be had offline, not a proven optimum.",
    "Bytes are modelled, {token_bytes} a token. Frames are counted with SGLang's and our own allocators without KV.",
)


@dataclass(slots=True)
class Findings:
    """Everything found so far: three lists under their documented keys, and in sentences what was left out."""

    traces: list[Found] = field(default_factory=list)
    rows: list[Found] = field(default_factory=list)
    frontier: list[Found] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def result_of(found: Findings, provenance: Mapping[str, str], parameters: Mapping[str, Any]) -> Result:
    """The report of a run."""
    limits = [limit.format(token_bytes=parameters["token_bytes"]) for limit in LIMITS]
    blank = sum(trace["requests_without_prompt"] for trace in found.traces)
    skipped = sum(trace["skipped_lines"] for trace in found.traces)
    if blank:
        limits.append(f"{blank} requests without a prompt were left out.")
    if skipped:
        limits.append(f"{skipped} lines that do not parse were passed over (--skip-bad).")
    tables = [_traces_table(found.traces)]
    tables += [_hit_rate_table(found.rows, core) for core in CORES if _policies(found.rows, core)]
    tables.append(_work_table(found.rows))
    if found.frontier:
        tables.append(_frontier_table(found.frontier))
    return Result(
        experiment=NAME,
        title="Prefix sharing: traces replayed without a model",
        provenance=provenance,
        parameters=parameters,
        summary=_summary(found),
        tables=tables,
        charts=[*_size_charts(found.rows), *_frontier_charts(found.frontier)],
        limits=limits,
        values={"rows": found.rows, "traces": found.traces, "frontier": found.frontier},
    )


# -- sentences --


def _summary(found: Findings) -> list[str]:
    sentences = [
        f"{trace['trace']}: {trace['requests']:,} requests ask for {trace['blocks_asked']:,} blocks of "
        f"{trace['block_tokens']} tokens, {trace['distinct_blocks']:,} of them distinct; a cache that drops nothing "
        f"hits {trace['endless_hit_rate']:.1%}."
        for trace in found.traces
    ]
    for name in dict.fromkeys(row["trace"] for row in found.rows):
        sentences += _of_trace([row for row in found.rows if row["trace"] == name])
    sentences += _of_infeasible(found.rows)
    slowest = max((row for row in found.rows if row["seconds"]), key=lambda row: row["seconds"], default=None)
    if slowest:
        sentences.append(
            f"The slowest replay, {slowest['policy']} on {slowest['trace']} with {slowest['blocks']:,} blocks "
            f"({slowest['core']}), took {slowest['seconds']:.1f} s."
        )
    return sentences + _of_frontier(found.frontier) + found.left_out


def _of_trace(rows: Sequence[Found]) -> list[str]:
    """LRU beside the bound, and our cache beside SGLang's, without durations."""
    name = rows[0]["trace"]
    alone = [row for row in rows if not row["ms_per_token"] and not row["infeasible"]]
    lru = {row["blocks"]: row for row in alone if row["policy"] == "lru" and row["core"] == "ours"}
    bound = {row["blocks"]: row["hit_rate"] for row in alone if row["policy"] == FARTHEST}
    sentences = []
    if lru:
        rates = ", ".join(
            f"{row['hit_rate']:.1%} with {blocks:,} blocks (farthest next use {bound[blocks]:.1%})"
            for blocks, row in lru.items()
        )
        sentences.append(f"{name}, LRU in our cache: {rates}.")
    evicted = [f"{_evicted(alone, core)} by {CORES[core]}" for core in CORES if _evicted(alone, core)]
    if evicted:
        sentences.append(f"{name}, blocks evicted for each one that an allocation lacked: {', '.join(evicted)}.")
    work = _eviction_work(alone)
    if len(work) > 1:
        sentences.append(f"{name}, all that LRU evicted in the largest pool: {'; '.join(work)}.")
    if gaps := _gaps(alone):
        sentences.append(
            f"{name}, LRU's hit rate in our cache less that in SGLang's, Rust core: {min(gaps):+.2f} to "
            f"{max(gaps):+.2f} points."
        )
    return sentences


def _evicted(rows: Sequence[Found], core: str) -> str:
    """The least and the most that a core evicted for what was asked; empty where nothing was."""
    values = [row["evicted_per_asked"] for row in rows if row["core"] == core and row["evicted_per_asked"]]
    if not values:
        return ""
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def _eviction_work(rows: Sequence[Found]) -> list[str]:
    """What LRU evicted in the largest pool, by core: who evicts more than was asked has less to do the next time."""
    lru = [row for row in rows if row["policy"] == "lru" and row["evictions"]]
    largest = max((row["blocks"] for row in lru), default=0)
    return [
        f"{row['evicted_blocks']:,} blocks in {row['evictions']:,} calls and {row['eviction_seconds']:.2f} s by "
        f"{CORES[row['core']]}"
        for row in lru
        if row["blocks"] == largest
    ]


def _gaps(rows: Sequence[Found]) -> list[float]:
    """Points of LRU's hit rate that our cache has more than SGLang's, by pool size."""
    rates = {(row["core"], row["blocks"]): row["hit_rate"] for row in rows if row["policy"] == "lru"}
    return [
        100 * (rate - rates["rust", blocks])
        for (core, blocks), rate in rates.items()
        if core == "ours" and ("rust", blocks) in rates
    ]


def _of_infeasible(rows: Sequence[Found]) -> list[str]:
    cases = dict.fromkeys(
        (row["trace"], row["ms_per_token"], row["blocks"], row["note"]) for row in rows if row["infeasible"]
    )
    return [
        f"{trace} with {blocks:,} blocks is infeasible at {ms:g} ms a token: {note}."
        for trace, ms, blocks, note in cases
    ]


def _of_frontier(points: Sequence[Found]) -> list[str]:
    sentences = []
    for key in dict.fromkeys((point["trace"], point["frame_tokens"], point["lent"]) for point in points):
        chosen = [p for p in points if (p["trace"], p["frame_tokens"], p["lent"]) == key]
        cap = sorted({p["cap_blocks"] for p in chosen})[(len({p["cap_blocks"] for p in chosen}) - 1) // 2]
        shares = ", ".join(
            f"{p['returned_share_after_trims']:.1%} ({p['rule']})" for p in chosen if p["cap_blocks"] == cap
        )
        one = next(p for p in chosen if p["cap_blocks"] == cap)
        sentences.append(
            f"{key[0]}, pool of {one['blocks']:,} blocks, cap of {cap:,} {key[2]}, frames of {key[1]:,} tokens, "
            f"{one['ms_per_token']:g} ms a token: hit rate {one['hit_rate']:.1%}; of all frames returned right after "
            f"trims {shares}; the packed floor leaves {one['floor_share']:.1%}."
        )
    return sentences


# -- tables --


def _traces_table(traces: Sequence[Found]) -> Table:
    durations = list(dict.fromkeys(ms for trace in traces for ms in trace["pinned_peak_blocks"]))
    columns = ["trace", "format", "requests", "blocks asked", "distinct", "endless hit rate"]
    return Table(
        "Traces",
        [*columns, *(f"pinned peak, {ms} ms" for ms in durations)],
        [
            [
                trace["trace"],
                trace["format"],
                trace["requests"],
                trace["blocks_asked"],
                trace["distinct_blocks"],
                trace["endless_hit_rate"],
                *(trace["pinned_peak_blocks"].get(ms) for ms in durations),
            ]
            for trace in traces
        ],
        "Pinned peak: the most blocks that running requests need at once, answers included, at so many milliseconds "
        "for a token of an answer.",
    )


def _hit_rate_table(rows: Sequence[Found], core: str) -> Table:
    """Policies side by side, a row each trace, duration and size."""
    chosen = [row for row in rows if row["core"] in (core, "model", "bound")]
    policies = list(dict.fromkeys([*_policies(rows, core), *(row["policy"] for row in chosen)]))
    cells: dict[tuple[str, float, int], dict[str, Value]] = {}
    for row in chosen:
        place = cells.setdefault((row["trace"], row["ms_per_token"], row["blocks"]), {})
        place[row["policy"]] = "infeasible" if row["infeasible"] else row["hit_rate"]
    return Table(
        f"Hit rates of {CORES[core]}",
        ["trace", "ms a token", "blocks", *policies],
        [[*place, *(of.get(policy) for policy in policies)] for place, of in cells.items()],
        "Block hits over blocks asked, the whole trace in order. 'lfu with lasting counts' remembers the uses of "
        "evicted blocks, which no cache here does; farthest-next-use knows the future. Both are models. tlru with "
        "SGLang's default parameters is lru.",
    )


def _work_table(rows: Sequence[Found]) -> Table:
    chosen = [row for row in rows if row["evictions"]]
    return Table(
        "Eviction work and frames",
        [
            *("trace", "ms a token", "blocks", "policy", "core", "evicted/asked", "evictions", "us each"),
            *("in all, s", "frames held", "reclaimed frames", "per 1,000 evicted", "replay, s"),
        ],
        [
            [
                *(row[key] for key in ("trace", "ms_per_token", "blocks", "policy", "core", "evicted_per_asked")),
                row["evictions"],
                1e6 * row["eviction_seconds"] / row["evictions"],
                row["eviction_seconds"],
                row["frames_held"],
                row["reclaimed_frames"],
                1000 * row["reclaimed_frames"] / row["evicted_blocks"],
                row["seconds"],
            ]
            for row in chosen
        ],
        "evicted/asked: blocks evicted over blocks that allocations lacked. us each, in all: evictions with "
        "their allocations. Frames held at the trace's end; reclaimed frames: how often one was left empty.",
    )


def _frontier_table(points: Sequence[Found]) -> Table:
    return Table(
        "Hit rate against memory returned",
        [
            *("trace", "blocks", "ms a token", "frame tokens", "lent", "cap", "rule", "hit rate"),
            *("returned GiB", "returned", "after trims", "floor", "moved"),
        ],
        [
            [
                *(point[key] for key in ("trace", "blocks", "ms_per_token", "frame_tokens", "lent", "cap_blocks")),
                *(point["rule"], point["hit_rate"], point["returned_bytes"] / GIB),
                *(point[key] for key in ("returned_share", "returned_share_after_trims", "floor_share")),
                point["moved_blocks"],
            ]
            for point in points
        ],
        "LRU in our cache, at most `cap` blocks cached and not in use: always, or in every other of 24 turns. Means "
        "over requests from a quarter of the trace on, while the cap holds; a trim every tenth of a turn. returned, "
        "after trims and floor are shares of all frames: returned on average, right after a trim, and then if all "
        "that is held were packed. moved counts blocks. Bytes are modelled.",
    )


# -- charts --


def _size_charts(rows: Sequence[Found]) -> list[Chart]:
    """Hit rate over pool size without durations, a chart a trace."""
    charts = []
    for name in dict.fromkeys(row["trace"] for row in rows):
        chosen = [row for row in rows if row["trace"] == name and not row["ms_per_token"]]
        lines = [
            *((policy, "ours", policy) for policy in _policies(chosen, "ours")),
            *(("lru", core, f"lru, {CORES[core]}") for core in ("rust", "python") if _policies(chosen, core)),
            *((policy, core, policy) for core in ("model", "bound") for policy in _policies(chosen, core)),
        ]
        series = [
            _series(
                label,
                [row for row in chosen if row["policy"] == policy and row["core"] == core],
                lambda row: row["blocks"],
                is_dashed=core != "ours",
            )
            for policy, core, label in lines
        ]
        if chosen:
            charts.append(Chart(f"{name}: hit rate", "blocks of the pool", "hit rate", series, is_x_log=True))
    return charts


def _policies(rows: Sequence[Found], core: str) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows if row["core"] == core))


def _frontier_charts(points: Sequence[Found]) -> list[Chart]:
    charts = []
    for name, tokens in dict.fromkeys((point["trace"], point["frame_tokens"]) for point in points):
        chosen = [point for point in points if (point["trace"], point["frame_tokens"]) == (name, tokens)]
        series = [
            _series(
                f"{rule}, {lent}",
                [point for point in chosen if (point["rule"], point["lent"]) == (rule, lent)],
                lambda point: point["returned_bytes"] / GIB,
                is_dashed=lent == "always",
            )
            for rule, lent in dict.fromkeys((point["rule"], point["lent"]) for point in chosen)
        ]
        title = f"{name}: what caps return, frames of {tokens:,} tokens"
        charts.append(Chart(title, "GiB returned while the cap holds (modelled)", "hit rate", series))
    return charts


def _series(label: str, rows: Sequence[Found], x: Callable[[Found], float], *, is_dashed: bool) -> Series:
    feasible = [row for row in rows if row["hit_rate"] is not None]
    return Series(label, [x(row) for row in feasible], [row["hit_rate"] for row in feasible], is_dashed=is_dashed)
