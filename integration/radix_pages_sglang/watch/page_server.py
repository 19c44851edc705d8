"""Serves the page and its data to browsers on this machine, and to nobody else."""

from __future__ import annotations

import errno
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from radix_pages_sglang.serve import CommandError
from radix_pages_sglang.watch.recorder import Recorder

HOST = "127.0.0.1"

FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{
        f"/{name}": (name, "text/javascript")
        for name in ("page.js", "frames.js", "charts.js", "figures.js", "dom.js")
    },
}
"""What the page consists of, and its types."""

HEADERS = {
    # Nothing from elsewhere, nothing inline: even a string that got past all escaping could not run.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer):
    """Answers on 127.0.0.1 with the page and with what `recorder` knows. Port 0 is a free one."""

    daemon_threads = True

    def __init__(self, recorder: Recorder, port: int) -> None:
        self.recorder = recorder
        self.files = {
            path: (resources.files(__package__).joinpath(name).read_bytes(), kind)
            for path, (name, kind) in FILES.items()
        }
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise CommandError(
                    f"port {port} is in use: choose another with --port, or --port 0 for a free one"
                ) from error
            raise CommandError(f"cannot listen on port {port}: {error}; choose another with --port") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """GET of the page's files and of /state?after=N."""

    server: PageServer

    def do_GET(self) -> None:
        # A page from elsewhere whose name was made to lead to this address sends its own name here.
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self._answer(403, b"this page is for this machine alone\n", "text/plain")
            return
        address = urlsplit(self.path)
        if address.path == "/state":
            self._answer_state(parse_qs(address.query).get("after", ["0"])[0])
        elif address.path in self.server.files:
            self._answer(200, *self.server.files[address.path])
        else:
            self._answer(404, b"not found\n", "text/plain")

    def _answer_state(self, after: str) -> None:
        if not after.isdecimal():
            self._answer(400, b"after takes the number of a sample\n", "text/plain")
            return
        self._answer(200, json.dumps(self.server.recorder.picture(int(after))).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: the page asks every second."""
