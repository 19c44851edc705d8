"""What the counts of several texts say about chance: zero, chance, more or fewer than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95

FEWEST_TEXTS = 20
"""With fewer texts a verdict is computed all the same, and the report says that it rests on too few."""

RULE = (
    "zero: no page came free in any text. Otherwise the expected number decides: inside the 95% t-interval of the "
    "mean over texts it is chance, below the interval's lower end the eviction frees more than chance, above its "
    "upper end fewer than chance. Where all texts free equally many, the interval is that one number. A few pages in "
    "a few texts can stay chance although much fewer were expected: the interval then reaches down to 0."
)

ZERO, CHANCE, MORE, FEWER = "zero", "chance", "more than chance", "fewer than chance"


class Interval(NamedTuple):
    """Where the mean lies, with 95% confidence."""

    lower: float
    upper: float


def mean_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """The t-interval of the mean of `values`, one for each text. One text tells nothing about the others."""
    from scipy.stats import t

    numbers = np.asarray(values, dtype=float)
    if len(numbers) < 2:
        return Interval(-math.inf, math.inf)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1) * numbers.std(ddof=1) / math.sqrt(len(numbers)))
    mean = float(numbers.mean())
    return Interval(mean - half, mean + half)


def interval(counts: Sequence[float] | np.ndarray) -> Interval:
    """`mean_interval` for counts, which are not negative: neither is their mean."""
    lower, upper = mean_interval(counts)
    return Interval(max(lower, 0.0), upper)


def verdict(counts: Sequence[float] | np.ndarray, expected: float) -> str:
    """What RULE says of `counts`, one for each text, when chance frees `expected` on average."""
    values = np.asarray(counts, dtype=float)
    if not values.any():
        return ZERO
    lower, upper = interval(values)
    slack = 1e-9 * max(abs(expected), 1.0)  # means of equal numbers differ in the last digit
    if expected < lower - slack:
        return MORE
    if expected > upper + slack:
        return FEWER
    return CHANCE
