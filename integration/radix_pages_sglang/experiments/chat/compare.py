"""The report: tables, charts and sentences of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from radix_pages_sglang.experiments.chat.found import (
    COUNT_LABELS,
    NAMES,
    QUANTITIES,
    Found,
    Quantity,
    compared,
    counted,
    resident,
    rounded,
    values,
)
from radix_pages_sglang.experiments.chat.sides import Sample
from radix_pages_sglang.experiments.pairs import Difference, difference, spread
from radix_pages_sglang.experiments.results import Chart, Result, Series, Table, Value

LEAST_PERCENT = -3.0
"""The interval of a difference should lie above this."""

JUDGED = ("hit_rate", "ttft_p50_ms", "throughput")

RESIDENT_LABELS = {
    "mean": "scheduler's anonymous memory, mean, bytes",
    "most": "scheduler's anonymous memory, most, bytes",
    "kv_mean": "of it the KV mapping, mean, bytes",
    "kv_most": "of it the KV mapping, most, bytes",
}


def tables(found: Found) -> list[Table]:
    """Quantities, counts and memory with a column for each side, and a row for each pair."""
    sides = found.sides()
    titles = [NAMES[side] for side in sides]
    both = len(sides) == 2
    quantities: list[list[Value]] = []
    for quantity in QUANTITIES:
        by_side, better = compared(found, quantity)
        row: list[Value] = [quantity.label, *(spread(by_side[side], quantity.digits) for side in sides)]
        quantities.append([*row, *_interval_cells(better)] if both else row)
    counts = {side: counted(found, side) for side in sides}
    memory = {side: resident(found, side) for side in sides}
    found_tables = [
        Table(
            "What clients saw",
            ["", *titles, *(("better by, %", "95% from", "to") if both else ())],
            quantities,
            f"Mean of the bursts (least to most). A long wait is one of more than {found.stall_ms:g} ms. "
            + ("Better by: of stock's; positive where this cache does better, also where less is better." * both),
        ),
        Table(
            "What evictions did, all bursts together",
            ["", *titles],
            [[label, *(counts[side][key] for side in sides)] for key, label in COUNT_LABELS.items()],
            "Empty: not counted there. Stock knows no frames; in modes observe and place nothing is given back.",
        ),
    ]
    if any(found.memory):
        rows = [[label, *(memory[side][key] for side in sides)] for key, label in RESIDENT_LABELS.items()]
        found_tables.append(Table("What the servers occupied", ["", *titles], rows, "Sampled each second in /proc."))
    if both:
        found_tables.append(_pairs_table(found))
    return found_tables


def _interval_cells(better: Difference | None) -> list[Value]:
    if better is None:
        return [None, None, None]
    return [round(better.percent, 2), rounded(better.low), rounded(better.high)]


def _pairs_table(found: Found) -> Table:
    judged = [quantity for quantity in QUANTITIES if quantity.key in JUDGED]
    rows: list[list[Value]] = []
    for ours, stock in found.pairs():
        row: list[Value] = [ours.pair, ours.start]
        for quantity in judged:
            row += [round(quantity.value(side.seen), quantity.digits) for side in (ours, stock)]
        rows.append(row)
    columns = [f"{quantity.label}, {NAMES[side]}" for quantity in judged for side in NAMES]
    return Table("Each pair", ["pair", "start", *columns], rows)


def charts(found: Found) -> list[Chart]:
    """Differences with their intervals, those of each pair, times to the first token, memory over time."""
    drawn: list[Chart] = []
    if found.pairs():
        drawn += [_differences(found), _each_pair(found)]
    ttft = [quantity for quantity in QUANTITIES if quantity.key.startswith("ttft")]
    drawn.append(
        Chart(
            "Time to the first token, mean of the bursts (least to most)",
            "percentile",
            "ms",
            [_bars(found, side, ttft) for side in found.sides()],
            kind="bar",
        )
    )
    if any(found.memory):
        drawn.append(_memory_chart(found.memory[0]))
    return drawn


def _differences(found: Found) -> Chart:
    named: list[str] = []
    points: list[Difference] = []
    for quantity in QUANTITIES:
        better = compared(found, quantity)[1]
        if better is not None and better.low is not None and quantity.key != "longest_gap_ms":
            named.append(quantity.short)
            points.append(better)
    at = [point.percent for point in points]
    low, high = [point.low or 0.0 for point in points], [point.high or 0.0 for point in points]
    bound = Series(f"{LEAST_PERCENT:g}%", named, [LEAST_PERCENT] * len(named), is_dashed=True)
    return Chart(
        "By how much radix_pages does better than stock, with 95% intervals",
        "",
        "% of stock's, positive is better",
        [Series("difference", named, at, low, high), bound],
        kind="scatter",
    )


def _each_pair(found: Found) -> Chart:
    pairs = found.pairs()
    lines = []
    for quantity in (quantity for quantity in QUANTITIES if quantity.key in JUDGED):
        each = [
            difference(
                [[(quantity.value(ours.seen), quantity.value(stock.seen))]], is_less_better=quantity.is_less_better
            )
            for ours, stock in pairs
        ]
        shares = [None if better is None else better.percent for better in each]
        lines.append(Series(quantity.short, [float(ours.pair) for ours, _ in pairs], shares))
    return Chart("The same, pair by pair", "pair", "% of stock's, positive is better", lines, kind="scatter")


def _bars(found: Found, side: str, quantities: Iterable[Quantity]) -> Series:
    chosen = list(quantities)
    measured = [[quantity.value(burst.seen) for burst in found.of(side)] for quantity in chosen]
    return Series(
        NAMES[side],
        [quantity.key.split("_")[1] for quantity in chosen],
        [statistics.mean(each) for each in measured],
        [min(each) for each in measured],
        [max(each) for each in measured],
    )


def _memory_chart(samples: Sequence[Sample]) -> Chart:
    lines = []
    for side, name in NAMES.items():
        own = [sample for sample in samples if sample.side == side]
        at = [sample.seconds for sample in own]
        if own:
            lines.append(Series(name, at, [sample.process_bytes / 1024**2 for sample in own]))
        if any(sample.kv_bytes is not None for sample in own):
            kv = [None if sample.kv_bytes is None else sample.kv_bytes / 1024**2 for sample in own]
            lines.append(Series(f"{name}, KV mapping", at, kv, is_dashed=True))
    return Chart("Memory of the schedulers, first start", "seconds", "MiB of anonymous memory", lines, kind="step")


def summary(found: Found) -> list[str]:
    """What came out, in sentences."""
    said = values(found)
    sentences = []
    for quantity in (quantity for quantity in QUANTITIES if quantity.key in JUDGED):
        entry = said[quantity.key]
        if entry["low"] is None:
            shown = ", ".join(
                f"{NAMES[side]} {spread([quantity.value(burst.seen) for burst in found.of(side)], quantity.digits)}"
                for side in found.sides()
            )
            sentences.append(f"{quantity.label}: {shown}; too little was measured for an interval.")
            continue
        lies = "above" if entry["low"] > LEAST_PERCENT else "NOT above"
        sentences.append(
            f"{quantity.label}: {entry['difference_percent']:+.2f}% against stock, 95% interval {entry['low']:+.2f} "
            f"to {entry['high']:+.2f}: it lies {lies} {LEAST_PERCENT:g}%."
        )
    over = said["over_eviction"]
    told = ", ".join(f"{NAMES[side]} {over[side]:.2f}" for side in found.sides() if over[side] is not None)
    sentences.append(
        f"Tokens evicted / tokens asked for, in whole pages: {told}."
        if told
        else "Nothing was evicted, or nobody counted it: a smaller --pool-tokens brings the pressure."
    )
    if found.pairs():
        equal = said["answers_equal"]
        sentences.append(f"{equal['equal']:,} of {equal['total']:,} answers are the same on both sides.")
    if any(said["failed_requests"].values()):
        failed = ", ".join(f"{NAMES[side]} {number}" for side, number in said["failed_requests"].items())
        sentences.append(f"Requests that failed and are in no figure: {failed}.")
    return sentences


def result(
    found: Found, provenance: Mapping[str, str], parameters: Mapping[str, Any], limits: Sequence[str]
) -> Result:
    """The whole report."""
    return Result(
        experiment="chat",
        title="Multi-turn chat under memory pressure: radix_pages and stock SGLang in turns",
        provenance=provenance,
        parameters=parameters,
        summary=summary(found),
        tables=tables(found),
        charts=charts(found),
        limits=limits,
        values=values(found),
    )
