"""Runs a real SGLang server on this host, for the demo, the experiments and the tests, and leaves none behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from radix_pages_sglang import cpu_engine
from radix_pages_sglang.resident import process_resident_bytes
from radix_pages_sglang.serve import runs_on_cpu, sglang_command

READY_SECONDS = 300.0
"""How long a start may take: 30 s alone on two cores, several times that beside other work."""

STOP_SECONDS = 60.0
"""How long a server may take to end once told to."""


class ServerError(Exception):
    """A server did not start or did not stop; the message ends with its log."""


@dataclass(frozen=True)
class Server:
    """A running server: `pid` is also the id of its process group, `url` has no slash at its end."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        """All that the server has written so far, standard output and error together."""
        return self.log.read_text(errors="replace")

    def request(self, path: str, body: Any = None, timeout_seconds: float = 120.0) -> str:
        """The text that `path` answers to a GET, or to a POST of `body` as JSON. Raises HTTPError from 400 up."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=timeout_seconds) as response:
            return response.read().decode()

    def generate(self, prompt: str | list[int], max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
        """SGLang's own answer to `prompt`, text or token ids, at temperature 0; `fields` are sampling parameters."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, **fields}
        key = "text" if isinstance(prompt, str) else "input_ids"
        return json.loads(self.request("/generate", {key: prompt, "sampling_params": sampling}))

    def chat(self, messages: str | list[dict[str, str]], max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
        """The chat completion for `messages`, at temperature 0. A text stands for one message of a user."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": "default", "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}
        return json.loads(self.request("/v1/chat/completions", body))

    def stream_chat(self, messages: list[dict[str, str]], max_tokens: int) -> tuple[float, str, dict[str, Any]]:
        """A chat completion at temperature 0, streamed: seconds to the first token, the text, SGLang's usage."""
        body = {"model": "default", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        request = Request(
            self.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        start, first, text, usage = time.perf_counter(), 0.0, [], {}
        with urlopen(request, timeout=600) as response:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = first or time.perf_counter() - start
                        text.append(piece)
        return first, "".join(text), usage

    @property
    def scheduler_pid(self) -> int:
        """Its process that holds most anonymous memory: weights and KV are the scheduler's."""
        return max(self.processes(), key=process_resident_bytes)

    def processes(self) -> list[int]:
        """The ids of all processes of the server that have not ended."""
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if group_of(entry) == self.pid]


def group_of(process: Path) -> int | None:
    """The process group of a process's folder in /proc, or None if it has ended."""
    try:
        stat = (process / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, _, group = stat.rpartition(") ")[2].split()[:3]  # the name before the bracket may hold spaces
    return None if state == "Z" else int(group)


def reply(completion: dict[str, Any]) -> str:
    """The text of a chat completion's first choice."""
    return completion["choices"][0]["message"]["content"]


@contextmanager
def repeating(act: Callable[[], object], every_seconds: float) -> Iterator[None]:
    """Call `act` again and again beside the block, first after `every_seconds`; the last call is waited for."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_seconds):
            act()

    thread = threading.Thread(target=repeat, name="radix-pages-repeating")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def serving_together(starts: Sequence[Callable[[], Server]]) -> Iterator[list[Server]]:
    """Servers that start side by side, one by each of `starts`; all are stopped at the end, whatever happens.

    Raises what a start raises.
    """
    with ThreadPoolExecutor(len(starts)) as pool:
        starting = [pool.submit(start) for start in starts]
        try:
            yield [one.result() for one in starting]
        finally:
            for one in starting:
                if one.exception() is None:
                    stop(one.result())


@contextmanager
def serving(
    model: Path | str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    backend: str | None = "radix_pages",
    port: int = 0,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[Server]:
    """A server for `model` on this host, ready for requests; stopped at the end, whatever happens.

    As `start`, with a log that goes away with the server.
    """
    with tempfile.TemporaryDirectory(prefix="radix-pages-server-") as folder:
        log = Path(folder) / "server.log"
        server = start(model, *arguments, log=log, env=env, backend=backend, port=port, ready_seconds=ready_seconds)
        try:
            yield server
        finally:
            stop(server)


def start(
    model: Path | str,
    *arguments: str,
    log: Path,
    env: Mapping[str, str] | None = None,
    backend: str | None = "radix_pages",
    port: int = 0,
    ready_seconds: float = READY_SECONDS,
) -> Server:
    """Start a server for `model` in a process group of its own and return once it answers; the caller stops it.

    `arguments` are those of `sglang serve` and `env` is added to this process's environment. The backend
    `radix_pages` is started by `radix-pages serve`; None is stock SGLang with the same set-up. Port 0 finds a free
    one. Raises ServerError, with the server stopped.
    """
    port = port or free_port()
    argv = [str(model), "--host", "127.0.0.1", "--port", str(port), *arguments]
    command, environment = launch(argv, {**os.environ, **(env or {})}, backend)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_ready(server, ready_seconds)
    except BaseException:  # KeyboardInterrupt too
        stop(server)
        raise
    return server


def launch(argv: list[str], environment: dict[str, str], backend: str | None) -> tuple[list[str], dict[str, str]]:
    """The command and environment that serve `argv` with `backend`."""
    if backend is not None:
        script = Path(sys.executable).with_name("radix-pages")
        return [str(script), "serve", *argv, "--radix-cache-backend", backend], environment
    if runs_on_cpu(argv):
        environment, argv = cpu_engine.environment(environment, argv), cpu_engine.server_arguments(argv)
    return sglang_command(argv), environment


def wait_until_ready(server: Server, seconds: float) -> None:
    """Return once the server answers requests, which it does only after a first one of its own."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerError(f"the server ended with status {server.process.returncode}\n{log_tail(server)}")
        try:
            server.request("/health", timeout_seconds=10.0)
            return
        except (URLError, TimeoutError, ConnectionError):  # not listening yet, or 503 while it loads
            time.sleep(0.2)
    raise ServerError(f"the server was not ready after {seconds:.0f} s\n{log_tail(server)}")


def stop(server: Server) -> None:
    """End every process of the server: asked first, so that it can clean up, then by force."""
    if server.process.poll() is None:
        server.process.terminate()
    try:
        wait_until_gone(server, STOP_SECONDS)
    except BaseException:  # KeyboardInterrupt too
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.process.wait()
        raise


def wait_until_gone(server: Server, seconds: float) -> None:
    """Return once no process of the server is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.process.poll() is not None and not server.processes():
            return
        time.sleep(0.1)
    raise ServerError(f"processes {server.processes()} ran on for {seconds:.0f} s\n{log_tail(server)}")


def log_tail(server: Server, lines: int = 40) -> str:
    """The last lines of the server's log."""
    return "\n".join(server.log_text().splitlines()[-lines:])


def free_port() -> int:
    """A port of this host that nothing listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
