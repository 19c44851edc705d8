"""The two sides: servers with this cache and with SGLang's own, what they count and what memory they occupy."""

from __future__ import annotations

import json
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from radix_pages_sglang import local_server
from radix_pages_sglang.counts import COUNT_STOCK, STATE_KEY, EvictionCounts
from radix_pages_sglang.cpu_engine import checkpoints
from radix_pages_sglang.resident import process_resident_bytes, resident_bytes
from radix_pages_sglang.serve import CommandError

OURS, STOCK = "ours", "stock"

TINY, SMOLLM2 = "tiny", "smollm2"
"""Models by name: random weights, and SmolLM2-135M-Instruct."""

COUNTED = (*(field.name for field in fields(EvictionCounts)), "frames_emptied", "capped_tokens")
MEMORY_COUNTED = ("returned_frames_total", "returned_bytes_total", "moved_pages")

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True, slots=True)
class Servers:
    """How both servers are started: `arguments` of `sglang serve` and `settings` in the environment.

    Settings of this cache are among them; stock's server takes no notice of those.

    `port` is ours', stock's is the next one; 0 finds free ones.
    """

    model: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, str]
    port: int = 0


@dataclass(frozen=True, slots=True)
class Side:
    """A running server. `pid` is its scheduler if it runs on this host and was started here.

    `region` is where its KV mapping is, if it has one, and `page_bytes` what a page takes in it, where known.
    """

    name: str
    url: str
    pid: int | None = None
    region: tuple[int, int] | None = None
    page_bytes: int | None = None

    def flush(self) -> None:
        """Empty the cache, once no request is left."""
        ask(self.url, "/flush_cache?timeout=60", {})

    def counts(self) -> dict[str, float]:
        """Running totals over all ranks; empty on a server that does not count."""
        totals: dict[str, float] = {}
        for state in states(self.url):
            counted = {key: state[key] for key in COUNTED if key in state}
            memory = state.get("memory") or {}
            counted |= {key: memory[key] for key in MEMORY_COUNTED if key in memory}
            for key, value in counted.items():
                totals[key] = totals.get(key, 0) + value
        return totals


def ask(url: str, path: str, body: Any = None) -> str:
    """What the server at `url` answers to a GET, or to a POST of `body`. Raises CommandError in one line."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"{url} needs http:// or https:// in front")
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url + path, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=120) as response:
            text: str = response.read().decode()
            return text
    except HTTPError as error:
        why = "it asks for a key, and this experiment has none" if error.code in (401, 403) else "is it SGLang's?"
        raise CommandError(f"{url} answers {error.code} to {path}: {why}") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise CommandError(f"no server answers at {url} ({reason}): start one, or leave the address out") from error
    except ValueError as error:
        raise CommandError(f"{url} is no address of a server ({error}): give one as in http://host:30000") from error


def states(url: str) -> list[dict[str, Any]]:
    """Our entry in each rank's state, empty for a rank without one. Raises CommandError if this is not SGLang."""
    try:
        ranks = json.loads(ask(url, "/server_info"))["internal_states"]
        return [rank.get(STATE_KEY) or {} for rank in ranks]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"{url} answers, but not as an SGLang server: it has no internal_states") from error


def running(url: str, stock_url: str | None) -> dict[str, Side]:
    """The servers that run at these addresses already, stock's only where its address is given.

    One alone may be either kind. Raises CommandError if it is not SGLang or not of the kind asked for.
    """
    url = url.rstrip("/")
    is_ours = all("knobs" in state for state in states(url))
    if stock_url is None:
        name = OURS if is_ours else STOCK
        return {name: _at(name, url)}
    if not is_ours:
        raise CommandError(
            f"the server at {url} does not run this cache: start it with --radix-cache-backend radix_pages"
        )
    stock_url = stock_url.rstrip("/")
    if any("knobs" in state for state in states(stock_url)):
        raise CommandError(f"the server at {stock_url} runs this cache, not stock's: start it without the flag")
    return {OURS: _at(OURS, url), STOCK: _at(STOCK, stock_url)}


def _at(name: str, url: str) -> Side:
    return Side(name, url, page_bytes=states(url)[0].get("page_bytes"))


@contextmanager
def started(servers: Servers) -> Iterator[dict[str, Side]]:
    """Both servers, started side by side and stopped at the end. Raises CommandError if one does not start."""
    ports = _ports(servers.port)
    with tempfile.TemporaryDirectory(prefix="radix-pages-chat-") as folder:
        starts = [partial(_start, name, servers, port, Path(folder)) for name, port in ports.items()]
        with local_server.serving_together(starts) as both:
            yield {name: _side(name, server) for name, server in zip(ports, both, strict=True)}


def _start(name: str, servers: Servers, port: int, folder: Path) -> local_server.Server:
    try:
        return local_server.start(
            servers.model,
            *servers.arguments,
            log=folder / f"{name}.log",
            env={**servers.settings, COUNT_STOCK: "1"},
            backend="radix_pages" if name == OURS else None,
            port=port,
        )
    except local_server.ServerError as error:
        whose = "this cache's server" if name == OURS else "stock's server"
        raise CommandError(f"{whose} did not start: {_reason(str(error))}") from error


def _side(name: str, server: local_server.Server) -> Side:
    state = states(server.url)[0]
    memory = state.get("memory") or {}
    return Side(
        name,
        server.url,
        pid=server.scheduler_pid,
        region=tuple(memory["region"]) if "region" in memory else None,
        page_bytes=state.get("page_bytes"),
    )


def _ports(port: int) -> dict[str, int]:
    """A port for each side."""
    if port:
        return {OURS: port, STOCK: port + 1}
    return {OURS: local_server.free_port(), STOCK: local_server.free_port()}


def check_ports(port: int) -> None:
    """Raise CommandError if one of the two ports from `port` on is taken."""
    for wanted in (port, port + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError as error:
                raise CommandError(f"port {wanted} is in use: leave --port out, or give another") from error


_REASON = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*$", re.MULTILINE)


def _reason(message: str) -> str:
    """The line of a server's log that says why it ended: its last error, else its last line."""
    errors = _REASON.findall(message)
    return (errors or message.strip().splitlines())[-1]


def model_of(name: str) -> tuple[Path, tuple[str, ...]]:
    """The folder of a model and what a server needs to load it: `tiny`, `smollm2` or a folder with weights.

    Raises CommandError if it cannot be loaded.
    """
    try:
        if name == TINY:
            return checkpoints.tiny_llama(), ("--load-format", "dummy", "--dtype", "float32")
        if name == SMOLLM2:
            return checkpoints.smollm2_checkpoint(), ("--dtype", "float32")
    except checkpoints.CheckpointError as error:
        raise CommandError(f"--model {name}: {error}") from error
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise CommandError(f"--model {name} is no folder with a config.json: give one, or tiny, or smollm2")
    if not any(next(folder.glob(kind), None) for kind in WEIGHTS):
        raise CommandError(
            f"--model {name} has no weights ({', '.join(WEIGHTS)}): copy them there, or give tiny or smollm2"
        )
    return folder, ()


@dataclass(frozen=True, slots=True)
class Sample:
    """What a server occupied at one moment: its scheduler's anonymous memory, and of it the KV mapping."""

    side: str
    seconds: float
    process_bytes: int
    kv_bytes: int | None


@contextmanager
def memory_watched(sides: Mapping[str, Side], every_seconds: float = 1.0) -> Iterator[list[Sample]]:
    """A list that grows by a sample of each side a second, read in /proc; seconds count from now."""
    samples: list[Sample] = []
    begun = time.monotonic()

    def look() -> None:
        for side in sides.values():
            if side.pid is None:
                continue
            try:
                kv = None if side.region is None else resident_bytes(*side.region, pid=side.pid)
                sample = Sample(side.name, time.monotonic() - begun, process_resident_bytes(side.pid), kv)
            except (FileNotFoundError, ProcessLookupError, TypeError):  # the server ended: its burst will say so
                continue
            samples.append(sample)

    with local_server.repeating(look, every_seconds):
        yield samples
