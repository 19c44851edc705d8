"""The command `radix-pages watch`: the memory of a running server as a live web page on this machine."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from typing import Annotated

import typer

from radix_pages_sglang.client import Client, UnreachableError
from radix_pages_sglang.ctl import DEFAULT_URL, ApiKey, Url
from radix_pages_sglang.watch.page_server import PageServer
from radix_pages_sglang.watch.recorder import Recorder

DEFAULT_PORT = 30080


def watch(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where the page is, on this machine; 0 is a free port.")
    ] = DEFAULT_PORT,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the server.")] = 1.0,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Show the memory of a running server as a web page: frames, sizes over time, hit rate, shared prefixes.

    The page is on 127.0.0.1 alone and needs no other host. The server is asked once an interval, with or without a
    browser, and its last 3,600 answers are remembered. Goes on when the server goes away; ctrl-c ends it.
    """
    server = Client(url, api_key, timeout_seconds=max(interval, 10.0))
    try:
        server.states()
    except UnreachableError as error:
        typer.echo(f"{error}; the page shows when that changes", err=True)
    recorder = Recorder(server, interval)
    with PageServer(recorder, port) as page:
        typer.echo(f"{page.url} shows {url}; ctrl-c ends it")
        recorder.start()
        if show:
            webbrowser.open(page.url)
        with suppress(KeyboardInterrupt):
            page.serve_forever()
        recorder.stop()
