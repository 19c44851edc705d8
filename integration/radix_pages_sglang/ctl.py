"""The commands `radix-pages ctl ...`: read and change what a running server does with its memory.

Each change is checked against the ranges that the server names, sent, and read back.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from radix_pages_sglang import client
from radix_pages_sglang.client import Client, State, in_force
from radix_pages_sglang.serve import CommandError
from radix_pages_sglang.sizes import ACCEPTED, format_size, parse_size

DEFAULT_URL = "http://127.0.0.1:30000"

TRIM_SECONDS = 10.0
"""How long `trim` waits for the server to move or return something more; under load it does so slice by slice."""

MINUS_IS_A_VALUE = {"ignore_unknown_options": True}
"""So that `cap -5` is refused with the range and not as an option that is unknown."""

Url = Annotated[str, typer.Option(help="Where the server listens.", metavar="URL")]
ApiKey = Annotated[
    str | None,
    typer.Option(help="The server's --api-key, if it has one.", envvar="RADIX_PAGES_API_KEY", metavar="KEY"),
]
AdminApiKey = Annotated[
    str | None,
    typer.Option(
        help="The server's --admin-api-key, for changes; without it --api-key is sent.",
        envvar="RADIX_PAGES_ADMIN_API_KEY",
        metavar="KEY",
    ),
]

ctl = typer.Typer(help="Read and change what a running server does with its memory.", no_args_is_help=True)


LABELS = {
    client.MODE: "mode",
    client.CACHED: "cap",
    client.CEILING: "ceiling",
    client.RESERVE: "reserve",
    client.FREE: "free frames",
    client.IDLE_TRIM: "idle trim",
}
"""What `status` and changes call the knobs that have a value."""


@ctl.callback()
def connect(
    context: typer.Context, url: Url = DEFAULT_URL, api_key: ApiKey = None, admin_api_key: AdminApiKey = None
) -> None:
    context.obj = Client(url, api_key, admin_api_key)


@ctl.command()
def status(
    context: typer.Context,
    raw: Annotated[
        bool, typer.Option("--json", help="Print the state of every rank as the server tells it.")
    ] = False,
) -> None:
    """Show mode, memory and bounds of every rank."""
    states = context.obj.states()
    if raw:
        typer.echo(json.dumps(states, indent=1))
        return
    for rank, state in enumerate(states):
        Console().print(status_table(rank, state))


@ctl.command()
def trim(context: typer.Context) -> None:
    """Return all empty frames but the reserve, once.

    Says what came free, on every rank.
    """
    server: Client = context.obj
    before = server.set(client.TRIM, 1)
    after = once_trimmed(server, before)
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        frames, size = (
            new["memory"][total] - old["memory"][total] for total in ("returned_frames_total", "returned_bytes_total")
        )
        typer.echo(
            f"rank {rank}: returned {_frames(frames)}, {format_size(size)}; "
            f"resident now {format_size(new['memory']['resident_bytes'])}"
        )


@ctl.command(context_settings=MINUS_IS_A_VALUE)
def cap(context: typer.Context, tokens: Annotated[str, typer.Argument(metavar="N|off")]) -> None:
    """Keep at most N unused tokens cached.

    Tokens that a running request uses do not count; off takes the bound away.
    """
    _change(context, client.CACHED, client.NO_BOUND if _is_off(tokens) else _whole(tokens, "tokens, or off"))


@ctl.command(context_settings=MINUS_IS_A_VALUE)
def ceiling(context: typer.Context, size: Annotated[str, typer.Argument(metavar="SIZE|off")]) -> None:
    """Keep at most SIZE of KV memory resident.

    SIZE is 1073741824, 512MiB or 24GiB; off takes the bound away.
    """
    try:
        value = client.NO_BOUND if _is_off(size) else parse_size(size)
    except ValueError:
        raise CommandError(f"{size} is not a size: {ACCEPTED}, or off") from None
    _change(context, client.CEILING, value)


@ctl.command(context_settings=MINUS_IS_A_VALUE)
def reserve(context: typer.Context, frames: Annotated[str, typer.Argument(metavar="N")]) -> None:
    """Keep N empty frames committed, ready for what comes."""
    _change(context, client.RESERVE, _whole(frames, "frames"))


@ctl.command(context_settings=MINUS_IS_A_VALUE)
def free(context: typer.Context, frames: Annotated[str, typer.Argument(metavar="N")]) -> None:
    """Keep N frames free and returned for a neighbour, also under load; needs mode move."""
    _change(context, client.FREE, _whole(frames, "frames"))


@ctl.command("idle-trim", context_settings=MINUS_IS_A_VALUE)
def idle_trim(context: typer.Context, seconds: Annotated[str, typer.Argument(metavar="SECONDS")]) -> None:
    """Trim after SECONDS without a request; 0 is never."""
    try:
        value = float(seconds)
    except ValueError:
        raise CommandError(f"{seconds} is not a number of seconds") from None
    _change(context, client.IDLE_TRIM, int(value) if value.is_integer() else value)


@ctl.command()
def mode(context: typer.Context, name: Annotated[str, typer.Argument(metavar="observe|place|return|move")]) -> None:
    """Lower what the server does, or raise it again.

    At most to the mode in which the server started.
    """
    if name not in client.MODES:
        raise CommandError(f"{name} is not a mode: choose one of {', '.join(client.MODES)}")
    _change(context, client.MODE, client.MODES.index(name))


def status_table(rank: int, state: State) -> Table:
    """What there is to know about a rank, one fact a row."""
    table = Table("", "", title=f"rank {rank}", title_justify="left", show_header=False)
    if state["degraded"]:
        table.add_row("degraded", Text(state["degraded"], style="bold red"))
    for knob, label in LABELS.items():
        table.add_row(label, in_force(state, knob))
    table.add_row("highest mode", state["highest_mode"])
    table.add_row("backing", state["backing"])
    for label, fact in {**_memory(state["memory"]), **_occupancy(state)}.items():
        table.add_row(label, fact)
    return table


def _memory(memory: State | None) -> dict[str, str]:
    if memory is None:
        return {}
    total = format_size(memory["total_bytes"])
    return {
        "resident": f"{format_size(memory['resident_bytes'])} of {total}",
        "committed": f"{format_size(memory['committed_bytes'])}, {_frames(memory['committed_frames'])}",
        "returned now": f"{format_size(memory['returned_bytes'])}, {_frames(memory['returned_frames'])}",
        "returned in all": f"{format_size(memory['returned_bytes_total'])}, "
        f"{_frames(memory['returned_frames_total'])}",
        "regrown soon after": _frames(memory["regrown_frames"]),
        **(
            {"moved": f"{format_size(memory['moved_bytes'])}, {memory['moved_pages']:,} pages"}
            if "moved_bytes" in memory
            else {}
        ),
        "trims": f"{memory['trims']:,} in {memory['trim_seconds']:.3f} s",
        "commit failures": f"{memory['commit_failures']:,}",
        "ceiling refusals": f"{memory['ceiling_refusals']:,}",
        "over the ceiling": _frames(memory["over_ceiling_frames"]),
    }


def _occupancy(state: State) -> dict[str, str]:
    if "held_frames" not in state:
        return {"ledger": state.get("ledger_error", "none")}
    return {
        "cached": f"{state['cached_tokens']:,} tokens that no request uses",
        "frames": f"{state['held_frames']:,} held (packed floor {state['packed_floor']:,}), "
        f"{state['empty_frames']:,} empty",
        "pages": pages(state),
    }


def pages(state: State) -> str:
    """Where the pages of a rank are."""
    return ", ".join(f"{state[f'{kind}_pages']:,} {kind}" for kind in ("held", "stranded", "empty"))


def _change(context: typer.Context, knob: str, value: float) -> None:
    """Set `knob`, read it back, and say what is in force now."""
    server: Client = context.obj
    before = server.set(knob, value)
    for rank, (old, new) in enumerate(zip(before, server.states(), strict=True)):
        typer.echo(f"rank {rank}: {LABELS[knob]} {in_force(new, knob)} (was {in_force(old, knob)})")


def once_trimmed(server: Client, before: list[State]) -> list[State]:
    """The states as soon as every rank has trimmed once more than in `before`."""
    deadline, seen = time.monotonic() + TRIM_SECONDS, None
    while True:
        after = server.states()
        progress = [(new["memory"]["returned_frames_total"], new["memory"].get("moved_pages")) for new in after]
        if progress != seen:
            deadline, seen = time.monotonic() + TRIM_SECONDS, progress
        if all(new["memory"]["trims"] > old["memory"]["trims"] for old, new in zip(before, after, strict=True)):
            return after
        if time.monotonic() > deadline:
            raise CommandError(
                f"the server accepted, but has not trimmed after {TRIM_SECONDS:.0f} s; ctl status shows when it has"
            )
        time.sleep(0.1)


def _is_off(text: str) -> bool:
    return text.lower() == "off"


def _whole(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise CommandError(f"{text} is not a whole number of {what}") from None


def _frames(number: int) -> str:
    return f"{number:,} frame{'' if number == 1 else 's'}"
