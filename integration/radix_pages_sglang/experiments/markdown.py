"""A result as GitHub Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from radix_pages_sglang.experiments import shown
from radix_pages_sglang.experiments.provenance import in_words
from radix_pages_sglang.experiments.results import Result, Table

ANYWHERE = r"[\\`*<>\[\]|~$]|(?<!\w)_|_(?!\w)|&(?=#?\w+;)"
AT_THE_START = r"^[#=+-](?!\d)|(?<=^\d)[.)](?!\d)|(?<=^\d\d)[.)](?!\d)"
SPECIAL = re.compile(f"{ANYWHERE}|{AT_THE_START}")
"""What Markdown would not show as it stands; an underscore inside a word and a lone & are shown."""


def markdown(result: Result, picture: str | None) -> str:
    """`result` as Markdown that shows every text as it is; `picture` is the file to show, if there is one."""
    return "\n".join(_lines(result, picture)) + "\n"


def escaped(text: str) -> str:
    """`text` on one line, so that Markdown shows it as it is."""
    return SPECIAL.sub(r"\\\g<0>", " ".join(text.split()))


def _lines(result: Result, picture: str | None) -> Iterator[str]:
    yield f"# {escaped(result.title)}"
    yield f"\n{escaped(in_words(dict(result.provenance)))}\n"
    yield from (f"- {escaped(sentence)}" for sentence in result.summary)
    if picture is not None:
        yield f"\n![{escaped('; '.join(chart.title for chart in result.charts))}]({picture})"
    for table in result.tables:
        yield from _table(table)
    if result.parameters:
        yield "\n## Parameters\n"
        yield from ("- " + escaped(f"{key}: {shown.parameter(to)}") for key, to in result.parameters.items())
    if result.limits:
        yield "\n## What this does not show\n"
        yield from (f"- {escaped(sentence)}" for sentence in result.limits)


def _table(table: Table) -> Iterator[str]:
    yield f"\n## {escaped(table.title)}\n"
    if table.note:
        yield f"{escaped(table.note)}\n"
    is_right = [any(shown.is_number(row[place]) for row in table.rows) for place in range(len(table.columns))]
    yield _row(table.columns)
    yield _row(["---:" if right else "---" for right in is_right], is_text=False)
    yield from map(_row, shown.rows(table))


def _row(cells: Iterable[str], is_text: bool = True) -> str:
    return "| " + " | ".join(escaped(cell) if is_text else cell for cell in cells) + " |"
