"""`radix-pages ctl` against a pretended server: what it sends, what it says, and what it refuses unsent."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from radix_pages_sglang import cli, ctl
from tests.client.fake_server import FRAME_BYTES, FakeServer, listening, observing, returning


@pytest.fixture
def server():
    """A server with one rank in the mode that returns memory."""
    with listening(FakeServer(returning())) as fake:
        yield fake


def run(server, *argv, env=None):
    return CliRunner().invoke(cli.app, ["ctl", "--url", server.url, *argv], env=env)


def said(server, *argv):
    """The lines that a command prints, after checking that it ends well."""
    result = run(server, *argv)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


def refused(server, *argv):
    """The one line that a command ends with, after checking that it ends with status 2."""
    result = run(server, *argv)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    return result.stderr.strip().removeprefix("radix-pages: ")


@pytest.mark.parametrize(
    ("argv", "change", "line"),
    [
        (["cap", "0"], {"radix_pages_max_cached_tokens": 0}, "cap 0 tokens (was off)"),
        (["cap", "off"], {"radix_pages_max_cached_tokens": -1}, "cap off (was off)"),
        (["ceiling", "4MiB"], {"radix_pages_max_resident_bytes": 4 * FRAME_BYTES}, "ceiling 4 MiB (was off)"),
        (["ceiling", "5000000"], {"radix_pages_max_resident_bytes": 5_000_000}, "ceiling 4.77 MiB (5000000 bytes)"),
        (["ceiling", "OFF"], {"radix_pages_max_resident_bytes": -1}, "ceiling off (was off)"),
        (["reserve", "3"], {"radix_pages_reserve_frames": 3}, "reserve 3 frames (was 0 frames)"),
        (["idle-trim", "2.5"], {"radix_pages_idle_trim_seconds": 2.5}, "idle trim 2.5 seconds (was 0 (never))"),
        (["idle-trim", "60"], {"radix_pages_idle_trim_seconds": 60}, "idle trim 60 seconds"),
        (["mode", "place"], {"radix_pages_mode": 1}, "mode place (was return)"),
    ],
)
def test_a_change_is_sent_once_and_what_is_in_force_is_read_back(server, argv, change, line):
    lines = said(server, *argv)
    assert server.changes == [change]
    assert len(lines) == 1
    assert lines[0].startswith(f"rank 0: {line}")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["cap", "497"], "497 tokens is out of range: 0 tokens to 496 tokens, or off"),
        (["cap", "-5"], "-5 tokens is out of range: 0 tokens to 496 tokens, or off"),
        (["cap", "many"], "many is not a whole number of tokens, or off"),
        (["ceiling", "9MiB"], "9 MiB is out of range: 2 MiB to 8 MiB, or off"),
        (["ceiling", "1000000"], "976.56 KiB (1000000 bytes) is out of range: 2 MiB to 8 MiB, or off"),
        (["ceiling", "24G"], f"24G is not a size: {ctl.ACCEPTED}, or off"),
        (["reserve", "8"], "8 frames is out of range: 0 frames to 7 frames"),
        (["idle-trim", "-1"], "-1 seconds is out of range: 0 (never) to 86,400 seconds"),
        (["idle-trim", "nan"], "nan seconds is out of range: 0 (never) to 86,400 seconds"),
        (["idle-trim", "soon"], "soon is not a number of seconds"),
        (["mode", "evict"], "evict is not a mode: choose one of observe, place, return, move"),
    ],
)
def test_what_is_out_of_range_is_refused_unsent_with_the_range(server, argv, line):
    assert refused(server, *argv) == line
    assert server.changes == []


def test_a_mode_above_the_one_at_the_start_is_refused(server):
    server.states[0]["knobs"]["radix_pages_mode"]["maximum"] = 1
    line = "mode return is above the one this server started in, place"
    assert refused(server, "mode", "return") == line
    server.states[0]["degraded"] = "accounts did not agree"
    line = "this server only observes until it is started again: accounts did not agree"
    assert refused(server, "mode", "return") == line
    assert server.changes == []


@pytest.mark.parametrize("argv", [["trim"], ["ceiling", "4MiB"], ["reserve", "1"], ["idle-trim", "5"]])
def test_a_server_without_a_backing_is_told_the_setting_that_brings_one(server, argv):
    server.states[0] = observing()
    assert refused(server, *argv) == "this server has no backing: start it with RADIX_PAGES_MODE=return"
    server.states[0]["backing"] = "mmap"
    assert refused(server, *argv) == "this server only counts and places: start it with RADIX_PAGES_MODE=return"
    server.states[0]["degraded"] = "accounts did not agree"
    assert refused(server, *argv) == ("this server only observes until it is started again: accounts did not agree")
    assert server.changes == []


def test_a_trim_in_a_lower_mode_is_told_which_mode_it_takes(server):
    server.states[0]["mode"] = "place"
    line = "in mode place nothing is returned: radix-pages ctl mode return first"
    assert refused(server, "trim") == line
    assert server.changes == []


def test_a_knob_that_a_server_lacks_for_no_reason_we_know_is_named(server):
    del server.states[0]["knobs"]["radix_pages_max_cached_tokens"]
    assert refused(server, "cap", "5") == "this server does not offer radix_pages_max_cached_tokens"


def test_a_change_that_one_rank_refuses_names_the_rank(server):
    server.states.append(returning())
    server.refusing = {1}
    assert refused(server, "cap", "5") == (
        "the server refused radix_pages_max_cached_tokens = 5 (rank 1); its log says why"
    )


def test_a_value_must_be_in_the_range_of_every_rank(server):
    server.states.append(returning())
    server.states[1]["knobs"]["radix_pages_reserve_frames"]["maximum"] = 2
    assert refused(server, "reserve", "3") == "3 frames is out of range: 0 frames to 2 frames"


def test_a_trim_reports_what_every_rank_returned(server):
    server.states.append(returning())
    assert said(server, "trim") == [
        "rank 0: returned 1 frame, 1 MiB; resident now 4.50 MiB",
        "rank 1: returned 1 frame, 1 MiB; resident now 4.50 MiB",
    ]
    assert server.changes == [{"radix_pages_trim": 1}]


def test_a_trim_that_does_not_come_is_not_waited_for_long(server, monkeypatch):
    monkeypatch.setattr(ctl, "TRIM_SECONDS", 0.1)
    server.slow_trim = True
    assert "has not trimmed" in refused(server, "trim")


def test_status_shows_what_is_in_force(server):
    server.states[0] |= {"degraded": "the recount of frame 3 failed"}
    shown = "\n".join(said(server, "status"))
    for fact in ("rank 0", "the recount of frame 3 failed", "return", "5.50 MiB of 8 MiB", "2 MiB, 2 frames", "off"):
        assert fact in shown
    assert "62 tokens that no request uses" in shown
    assert "12 held, 7 stranded, 12 empty" in shown
    assert "5 held (packed floor 3), 3 empty" in shown


def test_status_of_a_server_that_only_observes_shows_no_memory(server):
    server.states[0] = observing()
    shown = "\n".join(said(server, "status"))
    assert "resident" not in shown
    assert "packed floor 3" in shown


def test_status_shows_a_ledger_that_cannot_be_read(server):
    server.states[0] = {key: value for key, value in observing().items() if not key.endswith(("_pages", "_frames"))}
    server.states[0]["ledger_error"] = "page 17 is held twice"
    assert "page 17 is held twice" in "\n".join(said(server, "status"))


def test_status_in_json_is_what_the_server_said(server):
    server.states.append(observing())
    assert json.loads("\n".join(said(server, "status", "--json"))) == server.states


def test_keys_are_sent_where_sglang_asks_for_them(server):
    server.key, server.admin_key = "reading", "changing"
    assert run(server, "--api-key", "reading", "--admin-api-key", "changing", "cap", "5").exit_code == 0
    keys = {"RADIX_PAGES_API_KEY": "reading", "RADIX_PAGES_ADMIN_API_KEY": "changing"}
    assert run(server, "cap", "6", env=keys).exit_code == 0
    assert [next(iter(change.values())) for change in server.changes] == [5, 6]


def test_one_key_is_enough_for_a_server_with_an_admin_key_alone(server):
    server.admin_key = "changing"
    assert said(server, "status")
    assert said(server, "--api-key", "changing", "cap", "5") == ["rank 0: cap 5 tokens (was off)"]
    assert "asks for a key (401): give the server's admin key" in refused(server, "cap", "6")


def test_a_wrong_key_is_told(server):
    server.key = "right"
    line = f"{server.url} does not accept this key (401): give the server's API key with --api-key"
    assert refused(server, "--api-key", "wrong", "status") == line
    assert "asks for a key" in refused(server, "status")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((403, ""), "asks for a key (403)"),
        ((404, ""), "answers 404 to /server_info: is this an SGLang server?"),
        ((500, ""), "cannot answer now (500 to /server_info)"),
        ((200, "hello"), "does not answer as an SGLang server"),
        ((200, "[]"), "has no internal_states"),
        ((200, '{"internal_states": []}'), "has no internal_states"),
        ((200, '{"internal_states": [{}]}'), "start it with --radix-cache-backend radix_pages"),
        ((200, '{"internal_states": [{"radix_pages": {"evictions": 3}}]}'), "runs SGLang's own cache or an older"),
        ((200, '{"internal_states": [{"radix_pages": {"ledger_error": "page 1 is held twice"}}]}'), "page 1 is held"),
    ],
)
def test_whoever_is_no_such_server_is_told_in_one_line(server, answer, says):
    server.answer = answer
    assert says in refused(server, "status")


def test_a_server_that_is_gone_is_told_in_one_line():
    with listening(FakeServer(returning())) as server:
        pass
    assert refused(server, "cap", "5").startswith(f"no server answers at {server.url}")


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://127.0.0.1", "http://127.0.0.1:port", "http://["])
def test_an_address_that_is_none_is_told_in_one_line(url):
    server = FakeServer()
    server.url = url
    assert refused(server, "status")


def test_help_loads_neither_torch_nor_sglang():
    code = (
        "import sys\n"
        "from radix_pages_sglang.cli import app\n"
        "try: app(['ctl', 'ceiling', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'sglang', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
