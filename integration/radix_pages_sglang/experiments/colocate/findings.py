"""What the runs of both parts say: rows, tables, charts and sentences."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radix_pages_sglang.experiments.colocate.outcome import Outcome
from radix_pages_sglang.experiments.colocate.rules import OURS, SPLIT
from radix_pages_sglang.experiments.colocate.scenarios import Scenario
from radix_pages_sglang.experiments.colocate.training import Choice
from radix_pages_sglang.experiments.pairs import interval
from radix_pages_sglang.experiments.results import Chart, Result, Series, Table

LIMITS = (
    "Replay: virtual time. Prefill and decode speeds, and what mapping, unmapping and copying take, are modelled: "
    "calls of the CUDA driver at the averages that kvcached's own benchmark prints for an A100; we ran none.",
    "kvcached's rules are written by us from its source; its code does not run here.",
    "Served: two tiny models with random weights on one machine of two cores. The servers fight for cores as well as "
    "for memory, so their times to the first token say little about another machine.",
)
COLUMNS = {
    "rule": "rule",
    "setting_is": "its setting is",
    "split": "setting",
    "joint_hit_rate": "joint hit rate",
    "low": "from",
    "high": "to",
    "goodput": "goodput, requests/s",
    "bytes_lent": "bytes lent, mean",
    "lend_seconds": "seconds to lend, mean",
    "failed_commits": "failed commits",
    "failed_requests": "failed requests",
    "moved_pages": "pages moved",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Outcomes of every rule on the same held-out streams, by its name, under the settings in `choices`."""

    scenario: Scenario
    choices: Sequence[Choice]
    outcomes: Mapping[str, Sequence[Outcome]]

    @property
    def split(self) -> float:
        """The static split chosen on training streams: the part of the first model."""
        return next(choice.setting for choice in self.choices if choice.rule is SPLIT)

    @property
    def gains(self) -> list[float]:
        """Points of joint hit rate that ours has above the static split, for each pair of streams."""
        pairs = zip(self.outcomes[OURS.name], self.outcomes[SPLIT.name], strict=True)
        return [100 * (ours.hit_rate - split.hit_rate) for ours, split in pairs]


def result(
    replayed: Measured, served: Measured | None, provenance: Mapping[str, str], parameters: Mapping[str, Any]
) -> Result:
    """The report; without `served` only the replay's."""
    parts = {"replay": replayed} | ({} if served is None else {"served": served})
    rows = [row for kind, part in parts.items() for row in _rows(kind, part)]
    low, high = interval(replayed.gains)
    return Result(
        experiment="colocate",
        title="Two models share one memory budget",
        provenance=provenance,
        parameters=parameters,
        summary=[sentence for kind, part in parts.items() for sentence in _sentences(kind, part)],
        tables=[_table(kind, rows, part) for kind, part in parts.items()],
        charts=[chart for kind, part in parts.items() for chart in _charts(kind, rows, part)],
        limits=LIMITS,
        values={
            "rows": rows,
            "best_static_split": replayed.split,
            "gain_points": statistics.mean(replayed.gains),
            "gain_low": low,
            "gain_high": high,
        },
    )


def _rows(kind: str, part: Measured) -> list[dict[str, Any]]:
    budget = part.scenario.memory.budget_frames
    first = round(part.split * budget)
    rows = []
    for choice in part.choices:
        outcomes = part.outcomes[choice.rule.name]
        rates = [one.hit_rate for one in outcomes]
        low, high = interval(rates) if len(rates) > 1 else (None, None)
        lends = [seconds for one in outcomes for seconds in one.lend_seconds]
        lent = statistics.mean(one.lent_frames((first, budget - first)) for one in outcomes)
        rows.append(
            {
                "rule": choice.rule.name,
                "kind": kind,
                "setting_is": choice.rule.setting_is,
                "split": choice.setting,
                "joint_hit_rate": statistics.mean(rates),
                "low": low,
                "high": high,
                "goodput": statistics.mean(one.goodput for one in outcomes),
                "bytes_lent": round(lent * part.scenario.memory.frame_bytes),
                "lend_seconds": statistics.mean(lends) if lends else None,
                "failed_commits": sum(one.failed_commits for one in outcomes),
                "failed_requests": sum(one.failed_requests for one in outcomes),
                "moved_pages": sum(one.moved_pages for one in outcomes),
            }
        )
    return rows


def _sentences(kind: str, part: Measured) -> list[str]:
    gains = part.gains
    words = f"{kind}: ours has {statistics.mean(gains):+.2f} points of joint hit rate beside the best static split"
    if len(gains) > 1:
        low, high = interval(gains)
        words += f" (95% interval {low:+.2f} to {high:+.2f}, {len(gains)} pairs of held-out streams)"
    failed = {name: sum(one.failed_requests for one in found) for name, found in part.outcomes.items()}
    losing = [f"{name} {count}" for name, count in failed.items() if count]
    lost = f"{kind}: failed requests: {', '.join(losing) or 'none under any rule'}."
    problems = sorted({problem for found in part.outcomes.values() for one in found for problem in one.problems})
    return [f"{words}.", lost, *(f"{kind}: a server said: {problem}" for problem in problems[:3])]


def _table(kind: str, rows: Sequence[Mapping[str, Any]], part: Measured) -> Table:
    judged = part.scenario.judged
    return Table(
        f"{kind.capitalize()}, held-out streams",
        list(COLUMNS.values()),
        [[row[key] for key in COLUMNS] for row in rows if row["kind"] == kind],
        f"Settings were chosen on other streams. from, to: 95% t-interval over streams. Goodput counts first tokens "
        f"within {judged.limit_seconds:g} s. Bytes lent: beyond each model's share of the static split, both "
        "together, mean over time.",
    )


def _charts(kind: str, rows: Sequence[Mapping[str, Any]], part: Measured) -> list[Chart]:
    own = [row for row in rows if row["kind"] == kind]
    names = [row["rule"] for row in own]
    rates = [row["joint_hit_rate"] for row in own]
    has_interval = all(row["low"] is not None for row in own)
    low, high = ([row[key] for row in own] if has_interval else None for key in ("low", "high"))
    samples = part.outcomes[OURS.name][0].samples
    times = [one.seconds for one in samples]
    memory = [Series(f"model {model + 1}", times, [one.committed[model] for one in samples]) for model in range(2)]
    return [
        Chart(
            f"Joint hit rate, {kind}",
            "",
            "hit tokens / prompt tokens",
            [Series(kind, names, rates, low, high)],
            "bar",
        ),
        Chart(
            f"Goodput, {kind}",
            "",
            "requests a second in time",
            [Series(kind, names, [row["goodput"] for row in own])],
            "bar",
        ),
        Chart(f"Memory under ours, first stream, {kind}", "seconds", "frames with memory", memory, "step"),
    ]
