"""`radix-pages top`: pictures drawn from states, and how it lives through a server that goes away."""

import io

import pytest
from rich.console import Console
from rich.live import Live
from typer.testing import CliRunner

from radix_pages_sglang import cli, top
from radix_pages_sglang.client import Client, UnreachableError
from radix_pages_sglang.top import Poll, picture
from tests.client.fake_server import FRAME_BYTES, FakeServer, listening, observing, returning


def drawn(now, before=None, seconds=1.0, ascii_only=False, color_system=None):
    """What a terminal 100 characters wide shows for the states `now`, `seconds` after `before`."""
    console = Console(
        file=io.StringIO(), width=100, color_system=color_system, force_terminal=color_system is not None
    )
    console.print(picture(Poll(now, seconds), before and Poll(before, 0.0), ascii_only))
    return console.file.getvalue()


def line(text, label):
    """The line of a picture that begins with `label`, without its frame."""
    return next(row for row in (row.strip("│ ") for row in text.splitlines()) if row.startswith(label))


def test_a_picture_has_a_bar_for_each_size_and_the_map_of_frames():
    shown = drawn([returning()])
    assert "rank 0: mode return (highest return)" in shown
    assert line(shown, "resident").endswith("5.50 MiB of 8 MiB")
    assert line(shown, "committed").endswith("6 MiB")
    assert line(shown, "ceiling").endswith("off")
    assert line(shown, "returned ").endswith("2 MiB, 2 frames")
    assert line(shown, "held frames").endswith("5, packed floor 3")
    assert line(shown, "pages").endswith("12 held, 7 stranded, 12 empty")
    assert line(shown, "reclaimed") == "reclaimed: 6 pages"
    assert line(shown, "▂▂▄▆█░··") == "▂▂▄▆█░··"
    assert line(shown, "1 frame a sign").startswith("1 frame a sign:  · returned  ░ empty")


def test_bars_are_as_long_as_what_they_stand_for():
    state = returning()
    state["knobs"]["radix_pages_max_resident_bytes"]["value"] = 4 * FRAME_BYTES
    shown = drawn([state])
    for label, eighths in (("committed", 6), ("ceiling", 4), ("returned ", 2), ("held frames", 5)):
        assert line(shown, label).count("━") == top.BAR_WIDTH * eighths // 8, label


def test_what_is_cached_is_held_against_the_cap():
    state = returning()
    assert line(drawn([state]), "cached").endswith("62 tokens, cap off")
    assert line(drawn([state]), "cached").count("━") == top.BAR_WIDTH // 8
    state["knobs"]["radix_pages_max_cached_tokens"]["value"] = 124
    assert line(drawn([state]), "cached").endswith("62 tokens, cap 124 tokens")
    assert line(drawn([state]), "cached").count("━") == top.BAR_WIDTH // 2


def test_the_rate_is_the_difference_of_two_looks():
    before, now = returning(), returning() | {"pages_reclaimed": 36}
    assert line(drawn([now], [before], seconds=2.0), "reclaimed") == "reclaimed: 36 pages, 15.0 a second"


def test_a_server_that_started_anew_has_no_rate():
    before, now = returning() | {"pages_reclaimed": 36}, returning()
    assert line(drawn([now, now], [before]), "reclaimed") == "reclaimed: 6 pages"


def test_a_degraded_rank_is_red_and_says_why():
    state = returning() | {"degraded": "the recount of frame 3 failed"}
    assert line(drawn([state]), "degraded") == "degraded: the recount of frame 3 failed"
    assert "\x1b[1;31mdegraded: the recount" in drawn([state], color_system="standard")


def test_trouble_is_red_and_its_absence_is_not():
    state = returning()
    assert "\x1b[1;31m" not in drawn([state], color_system="standard")
    state["memory"] |= {"commit_failures": 2, "over_ceiling_frames": 1}
    shown = drawn([state], color_system="standard")
    assert "\x1b[1;31mcommit failures: 2" in shown
    assert "\x1b[1;31mframes over the ceiling: 1" in shown


def test_a_rank_without_a_backing_has_no_sizes():
    shown = drawn([observing()])
    assert "no backing: no memory is returned" in shown
    assert "resident" not in shown
    assert line(shown, "packed floor").endswith(" 3")


def test_a_rank_whose_ledger_cannot_be_read_says_so():
    state = {key: value for key, value in returning().items() if not key.endswith(("_pages", "_frames", "_map"))}
    shown = drawn([state | {"ledger_error": "page 17 is held twice"}])
    assert line(shown, "page 17") == "page 17 is held twice"
    assert "held frames" not in shown


def test_a_long_map_folds_and_loses_nothing():
    state = returning()
    state["frame_map"] = {"frames_per_cell": 32, "cells": "#" * 500}
    shown = drawn([state])
    assert shown.count("█") == 501  # and one in the legend
    assert "32 frames a sign:" in shown


def test_a_terminal_without_unicode_gets_the_servers_own_signs():
    shown = drawn([returning()], ascii_only=True)
    assert line(shown, "1123#.--") == "1123#.--"
    assert "█" not in shown


def test_every_sign_of_the_map_is_drawn_differently():
    assert len({cell.glyph for cell in top.CELLS.values()}) == len(top.CELLS) == 7


def run(*argv):
    return CliRunner().invoke(cli.app, ["top", *argv])


def test_once_prints_one_picture_of_every_rank_and_ends():
    with listening(FakeServer(returning(), observing())) as server:
        result = run("--url", server.url, "--once")
    assert result.exit_code == 0
    assert "rank 0: mode return" in result.stdout
    assert "rank 1: mode observe" in result.stdout


def test_once_of_a_server_that_is_gone_ends_with_one_line():
    with listening(FakeServer(returning())) as server:
        pass
    result = run("--url", server.url, "--once")
    assert result.exit_code == 2
    assert result.stderr.startswith("radix-pages: no server answers")


def test_without_a_terminal_it_says_what_to_do_instead():
    result = run()
    assert result.exit_code == 2
    assert result.stderr == "radix-pages: top draws on a terminal: use top --once, or ctl status --json\n"


class Finished(BaseException):
    """Raised when a test has seen enough."""


def test_a_server_that_goes_away_is_waited_for(monkeypatch):
    """Three looks: there, gone, there again; the last picture stays while the server is gone."""
    looks = iter([[returning()], UnreachableError("no server answers"), [returning()]])

    def states(_):
        look = next(looks, None)
        if look is None:
            raise Finished
        if isinstance(look, UnreachableError):
            raise look
        return look

    pictures = []
    monkeypatch.setattr(Client, "states", states)
    monkeypatch.setattr(Live, "update", lambda _, drawing, refresh: pictures.append(drawing))
    monkeypatch.setattr(top.time, "sleep", lambda _: None)
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with pytest.raises(Finished):
        top.watch(Client("http://127.0.0.1:1"), console, 1.0)
    shown = []
    for drawing in pictures:
        page = Console(file=io.StringIO(), width=100)
        page.print(drawing)
        shown.append(page.file.getvalue())
    assert ["trying again" in text for text in shown] == [False, True, False]
    assert all("resident" in text for text in shown)
