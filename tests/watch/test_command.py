"""`radix-pages watch` as a user starts and ends it."""

from __future__ import annotations

import signal
import socket
from urllib.request import urlopen

from typer.testing import CliRunner

from radix_pages_sglang import cli
from tests.client.fake_server import FakeServer, listening
from tests.watch.served import watch_command
from tests.watch.states import mapped


def run(*argv: str):
    return CliRunner().invoke(cli.app, ["watch", *argv])


def refusal(*argv: str) -> str:
    """The line that the command ends with, after checking that it is one and that the status is 2."""
    result = run(*argv)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    return result.stderr


def test_a_port_in_use_ends_it_with_one_line():
    with listening(FakeServer(mapped())) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"port {port} is in use" in refusal("--url", server.url, "--port", port)


def test_a_server_that_is_not_sglang_ends_it_with_one_line():
    with listening(FakeServer(mapped())) as server:
        server.answer = (200, "hello")
        assert "does not answer as an SGLang server" in refusal("--url", server.url, "--port", "0")


def test_a_server_with_another_cache_ends_it_with_one_line():
    with listening(FakeServer({})) as server:
        assert "start it with --radix-cache-backend radix_pages" in refusal("--url", server.url, "--port", "0")


def test_a_wrong_key_ends_it_with_one_line():
    with listening(FakeServer(mapped())) as server:
        server.key = "secret"
        assert "does not accept this key (401)" in refusal("--url", server.url, "--port", "0", "--api-key", "wrong")


def test_ctrl_c_ends_it_without_a_word_and_a_server_that_is_not_there_yet_is_waited_for():
    gone = "http://127.0.0.1:1"
    with watch_command("--url", gone) as (process, page):
        with urlopen(page, timeout=10) as answer:
            assert b"radix-pages" in answer.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors.startswith(f"no server answers at {gone}")
    assert errors.count("\n") == 1
