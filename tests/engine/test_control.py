"""`radix-pages ctl` and `radix-pages top` against a real server that may return memory, and what it exports."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from radix_pages_sglang import cli, client
from radix_pages_sglang.client import Client, State
from radix_pages_sglang.cpu_engine.checkpoints import tiny_llama
from radix_pages_sglang.ctl import once_trimmed
from radix_pages_sglang.local_server import Server, serving
from tests.client.exported import EXPORTED, LABELS, PREFIX, SGLANGS
from tests.client.fake_server import returning
from tests.engine.load import chat_load
from tests.engine.test_frames import POOL_TOKENS, STRICT, arguments, complaints

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ADMIN_KEY = "for changes only"
RETURNING = {"RADIX_PAGES_MODE": "return", "RADIX_PAGES_IDLE_TRIM_SECONDS": "0"}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Server]:
    """A server that returns memory only when told to, after more chat than its pool holds."""
    environment = {**STRICT, **RETURNING}
    with serving(tiny_llama(), *arguments(16), "--admin-api-key", ADMIN_KEY, env=environment) as server:
        chat_load(server, talks=32)
        yield server


@pytest.fixture
def server(loaded) -> Server:
    """The same server with mode and bounds as at its start."""
    for argv in (["mode", "return"], ["reserve", "0"], ["cap", "off"], ["ceiling", "off"], ["idle-trim", "0"]):
        said(loaded, *argv)
    return loaded


def ctl(server: Server, *argv: str, key: str = ADMIN_KEY):
    return CliRunner().invoke(cli.app, ["ctl", "--url", server.url, "--admin-api-key", key, *argv])


def said(server: Server, *argv: str) -> str:
    """What a command prints, after checking that it ends well."""
    result = ctl(server, *argv)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.strip()


def refused(server: Server, *argv: str, key: str = ADMIN_KEY) -> str:
    """The one line that a command ends with, after checking that it ends with status 2."""
    result = ctl(server, *argv, key=key)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    return result.stderr


def state(server: Server) -> State:
    return Client(server.url).states()[0]


def fill(server: Server) -> None:
    """Leave the cache full of conversations."""
    assert all(len(turns) == 4 for turns in chat_load(server, talks=16))


def test_the_state_has_all_that_the_commands_read(server):
    """The pretended server of the fast tests says nothing that a real one does not."""
    real, pretended = state(server), returning()
    assert set(pretended) <= set(real)
    assert set(pretended["memory"]) <= set(real["memory"])
    assert set(pretended["knobs"]) == set(real["knobs"])
    assert all(set(knob) == {"value", "minimum", "maximum"} for knob in real["knobs"].values())
    assert set(pretended["frame_map"]) == set(real["frame_map"])
    frames = real["held_frames"] + real["empty_frames"]
    assert len(real["frame_map"]["cells"]) == -(-frames // real["frame_map"]["frames_per_cell"])


def test_status_tells_mode_memory_and_bounds(server):
    shown = said(server, "status")
    for label in ("rank 0", "mode", "return", "resident", "committed", "ceiling", "packed floor"):
        assert label in shown


def test_a_cap_of_nothing_empties_the_cache_and_the_next_request_works(server):
    fill(server)
    assert state(server)["cached_tokens"] > 0
    assert said(server, "cap", "0") == "rank 0: cap 0 tokens (was off)"
    after = state(server)
    assert (after["cached_tokens"], after["held_pages"]) == (0, 0)
    assert after["knobs"][client.CACHED]["value"] == 0
    assert server.generate("still there?", max_tokens=4)["text"]
    assert said(server, "cap", "off") == "rank 0: cap off (was 0 tokens)"


def test_a_cap_holds_under_load(server):
    said(server, "cap", "1024")
    fill(server)
    assert 0 < state(server)["cached_tokens"] <= 1024


def test_a_trim_reports_what_came_free_and_the_frames_come_back(server):
    said(server, "cap", "0")
    said(server, "trim")
    said(server, "reserve", "20")
    server.generate("have the reserve committed", max_tokens=4)
    said(server, "reserve", "0")
    before = state(server)["memory"]
    line = said(server, "trim")
    after = state(server)["memory"]
    frames = after["returned_frames_total"] - before["returned_frames_total"]
    assert frames > 0
    assert line.startswith(f"rank 0: returned {frames} frame")
    assert after["committed_frames"] + after["returned_frames"] == after["total_bytes"] // after["frame_bytes"]
    said(server, "cap", "off")
    fill(server)
    assert state(server)["memory"]["returned_frames"] < after["returned_frames"]


def test_a_ceiling_holds_under_a_load_that_wants_more(server):
    total = state(server)["memory"]["total_bytes"]
    assert said(server, "ceiling", str(total // 2)).startswith("rank 0: ceiling ")
    fill(server)
    memory = state(server)["memory"]
    assert memory["resident_bytes"] <= memory["committed_bytes"] <= total // 2
    assert memory["over_ceiling_frames"] == 0
    assert said(server, "ceiling", "off").startswith("rank 0: ceiling off (was ")


def test_a_mode_can_be_lowered_and_raised_again(server):
    assert said(server, "mode", "observe") == "rank 0: mode observe (was return)"
    assert "in mode observe nothing is returned" in refused(server, "trim")
    assert server.generate("still there?", max_tokens=4)["text"]
    assert said(server, "mode", "return") == "rank 0: mode return (was observe)"


def test_idle_memory_is_returned_when_told_to(server, monkeypatch):
    said(server, "cap", "0")
    server.generate("the last for now", max_tokens=4)
    before = state(server)
    assert said(server, "idle-trim", "0.5") == "rank 0: idle trim 0.5 seconds (was 0 (never))"
    monkeypatch.setattr("radix_pages_sglang.ctl.TRIM_SECONDS", 30.0)
    (after,) = once_trimmed(Client(server.url), [before])
    assert after["memory"]["returned_frames"] > before["memory"]["returned_frames"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["cap", str(POOL_TOKENS + 1)],
            f"{POOL_TOKENS + 1:,} tokens is out of range: 0 tokens to {POOL_TOKENS:,} tokens",
        ),
        (["cap", "-2"], "out of range"),
        (["ceiling", "0"], "out of range"),
        (["ceiling", "64TiB"], "64 TiB is out of range"),
        (["reserve", "100000"], "100,000 frames is out of range"),
        (["idle-trim", "-1"], "out of range"),
    ],
)
def test_what_is_out_of_range_never_reaches_the_server(server, argv, says):
    logged = server.log_text().count("/set_internal_state")
    assert says in refused(server, *argv)
    assert server.log_text().count("/set_internal_state") == logged


def test_a_value_that_only_the_server_refuses_changes_nothing_and_is_logged_with_its_range(server, monkeypatch):
    monkeypatch.setattr(client, "check_value", lambda *_: None)
    line = refused(server, "cap", str(POOL_TOKENS + 1))
    assert f"the server refused radix_pages_max_cached_tokens = {POOL_TOKENS + 1} (rank 0)" in line
    assert state(server)["knobs"][client.CACHED]["value"] == client.NO_BOUND
    assert re.search(rf"radix_pages_max_cached_tokens.*\b{POOL_TOKENS}\b", server.log_text())


def test_changes_take_the_admin_key_and_reading_takes_none(server):
    assert "does not accept this key (401)" in refused(server, "cap", "5", key="wrong")
    assert "asks for a key (401)" in refused(server, "cap", "5", key="")
    assert state(server)["knobs"][client.CACHED]["value"] == client.NO_BOUND
    assert ctl(server, "status", key="").exit_code == 0


def test_top_draws_one_picture(server):
    result = CliRunner().invoke(cli.app, ["top", "--url", server.url, "--once"])
    assert result.exit_code == 0
    for label in (
        "rank 0: mode return (highest return)",
        "resident",
        "ceiling",
        "packed floor",
        "commit failures: 0",
    ):
        assert label in result.stdout


def exported(server: Server) -> dict[str, set[str]]:
    """The samples on /metrics and the labels that each carries."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([\w:]+)(?:\{(.*)\})? \S+$", server.request("/metrics"), re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_every_metric_that_dashboard_and_alerts_may_name_is_exported_and_no_other(server):
    found = exported(server)
    ours = {name for name in found if name.startswith(PREFIX)}
    assert ours == EXPORTED - set(SGLANGS)
    assert set(SGLANGS) <= set(found)
    assert set().union(*(found[name] for name in ours)) == LABELS


def test_metrics_say_what_the_state_says(server):
    said(server, "cap", "0")
    said(server, "trim")
    memory = state(server)["memory"]
    for sample, value in (
        ("returned_frames_now", memory["returned_frames"]),
        ("returned_bytes_total", memory["returned_bytes_total"]),
        ("committed_bytes", memory["committed_bytes"]),
        ("trim_seconds_count", memory["trims"]),
        ("commit_failures_total", 0),
        ("degraded", 0),
        ("mode", 2),
    ):
        found = re.findall(rf"^{PREFIX}{sample}(?:\{{.*\}})? (\S+)$", server.request("/metrics"), re.MULTILINE)
        assert [float(number) for number in found] == [value], sample


def test_after_all_that_neither_sglangs_checks_nor_ours_complain(server):
    assert complaints(server) == []
    assert state(server)["degraded"] == ""
