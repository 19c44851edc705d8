"""What an experiment found: tables, charts and sentences, kept as JSON. `report.py` renders it.

Imports the standard library alone, so that help and bad input are answered at once.
"""

from __future__ import annotations

import json
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
    """Points of a chart, with an interval around each where `lower` and `upper` are given. x may be names."""

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
        """Write as JSON, the documented keys at the top level beside the parts of the report."""
        path.write_text(json.dumps({**self.values, "report": {**asdict(self), "values": {}}}, indent=1) + "\n")


def read(path: Path) -> Result:
    """The result that `Result.write` wrote. Raises ValueError when `path` holds something else."""
    written = json.loads(path.read_text())
    if not isinstance(written, dict) or "report" not in written:
        raise ValueError(f"{path} was not written by radix-pages experiment: it has no report")
    parts = dict(written["report"])
    parts["tables"] = [Table(**table) for table in parts["tables"]]
    parts["charts"] = [
        Chart(**{**chart, "series": [Series(**series) for series in chart["series"]]}) for chart in parts["charts"]
    ]
    parts["values"] = {key: value for key, value in written.items() if key != "report"}
    return Result(**parts)
