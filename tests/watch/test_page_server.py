"""Who may read the page, and what is served."""

from __future__ import annotations

import json
import re
import socket
from http.client import HTTPConnection, HTTPResponse
from importlib import resources

import pytest

from radix_pages_sglang.client import Client
from radix_pages_sglang.serve import CommandError
from radix_pages_sglang.watch import page_server
from radix_pages_sglang.watch.page_server import PageServer
from radix_pages_sglang.watch.recorder import Recorder
from tests.watch.served import watching

GONE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def page():
    with watching(GONE, interval=60) as page:
        yield page


def got(page: PageServer, path: str, host: str = "") -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", page.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{page.server_port}"})
    return connection.getresponse()


def test_it_listens_on_this_machine_alone(page):
    assert page.server_address[0] == "127.0.0.1"


def test_every_file_of_the_page_is_served_and_no_other(page):
    files = {entry.name for entry in resources.files(page_server.__package__).iterdir()}
    assert {name for name, _ in page_server.FILES.values()} == {
        name for name in files if name.endswith((".html", ".css", ".js"))
    }
    for path, (_, kind) in page_server.FILES.items():
        answer = got(page, path)
        assert (answer.status, answer.headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
    for path in ("/command.py", "/../command.py", "/%2e%2e/command.py", "/page.html"):
        assert got(page, path).status == 404


def test_the_page_names_no_other_host():
    for name, _ in page_server.FILES.values():
        text = resources.files(page_server.__package__).joinpath(name).read_text()
        named = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[\w./]*", text))
        assert named <= {"http://www.w3.org/2000/svg"}, name  # a namespace, which nobody fetches


def test_a_browser_is_told_to_load_and_run_nothing_but_the_pages_own_files(page):
    policy = got(page, "/").headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example"])
def test_a_name_from_elsewhere_that_leads_here_gets_nothing(page, host):
    assert got(page, "/state", host).status == 403


def test_localhost_is_this_machine(page):
    assert got(page, "/state", f"localhost:{page.server_port}").status == 200


def test_the_state_is_what_the_recorder_knows(page):
    told = json.load(got(page, "/state?after=0"))
    assert (told["server"], told["ranks"], told["samples"]) == (GONE, [], [])


@pytest.mark.parametrize("after", ["x", "-1", "1.5"])
def test_a_number_that_is_none_is_refused(page, after):
    assert got(page, f"/state?after={after}").status == 400


def test_a_port_in_use_is_refused_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CommandError) as refused:
            PageServer(Recorder(Client(GONE), 1.0), port)
    assert str(refused.value) == f"port {port} is in use: choose another with --port, or --port 0 for a free one"
