"""The command line, `radix-pages`: each command is a function in a module of its own, added at the end of this file.

Help has to come at once, so no command's module may import torch or SGLang before its command runs.
"""

import importlib.metadata
from typing import Any

import typer
from typer.core import TyperGroup

from radix_pages_sglang.ctl import ctl
from radix_pages_sglang.demo import demo
from radix_pages_sglang.experiments.commands import experiment
from radix_pages_sglang.experiments.report import report
from radix_pages_sglang.serve import CommandError, installed_sglang, serve
from radix_pages_sglang.support import SUPPORTED_VERSIONS
from radix_pages_sglang.top import top
from radix_pages_sglang.watch.command import watch


class Commands(TyperGroup):
    """Ends a command that raised a CommandError with its line and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CommandError as error:
            typer.echo(f"radix-pages: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    help="A prefix cache for SGLang that thinks in memory pages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def version() -> None:
    """Print the versions of radix-pages and of the SGLang it found."""
    typer.echo(f"radix-pages {importlib.metadata.version('radix-pages')}")
    typer.echo(f"sglang {installed_sglang() or 'not installed'} (supported: {', '.join(SUPPORTED_VERSIONS)})")


app.command(
    options_metavar="MODEL [SGLANG ARGUMENTS]",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(serve)
app.command()(version)
app.command()(demo)
app.add_typer(ctl, name="ctl")
app.command()(top)
app.command()(watch)
app.add_typer(experiment, name="experiment")
app.command()(report)
