"""How a value is written for people: rounded, with thousands separators. JSON keeps it in full."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from radix_pages_sglang.experiments.results import Table, Value

DIGITS = 4
"""Significant digits of the largest number of a column; the others get as many decimals as it."""

FEWEST_DIGITS = 3
"""A number that would keep fewer digits like that gets decimals of its own."""

MOST_DECIMALS = 6


def is_number(value: Value) -> bool:
    """Whether a cell is set to the right and sorted as a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def rows(table: Table) -> list[tuple[str, ...]]:
    """The cells of `table` as they are shown, row by row."""
    columns = [column([row[place] for row in table.rows]) for place in range(len(table.columns))]
    return list(zip(*columns, strict=True))


def column(values: Sequence[Value]) -> list[str]:
    """A column as it is shown: floats with the same number of decimals, empty where nothing was measured."""
    decimals = _decimals([value for value in values if isinstance(value, float)])
    return [_cell(value, decimals) for value in values]


def parameter(value: Any) -> str:
    """A parameter as it is shown; whole numbers as they would be typed."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {parameter(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(parameter(part) for part in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return "none" if value is None else column([value])[0]


def _decimals(numbers: Sequence[float]) -> int:
    sizes = [abs(number) for number in numbers if number and math.isfinite(number)]
    if not sizes:
        return 0
    allowed = min(max(DIGITS - 1 - math.floor(math.log10(max(sizes))), 0), MOST_DECIMALS)
    return max(len(f"{size:.{allowed}f}".partition(".")[2].rstrip("0")) for size in sizes)


def _cell(value: Value, decimals: int) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    alike = f"{value:,.{decimals}f}"
    if abs(value) < 10 ** (FEWEST_DIGITS - 1 - decimals):
        alone = f"{value:.{FEWEST_DIGITS}g}"
        return alike if float(alone) == float(alike) else alone
    return alike
