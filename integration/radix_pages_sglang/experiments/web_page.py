"""A result as one HTML page that needs nothing else: no other file, no other host."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from radix_pages_sglang.experiments import shown
from radix_pages_sglang.experiments.provenance import in_words
from radix_pages_sglang.experiments.results import Result, Table, Value

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #59636e; --line: #d5dae0; --paper: #fff; --shade: #f4f6f8;
  --link: #0a58ca; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --faint: #9aa5b1; --line: #39424c; --paper: #14181d;
  --shade: #1d232a; --link: #79b0ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
a { color: var(--link); }
.origin, .note { color: var(--faint); font-size: .875rem; margin: 0 0 .7rem; max-width: 60rem; }
ul { padding-left: 1.2rem; max-width: 60rem; } li { margin: .3rem 0; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; }
.wide { overflow: auto; max-height: 40rem; border: 1px solid var(--line); border-radius: 6px; width: fit-content;
  max-width: 100%; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; } tbody tr:hover { background: var(--shade); }
thead th { position: sticky; top: 0; background: var(--shade); vertical-align: bottom; }
th.number, td.number { text-align: right; }
.whole { max-height: none; } td { white-space: nowrap; } td.long { white-space: normal; min-width: 22rem; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--link); }
th button::after { content: "\\a0\\2195"; color: var(--faint); }
th[aria-sort=ascending] button::after { content: "\\a0\\2191"; } th[aria-sort=descending] button::after {
  content: "\\a0\\2193"; }
@media print { .wide { max-height: none; } th button::after { content: ""; } }
"""

SORTING = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0], place = head.cellIndex;
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => row.cells[place].dataset.number ?? row.cells[place].textContent;
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    const [m, n] = [Number(x), Number(y)];
    return (up ? 1 : -1) * (isNaN(m) || isNaN(n) ? x.localeCompare(y, "en", {numeric: true}) : m - n);
  };
  body.append(...[...body.rows].sort(order));
});
"""

LONG_CHARACTERS = 60
"""Cells with more text than this are broken into lines."""


def web_page(result: Result, picture: Path | None) -> str:
    """`result` as a page, with the PNG file `picture` inside it."""
    parts = [
        f"<h1>{escape(result.title)}</h1>",
        f'<p class="origin">{escape(in_words(dict(result.provenance)))}</p>',
        _sentences(result.summary),
    ]
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        alt = escape("; ".join(chart.title for chart in result.charts))
        parts.append(f'<figure><img src="data:image/png;base64,{data}" alt="{alt}"></figure>')
    parts += map(_table, result.tables)
    if result.parameters:
        rows = "".join(
            f'<tr><th scope="row">{escape(key)}</th>{_cell(shown.parameter(to), shown.parameter(to), False)}</tr>'
            for key, to in result.parameters.items()
        )
        parts.append(f'<h2>Parameters</h2><div class="wide whole"><table><tbody>{rows}</tbody></table></div>')
    if result.limits:
        parts.append(f"<h2>What this does not show</h2>{_sentences(result.limits)}")
    return _document(result.title, parts)


def index(reports: Iterable[tuple[str, Result]]) -> str:
    """A page that leads to several reports: pairs of a link and what is there."""
    parts = ["<h1>Reports of radix-pages</h1>"]
    for link, result in reports:
        parts.append(f'<h2><a href="{escape(link)}">{escape(result.title)}</a></h2>')
        parts.append(f'<p class="origin">{escape(in_words(dict(result.provenance)))}</p>')
        parts.append(_sentences(result.summary))
    return _document("Reports of radix-pages", parts)


def _document(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n{body}\n"
        f"<script>{SORTING}</script></body></html>\n"
    )


def _sentences(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>" if sentences else ""


def _table(table: Table) -> str:
    is_right = [any(shown.is_number(row[place]) for row in table.rows) for place in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{_class(right)}><button type="button">{escape(column)}</button></th>'
        for column, right in zip(table.columns, is_right, strict=True)
    )
    body = "\n".join(
        f"<tr>{''.join(map(_cell, row, texts, is_right))}</tr>"
        for row, texts in zip(table.rows, shown.rows(table), strict=True)
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<h2>{escape(table.title)}</h2>{note}"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def _cell(value: Value, text: str, is_right: bool) -> str:
    number = f' data-number="{value}"' if shown.is_number(value) else ""
    is_long = len(text) > LONG_CHARACTERS
    return f"<td{_class(is_right, is_long)}{number}>{escape(text)}</td>"


def _class(is_right: bool, is_long: bool = False) -> str:
    return ' class="long"' if is_long else ' class="number"' if is_right else ""
