"""A page that is served for a test."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from radix_pages_sglang.client import Client
from radix_pages_sglang.watch.page_server import PageServer
from radix_pages_sglang.watch.recorder import Recorder


@contextmanager
def watching(url: str, interval: float = 0.05, port: int = 0) -> Iterator[PageServer]:
    """A page about the server at `url`, looked at every `interval` seconds."""
    recorder = Recorder(Client(url), interval)
    with PageServer(recorder, port) as page:
        recorder.start()
        thread = threading.Thread(target=page.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield page
        finally:
            recorder.stop()
            page.shutdown()
            thread.join()


def _heed_ctrl_c() -> None:
    """A shell that runs the tests in the background lets them, and what they start, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def watch_command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`radix-pages watch` in a process of its own, and the address of its page; ended in any case."""
    command = [str(Path(sys.executable).with_name("radix-pages")), "watch", "--port", "0", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=_heed_ctrl_c) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().partition(" ")[0]
        finally:
            process.kill()
