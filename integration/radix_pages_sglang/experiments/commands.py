"""The commands `radix-pages experiment ...`, one for each thing users do with this product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from radix_pages_sglang.experiments.chat.command import chat
from radix_pages_sglang.experiments.colocate.command import colocate
from radix_pages_sglang.experiments.page_accounting.command import page_accounting
from radix_pages_sglang.experiments.prefix_sharing.command import prefix_sharing
from radix_pages_sglang.experiments.report import check_places

HELP = """Measure what this cache does, and what it is good for.

Each prints its tables. --out DIR also writes a report (JSON, Markdown, a picture and one web page), --json FILE the
numbers alone, under keys that stay. --quick takes about two minutes on two cores. `radix-pages report DIR` renders
reports again.

Example: radix-pages experiment page-accounting --quick --out REPORT
"""

experiment = typer.Typer(help=HELP, no_args_is_help=True)


class Experiment(TyperCommand):
    """Refuses places where no report can be written before the work of minutes, not after it."""

    def invoke(self, ctx: Any) -> Any:
        check_places(ctx.params.get("out"), ctx.params.get("json_file"))
        return super().invoke(ctx)


WHAT_FOR: dict[Callable[..., None], str] = {
    page_accounting: "Does evicting scattered tokens free pages?",
    chat: "The same chats on this cache and on stock SGLang.",
    prefix_sharing: "Request traces replayed through both, without a model.",
    colocate: "Two models with opposed bursts share one memory budget.",
}
"""The experiments, and what each is about in a line short enough for the list of commands."""

for command, what in WHAT_FOR.items():
    experiment.command(cls=Experiment, short_help=what)(command)
