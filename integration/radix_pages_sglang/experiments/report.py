"""Reports of experiments: on the terminal, and as JSON, Markdown, picture and web page in a folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from radix_pages_sglang.experiments import shown
from radix_pages_sglang.experiments.markdown import markdown
from radix_pages_sglang.experiments.provenance import in_words
from radix_pages_sglang.experiments.results import Result, Table, as_read, read
from radix_pages_sglang.experiments.web_page import index, web_page
from radix_pages_sglang.serve import CommandError

NAME = "report"
"""The files of a report are this with .json, .md, .png and .html."""

ROWS_ON_A_TERMINAL = 40

WIDTH_OF_A_FILE = 118
"""Characters a line where the output goes to a file or another program."""

LONGEST_WORD = 24
"""A column of the terminal's table is not made narrower than its longest word, up to so many characters."""


def finish(result: Result, out: Path | None, json_file: Path | None) -> None:
    """End an experiment: show `result`, write it to `json_file` and its report into the folder `out`, where given."""
    check_places(out, json_file)
    result = as_read(result)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH_OF_A_FILE)
    show(result, console)
    if json_file is not None:
        result.write(json_file)
        console.print(Text(f"written to {json_file}"), soft_wrap=True)
    if out is not None:
        render(result, out)
        console.print(Text(f"report in {out}: open {out / NAME}.html"), soft_wrap=True)


def check_places(out: Path | None, json_file: Path | None) -> None:
    """Raise a CommandError if a report could not be written there: known before an experiment runs, not after."""
    if json_file is not None and json_file.is_dir():
        raise CommandError(f"--json {json_file} is a directory: name a file in it")
    if json_file is not None and not json_file.parent.is_dir():
        raise CommandError(f"--json {json_file}: there is no directory {json_file.parent}, make it first")
    if out is None:
        return
    for place in (out, *out.parents):
        if place.is_file():
            which = "" if place == out else f": {place}"
            raise CommandError(f"--out {out}{which} is a file: name a directory for the report")
    check_matplotlib()


def check_matplotlib() -> None:
    """Raise a CommandError where pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise CommandError('reports need matplotlib: pip install "radix-pages[experiments]"')


def render(result: Result, folder: Path) -> None:
    """Write report.json, report.md, report.png (if there are charts) and report.html into `folder`.

    What is rendered is what the JSON says, so that rendering it again gives the same files.
    """
    check_matplotlib()
    from radix_pages_sglang.experiments.picture import draw

    folder.mkdir(parents=True, exist_ok=True)
    result.write(folder / f"{NAME}.json")
    result = read(folder / f"{NAME}.json")
    picture = folder / f"{NAME}.png" if result.charts else None
    if picture is None:
        (folder / f"{NAME}.png").unlink(missing_ok=True)
    else:
        draw(result.charts, picture)
    (folder / f"{NAME}.md").write_text(markdown(result, picture.name if picture else None), encoding="utf-8")
    (folder / f"{NAME}.html").write_text(web_page(result, picture), encoding="utf-8")


def show(result: Result, console: Console) -> None:
    """Print what came out, the tables (long ones only in part) and the limits."""
    console.print(Text(result.title, style="bold"))
    console.print(Text(in_words(dict(result.provenance)), style="bright_black"))
    for table in result.tables:
        console.print()
        console.print(_drawn(table))
        if table.note:
            console.print(Text(table.note, style="bright_black"))
        if len(table.rows) > ROWS_ON_A_TERMINAL:
            console.print(f"{len(table.rows) - ROWS_ON_A_TERMINAL:,} more rows: --out or --json writes all")
    console.print()
    for sentence in result.summary:
        console.print(Text(f"* {sentence}"))
    for sentence in result.limits:
        console.print(Text(f"- {sentence}", style="bright_black"))


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A report, or a directory of reports.")],
) -> None:
    """Render the reports in DIR again from their report.json.

    Looks at DIR/report.json and at DIR/*/report.json, and writes report.md, report.png and report.html beside each.
    Several get an index.html in DIR, too.
    """
    found = {path.parent: _read(path) for path in _reports(folder)}
    for place, result in found.items():
        render(result, place)
        typer.echo(f"{place / NAME}.html: {result.title}")
    if len(found) > 1:
        links = ((f"{(place / NAME).relative_to(folder).as_posix()}.html", result) for place, result in found.items())
        (folder / "index.html").write_text(index(links), encoding="utf-8")
        typer.echo(f"{folder / 'index.html'}: all of them")


def _reports(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CommandError(f"there is no directory {folder}: name one that an experiment's --out wrote")
    found = sorted(path for pattern in (f"{NAME}.json", f"*/{NAME}.json") for path in folder.glob(pattern))
    if not found:
        raise CommandError(f"no {NAME}.json in {folder} or in a directory of it: an experiment's --out writes one")
    return found


def _read(path: Path) -> Result:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"{error}: write it anew with an experiment's --out, or move it away") from error


def _drawn(table: Table) -> Drawn:
    drawn = Drawn(title=Text(table.title, style="bold"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows = shown.rows(table)[:ROWS_ON_A_TERMINAL]
    for place, name in enumerate(table.columns):
        is_right = any(shown.is_number(row[place]) for row in table.rows)
        words = [word for text in (name, *(row[place] for row in rows)) for word in text.split()]
        width = min(max(map(len, words), default=1), LONGEST_WORD)
        drawn.add_column(Text(name), justify="right" if is_right else "left", overflow="fold", min_width=width)
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn
