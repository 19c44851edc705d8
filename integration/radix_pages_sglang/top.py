"""The command `radix-pages top`: memory of a running server, live, with a map of its frames."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from radix_pages_sglang import client
from radix_pages_sglang.client import Client, State, UnreachableError, in_force
from radix_pages_sglang.ctl import DEFAULT_URL, ApiKey, Url, pages
from radix_pages_sglang.serve import CommandError
from radix_pages_sglang.sizes import format_size

BAR_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Cell:
    """How one character of a frame map is drawn, and what it means."""

    glyph: str
    style: str
    meaning: str


CELLS = {
    "-": Cell("·", "bright_black", "returned"),
    ".": Cell("░", "cyan", "empty"),
    "1": Cell("▂", "green", "to 25%"),
    "2": Cell("▄", "green", "to 50%"),
    "3": Cell("▆", "yellow", "to 75%"),
    "4": Cell("▇", "yellow", "below 100%"),
    "#": Cell("█", "blue", "full"),
}


@dataclass(frozen=True, slots=True)
class Poll:
    """The states of all ranks, and when they were read, in seconds of a clock that never goes back."""

    states: Sequence[State]
    seconds: float


def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the server.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
) -> None:
    """Watch the memory of a running server: its frames, what is resident, and what was returned.

    Goes on when the server goes away, and says so; ctrl-c ends it.
    """
    server = Client(url, api_key, timeout_seconds=max(interval, 10.0))
    console = Console()
    if once:
        console.print(picture(Poll(server.states(), time.monotonic()), None, console.options.ascii_only))
    elif console.is_terminal:
        with suppress(KeyboardInterrupt):
            watch(server, console, interval)
    else:
        raise CommandError("top draws on a terminal: use top --once, or ctl status --json")


def watch(server: Client, console: Console, interval: float) -> None:
    """Draw one picture after another until the user interrupts."""
    last: Poll | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = Poll(server.states(), time.monotonic())
            except UnreachableError as error:
                live.update(gone(error, last, console.options.ascii_only), refresh=True)
            else:
                live.update(picture(now, last, console.options.ascii_only), refresh=True)
                last = now
            time.sleep(interval)


def gone(error: UnreachableError, last: Poll | None, ascii_only: bool) -> RenderableType:
    """What is shown while the server does not answer: that, and the last picture."""
    says = Text(f"{error}; trying again", style="bold red")
    return says if last is None else Group(says, picture(last, None, ascii_only))


def picture(now: Poll, before: Poll | None, ascii_only: bool = False) -> RenderableType:
    """All ranks, one panel each. With a poll from `before`, rates too."""
    panels = []
    for rank, state in enumerate(now.states):
        rate = None
        if before is not None and rank < len(before.states):
            rate = pages_a_second(state, before.states[rank], now.seconds - before.seconds)
        panels.append(panel(rank, state, rate, ascii_only))
    return Group(*panels)


def pages_a_second(state: State, old: State, seconds: float) -> float | None:
    """Pages reclaimed between two states, or None if the server started anew in between."""
    reclaimed = state["pages_reclaimed"] - old["pages_reclaimed"]
    return reclaimed / seconds if reclaimed >= 0 and seconds > 0 else None


def panel(rank: int, state: State, rate: float | None, ascii_only: bool) -> Panel:
    """One rank: what went wrong first, then bars, counts and the frame map."""
    parts: list[RenderableType] = []
    if state["degraded"]:
        parts.append(Text(f"degraded: {state['degraded']}", style="bold red"))
    if "ledger_error" in state:
        parts.append(Text(state["ledger_error"], style="bold red"))
    parts += [bars(state), counts(state, rate)]
    if state.get("frame_map"):
        parts += [frame_map(state["frame_map"]["cells"], ascii_only), legend(state["frame_map"], ascii_only)]
    title = f"rank {rank}: mode {in_force(state, client.MODE)} (highest {state['highest_mode']})"
    return Panel(Group(*parts), title=title, title_align="left", border_style="red" if state["degraded"] else "none")


def bars(state: State) -> Table:
    """Sizes against the whole KV memory, tokens against their bound, frames against all frames."""
    grid = Table.grid(padding=(0, 2))

    def bar(label: str, part: float, whole: float, text: str, style: str = "blue") -> None:
        drawn = ProgressBar(
            max(whole, 1), min(part, whole), width=BAR_WIDTH, complete_style=style, finished_style=style
        )
        grid.add_row(label, drawn, Text(text))

    memory = state["memory"]
    if memory is not None:
        total = memory["total_bytes"]
        bar(
            "resident",
            memory["resident_bytes"],
            total,
            f"{format_size(memory['resident_bytes'])} of {format_size(total)}",
        )
        bar("committed", memory["committed_bytes"], total, format_size(memory["committed_bytes"]))
        bound = state["knobs"].get(client.CEILING, {}).get("value", client.NO_BOUND)
        bar("ceiling", total if bound == client.NO_BOUND else bound, total, in_force(state, client.CEILING), "yellow")
        returned = f"{format_size(memory['returned_bytes'])}, {memory['returned_frames']:,} frames"
        bar("returned", memory["returned_bytes"], total, returned, "green")
    if "held_frames" in state:
        all_pages = state["held_pages"] + state["stranded_pages"] + state["empty_pages"]
        whole_tokens = all_pages * state["page_size"]
        bound = state["knobs"].get(client.CACHED, {}).get("value", client.NO_BOUND)
        cached, whole = state["cached_tokens"], whole_tokens if bound == client.NO_BOUND else bound
        bar("cached", cached, whole, f"{cached:,} tokens, cap {in_force(state, client.CACHED)}")
        held, floor = state["held_frames"], state["packed_floor"]
        bar("held frames", held, held + state["empty_frames"], f"{held:,}, packed floor {floor:,}")
        bar("packed floor", floor, held + state["empty_frames"], f"{floor:,}", "green")
    return grid


def counts(state: State, rate: float | None) -> Text:
    """Pages as they are and what happened so far, in two or three lines; trouble is red."""
    said = Text()
    if "held_pages" in state:
        said.append(f"pages: {pages(state)}\n")
    speed = "" if rate is None else f", {rate:,.1f} a second"
    said.append(f"reclaimed: {state['pages_reclaimed']:,} pages{speed}")
    memory = state["memory"]
    if memory is None:
        said.append("\nno backing: no memory is returned")
        return said
    said.append(
        f"\nreturned in all: {format_size(memory['returned_bytes_total'])} by {memory['trims']:,} trims, "
        f"{memory['regrown_frames']:,} frames regrown soon after\n"
    )
    for number, what in (
        (memory["commit_failures"], "commit failures"),
        (memory["ceiling_refusals"], "ceiling refusals"),
        (memory["over_ceiling_frames"], "frames over the ceiling"),
    ):
        said.append(f"{what}: {number:,}   ", style="bold red" if number else "")
    return said


def frame_map(cells: str, ascii_only: bool = False) -> Text:
    """The map that the server sent, drawn; it folds at the width it gets."""
    drawn = Text(overflow="fold")
    for sign, run in itertools.groupby(cells):
        cell = CELLS.get(sign, Cell(sign, "bold red", ""))
        drawn.append((sign if ascii_only else cell.glyph) * len(list(run)), style=cell.style)
    return drawn


def legend(shown: State, ascii_only: bool = False) -> Text:
    """What the signs of the map mean and how many frames each stands for."""
    per_cell = shown["frames_per_cell"]
    said = Text(f"{per_cell:,} frame{'' if per_cell == 1 else 's'} a sign:")
    for sign, cell in CELLS.items():
        said.append("  ")
        said.append(sign if ascii_only else cell.glyph, style=cell.style)
        said.append(f" {cell.meaning}")
    return said
