"""The charts of a result in one picture, a panel each."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radix_pages_sglang.experiments import shown
from radix_pages_sglang.experiments.results import Chart, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#7b3fa0", "#8c564b")
"""Colours that also colour-blind readers tell apart (the first six by Okabe and Ito)."""

MARKERS = "osD^vPX*h<"
"""One more than colours: where colours come again, markers do not."""

PANEL_INCHES = (5.6, 3.9)
BAR_INCHES = 0.17
"""Least height of a lying bar."""

TITLE_CHARACTERS, HEIGHT_CHARACTERS = 58, 40
"""What fits across and up a panel; longer texts take two lines."""

FEW_POINTS = 40
"""Up to so many points of a line each have a marker."""

FEW_BARS = 14
"""Up to so many bars have their value beside them."""

FEWEST_PLACES = 4

NAME_CHARACTERS = 44
"""Bars whose names take more characters than this in all lie, with the names at the left."""

Styles = Mapping[str, int]
"""The place of each label among all, which chooses its colour and marker."""


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Draw `charts` into the PNG file `path`."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(len(charts), 2 if len(charts) <= 8 else 3)
    grid = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    heights = [max(map(_inches, row)) for row in grid]
    settings: Any = {"text.parse_math": False, "font.size": 9, "axes.axisbelow": True}
    with matplotlib.rc_context(settings):
        apart = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(PANEL_INCHES[0] * columns, sum(heights)), layout=apart, dpi=110)
        frames = figure.subfigures(len(grid), columns, squeeze=False, height_ratios=heights).flat
        shared = _styles(charts)
        for chart, frame in zip(charts, frames, strict=False):
            _draw_panel(frame.subplots(), chart, shared or _styles([chart], may_repeat=True))
            _add_legend(frame, chart)
        figure.savefig(path)


def _styles(charts: Sequence[Chart], may_repeat: bool = False) -> dict[str, int]:
    """A style for each label, the same in all `charts`; empty if there are more labels than colours."""
    labels = dict.fromkeys(series.label for chart in charts for series in chart.series)
    if len(labels) > len(PALETTE) and not may_repeat:
        return {}
    return {label: place for place, label in enumerate(labels)}


def _inches(chart: Chart) -> float:
    """The height of a chart's panel."""
    height = PANEL_INCHES[1]
    if _lies(chart):
        height = max(height, 1.2 + BAR_INCHES * len(_names(chart)) * (len(chart.series) + 1))
    return height + (0.1 * len(chart.series) if len(chart.series) > 4 else 0)


def _draw_panel(panel: Axes, chart: Chart, styles: Styles) -> None:
    lies = _lies(chart)
    panel.set_title(textwrap.fill(chart.title, TITLE_CHARACTERS), loc="left", fontsize=10, fontweight="bold")
    panel.set_xlabel(textwrap.fill(chart.y_label if lies else chart.x_label, TITLE_CHARACTERS))
    panel.set_ylabel(textwrap.fill(chart.x_label if lies else chart.y_label, HEIGHT_CHARACTERS))
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x" if lies else "y", alpha=0.3)
    if chart.kind == "bar":
        _draw_bars(panel, chart, styles, lies)
    else:
        names = _names(chart)
        for series in chart.series:
            x = [float(names.index(_name(at)) if names else at) for at in series.x]
            _draw_series(panel, chart.kind, series, x, styles[series.label])
        if names:
            turn = 30 if sum(map(len, names)) > NAME_CHARACTERS else 0
            panel.set_xticks(range(len(names)), names, rotation=turn, ha="right" if turn else "center")
    _write_numbers(panel, chart, lies)


def _draw_series(panel: Axes, kind: str, series: Series, x: list[float], style: int) -> None:
    """One line, stair or cloud of points (joined when dashed); its interval as a band, of points as bars."""
    colour, marker = PALETTE[style % len(PALETTE)], MARKERS[style % len(MARKERS)]
    y = _numbers(series.y)
    look: dict[str, Any] = {"color": colour, "linewidth": 1.3 if series.is_dashed else 1.7, "label": series.label}
    look["linestyle"] = "--" if series.is_dashed else "none" if kind == "scatter" else "-"
    points: dict[str, Any] = {"marker": marker, "markersize": 6 if kind == "scatter" else 4.5}
    points |= {"markerfacecolor": "none"} if series.is_dashed else {}
    if kind == "scatter":
        errors = None if series.lower is None or series.upper is None else _errors(series)
        panel.errorbar(x, y, errors, capsize=3, elinewidth=1, **look, **points)
        return
    if kind == "step":
        panel.step(x, y, where="post", **look)
    else:
        panel.plot(x, y, **look, **(points if len(x) <= FEW_POINTS else {}))
    if series.lower is not None and series.upper is not None:
        band = (_numbers(series.lower), _numbers(series.upper))
        panel.fill_between(x, *band, step="post" if kind == "step" else None, color=colour, alpha=0.16, linewidth=0)


def _draw_bars(panel: Axes, chart: Chart, styles: Styles, lies: bool) -> None:
    """A group of bars for each name, in the order in which the series name them."""
    names = _names(chart)
    width = 0.82 / max(len(chart.series), 1)
    is_few = sum(len(series.x) for series in chart.series) <= FEW_BARS
    for place, series in enumerate(chart.series):
        offset = width * (place - (len(chart.series) - 1) / 2)
        at = [names.index(_name(x)) + offset for x in series.x]
        errors = None if series.lower is None or series.upper is None else _errors(series)
        look: dict[str, Any] = {
            "color": PALETTE[styles[series.label] % len(PALETTE)],
            "label": series.label,
            "hatch": "//" if series.is_dashed else None,
            "error_kw": {"capsize": 2.5, "elinewidth": 1},
        }
        draw_bars: Callable[..., Any] = panel.barh if lies else panel.bar
        drawn = draw_bars(at, _numbers(series.y), width * 0.94, **{"xerr" if lies else "yerr": errors}, **look)
        if is_few and errors is None:
            panel.bar_label(drawn, shown.column(series.y), padding=2, fontsize=7.5)
    if lies:
        panel.set_yticks(range(len(names)), names)
        panel.invert_yaxis()
        panel.margins(x=0.1)
    else:
        panel.set_xticks(range(len(names)), names)
        room = max(FEWEST_PLACES - len(names), 0) / 2  # one or two bars are not as wide as the panel
        panel.set_xlim(-0.6 - room, len(names) - 0.4 + room)
        panel.margins(y=0.1)


def _write_numbers(panel: Axes, chart: Chart, lies: bool) -> None:
    """Numbers at the axes with thousands separators; on a logarithmic axis those that were measured."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    (panel.xaxis if lies else panel.yaxis).set_major_formatter(plain)
    if _names(chart):
        return
    measured = sorted({float(at) for series in chart.series for at in series.x})
    if all(at.is_integer() for at in measured):
        panel.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    if chart.is_x_log:
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        if len(measured) <= 9:
            panel.set_xticks(measured)
            panel.minorticks_off()
    panel.xaxis.set_major_formatter(plain)


def _add_legend(frame: SubFigure, chart: Chart) -> None:
    """What the colours mean: in the panel while there is room, else below it."""
    panel = frame.axes[0]
    if len(chart.series) > 4 or (len(chart.series) > 1 and _lies(chart)):
        handles, labels = panel.get_legend_handles_labels()
        columns = 2 if max(map(len, labels)) > 22 else 3
        frame.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    elif len(chart.series) > 1 or (chart.kind != "bar" and any(series.label for series in chart.series)):
        panel.legend(fontsize=8, framealpha=0.8)


def _names(chart: Chart) -> list[str]:
    """The names at the x axis in order of appearance, those of all bars too; empty where x are numbers."""
    places = [at for series in chart.series for at in series.x]
    is_named = chart.kind == "bar" or any(isinstance(at, str) for at in places)
    return list(dict.fromkeys(map(_name, places))) if is_named else []


def _name(at: float | str) -> str:
    return at if isinstance(at, str) else f"{at:,.10g}"


def _lies(chart: Chart) -> bool:
    return chart.kind == "bar" and sum(len(name) + 1 for name in _names(chart)) > NAME_CHARACTERS


def _numbers(values: Sequence[float | None]) -> list[float]:
    """`values` for matplotlib, which leaves out what is no number."""
    return [float("nan") if value is None else value for value in values]


def _errors(series: Series) -> list[list[float]]:
    """How far the interval goes below and above each point."""
    assert series.lower is not None
    assert series.upper is not None
    y = _numbers(series.y)
    below = [max(at - low, 0.0) for at, low in zip(y, _numbers(series.lower), strict=True)]
    above = [max(high - at, 0.0) for at, high in zip(y, _numbers(series.upper), strict=True)]
    return [below, above]
