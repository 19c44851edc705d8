"""What measurements in pairs, ours and theirs in turns, say about a difference, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95

Pair = tuple[float, float]
"""One quantity measured on both sides under the same load, one right after the other: ours, theirs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """By how many percent ours is better, with the 95% interval [low, high] over `samples` independent samples.

    Positive is better, also of quantities where less is better: 3 then means that ours is 3% less. The interval is
    None for a single sample.
    """

    percent: float
    low: float | None
    high: float | None
    samples: int


def spread(values: Sequence[float], digits: int) -> str:
    """Their mean, and in brackets the least and the most."""
    return f"{statistics.mean(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of two or more `values`, by Student's t."""
    from scipy import stats

    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.mean(values)
    return float(mean - half), float(mean + half)


def difference(blocks: Sequence[Sequence[Pair]], *, is_less_better: bool = False) -> Difference | None:
    """How ours differs from theirs over `blocks` of pairs; None if a value has no ratio to others (0 and below).

    Pairs of one block share something that makes them alike, such as the same two server processes. So with two
    blocks or more a block is one sample, the mean of its pairs; pairs of a single block are samples themselves, and
    their interval knows nothing of how another block would have come out. Means are those of logarithms of ratios,
    so that a pair and its mirror image cancel out.
    """
    if any(value <= 0 for block in blocks for pair in block for value in pair):
        return None
    logs = [[math.log(ours / theirs) for ours, theirs in block] for block in blocks if block]
    samples = [statistics.mean(block) for block in logs] if len(logs) > 1 else logs[0]
    if is_less_better:
        samples = [-sample for sample in samples]
    low, high = interval(samples) if len(samples) > 1 else (None, None)
    mean, low, high = (_percent(value, is_less_better) for value in (statistics.mean(samples), low, high))
    assert mean is not None
    return Difference(mean, low, high, len(samples))


def _percent(gain: float | None, is_less_better: bool) -> float | None:
    """A logarithm of a ratio, positive where ours is better, as percent of theirs."""
    if gain is None:
        return None
    return 100 * (1 - math.exp(-gain)) if is_less_better else 100 * (math.exp(gain) - 1)
