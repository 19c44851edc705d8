"""What an experiment found: tables, charts and sentences, kept as JSON. `report.py` renders it.

Imports the standard library alone, so that help and bad input are answered at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Value = str | float | int | bool | None
"""What a cell of a table holds; None is "not measured" and is shown as an empty cell."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under `columns`, a row as long as `columns`. `note` says what the columns mean, units included."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a chart, with an interval around each where `lower` and `upper` are given. x may be names.

    Dashed is a bound or a reference: its points are hollow, and joined in a scatter chart too.
    """

    label: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float | None]
    lower: Sequence[float] | None = None
    upper: Sequence[float] | None = None
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of one quantity over another; axis labels name units. `step` keeps a value until the next point."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: Literal["line", "step", "scatter", "bar"] = "line"
    is_x_log: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """All that one run of an experiment found.

    `summary` says in sentences what came out, shortfalls included; `limits` what was not measured, or modelled;
    `values` holds the documented keys that scripts read, which stay as they are from version to version.
    """

    experiment: str
    title: str
    provenance: Mapping[str, str]
    parameters: Mapping[str, Any]
    summary: Sequence[str]
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    limits: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write as JSON, the documented keys at the top level beside the parts of the report.

        What is not a number (nan, an infinity) becomes null: JSON has no word for it.
        """
        path.write_text(json.dumps(_written(self), indent=1) + "\n")


def read(path: Path) -> Result:
    """The result that `Result.write` wrote. Raises ValueError, which names `path`, when it holds something else."""
    try:
        written = json.loads(path.read_text())
        return _from_written(written)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} was not written by radix-pages experiment ({reason})") from error


def as_read(result: Result) -> Result:
    """`result` as it would be read after it was written: plain values in lists."""
    return _from_written(_written(result))


def _written(result: Result) -> dict[str, Any]:
    if "report" in result.values:
        raise ValueError("report is no name for a value: it holds the parts of the report")
    plain: dict[str, Any] = _plain({**result.values, "report": {**asdict(result), "values": {}}})
    return plain


def _from_written(written: Any) -> Result:
    if not isinstance(written, dict) or "report" not in written:
        raise ValueError("it has no report")
    parts = dict(written["report"])
    parts["tables"] = [Table(**table) for table in parts["tables"]]
    parts["charts"] = [
        Chart(**{**chart, "series": [Series(**series) for series in chart["series"]]}) for chart in parts["charts"]
    ]
    parts["values"] = {key: value for key, value in written.items() if key != "report"}
    return Result(**parts)


def _plain(value: Any) -> Any:
    """`value` of what JSON knows alone: of numpy numbers and arrays, paths, tuples and other mappings as well."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
