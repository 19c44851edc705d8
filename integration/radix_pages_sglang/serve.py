"""The command `radix-pages serve`: `sglang serve` with this cache, on the CPU where there is no GPU.

Imports neither torch nor SGLang: the process is replaced by the server's before either is needed.
"""

import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence

import typer

from radix_pages_sglang import BACKEND, cpu_engine
from radix_pages_sglang.cpu_engine import arguments
from radix_pages_sglang.support import SUPPORTED_VERSIONS


class CommandError(Exception):
    """Something the user can put right, told in one line that says how. Any command may raise it."""


def serve(context: typer.Context) -> None:
    """Start an SGLang server with this cache: `sglang serve` with --radix-cache-backend radix_pages.

    MODEL and all other arguments go to `sglang serve` untouched; `sglang serve --help` lists them. The server
    takes the place of this process, so signals and the exit status are the server's.

    Without a CUDA device the server runs on the CPU, where Llama-family models work. Flags that this needs are
    added unless given: --device, --attention-backend, --disable-overlap-schedule, --mem-fraction-static and
    --max-total-tokens. On a machine with a GPU, --device cpu asks for the same.

    Example: radix-pages serve MODEL --page-size 16 --max-total-tokens 65536
    """
    check_sglang()
    argv = with_backend(context.args)
    environment: Mapping[str, str] = os.environ
    if runs_on_cpu(argv):
        typer.echo("radix-pages: no CUDA device in use, running SGLang on the CPU", err=True)
        environment = cpu_engine.environment(environment, argv)
        argv = cpu_engine.server_arguments(argv)
    command = sglang_command(argv)
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def check_sglang() -> None:
    """Raise a CommandError unless a supported SGLang is installed and loads this package as a plugin."""
    install = f"pip install sglang=={SUPPORTED_VERSIONS[-1]}"
    found = installed_sglang()
    if found is None:
        raise CommandError(f"SGLang is not installed: {install}")
    if found.partition("+")[0] not in SUPPORTED_VERSIONS:
        raise CommandError(f"SGLang {found} is installed, which this release does not support: {install}")
    plugins = os.environ.get("SGLANG_PLUGINS", "")
    if plugins and BACKEND not in (name.strip() for name in plugins.split(",")):
        raise CommandError(f"SGLANG_PLUGINS={plugins} keeps this plugin out: add {BACKEND} or unset it")


def installed_sglang() -> str | None:
    """The version of the installed SGLang, or None."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def with_backend(argv: Sequence[str]) -> list[str]:
    """`argv` of `sglang serve` with this cache selected; a CommandError if it names no model or another cache."""
    if not arguments.has_model(argv):
        raise CommandError("which model? Give its path or name first, as in: radix-pages serve MODEL")
    selected = arguments.options(argv)
    if "radix-cache-backend" not in selected:
        return [*argv, f"--radix-cache-backend={BACKEND}"]
    if selected["radix-cache-backend"] == BACKEND:
        return list(argv)
    raise CommandError(
        f"--radix-cache-backend {selected['radix-cache-backend']} is another cache: "
        f"leave it out to use {BACKEND}, or run `sglang serve` instead"
    )


def runs_on_cpu(argv: Sequence[str]) -> bool:
    """Whether a server with these arguments needs the CPU engine: it was asked for, or there is nothing else."""
    device = arguments.options(argv).get("device")
    return cpu_engine.is_needed() if device is None else device == "cpu"


def sglang_command(argv: Sequence[str]) -> list[str]:
    """The command that runs `sglang serve` with `argv` in this Python, by full path.

    It is the installed script, because tools that look for servers look for "sglang serve" in a command line.
    """
    for file in importlib.metadata.files("sglang") or ():
        if file.name == "sglang" and file.parent.name == "bin":
            return [sys.executable, os.path.normpath(file.locate()), "serve", *argv]
    raise CommandError("SGLang is installed without its command `sglang`: reinstall it")
