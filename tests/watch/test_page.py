"""The page in a browser, before a pretended server with two ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.client.fake_server import FakeServer, listening
from tests.watch.browser import chromium
from tests.watch.served import watching
from tests.watch.states import PREFIX, emptied, looking, mapped

SOON = 10_000
"""Milliseconds within which the page follows the server, on a busy machine."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with listening(FakeServer(mapped(), looking())) as server:
        yield server


@contextmanager
def shown(browser: Browser, server: FakeServer) -> Iterator[Page]:
    """The page, once it shows the server. Errors in its scripts fail the test."""
    errors: list[str] = []
    with watching(server.url) as served:
        page = browser.new_page()
        page.set_default_timeout(SOON)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(served.url)
        expect(page.locator("#pulse")).to_have_class("live", timeout=SOON)
        yield page
        page.close()
    assert errors == []


@pytest.fixture(scope="module")
def still(browser) -> Iterator[Page]:
    """A page whose server stays as it is."""
    with listening(FakeServer(mapped(), looking())) as server, shown(browser, server) as page:
        yield page


@pytest.fixture
def page(browser, server) -> Iterator[Page]:
    """A page whose server the test changes."""
    with shown(browser, server) as page:
        yield page


def squares(page: Page, rank: int) -> list[str]:
    return page.locator(".rank").nth(rank).locator(".grid i").evaluate_all("all => all.map(one => one.className)")


def tile(page: Page, name: str) -> str:
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).inner_text().replace("\n", " ")


def legend(page: Page) -> list[str]:
    return page.locator("#legend li").all_inner_texts()


def test_every_rank_has_a_map_of_its_frames(still):
    held = ["requests", "requests", "requests", "cache", "cache"]
    assert squares(still, 0) == [*held, "empty", "returned", "returned"]
    assert squares(still, 1) == [*held, "empty", "empty", "empty"]
    assert still.locator(".rank h3").all_inner_texts() == ["rank 0", "rank 1"]


def test_the_legend_counts_the_frames_of_all_ranks(still):
    assert legend(still) == [
        "held by running requests: 6 frames",
        "held by the cache alone: 4 frames",
        "empty, has memory: 4 frames",
        "returned to the system: 2 frames",
        "stranded, free in a held frame: 14 pages",
    ]


def test_the_tiles_add_up_the_ranks(still):
    assert tile(still, "Resident memory") == "Resident memory 5.50 MiB of 8 MiB; 6 MiB held"
    assert tile(still, "Returned now") == "Returned now 2 MiB 9 MiB in all, by 4 trims"
    assert tile(still, "Hit rate") == "Hit rate - last 30 s; 75.0% of 1,600 prompt tokens since start"
    assert tile(still, "Held frames") == "Held frames 10 packed floor 6, of 16"
    assert tile(still, "Requests") == "Requests 4 running, 2 waiting"


def test_one_rank_can_be_looked_at_alone(still):
    still.get_by_role("button", name="rank 1").click()
    assert still.locator(".rank").count() == 1
    assert tile(still, "Held memory") == "Held memory 3 MiB of 7.75 MiB; no backing: nothing is returned"
    assert legend(still)[2:4] == ["empty, has memory: 3 frames", "returned to the system: 0 frames"]
    still.get_by_role("button", name="all ranks").click()
    assert still.locator(".rank").count() == 2


def test_hovering_over_a_frame_tells_who_holds_it(still):
    def told(frame: int) -> str:
        still.locator(".rank").nth(0).locator(".grid i").nth(frame).hover()
        return " ".join(still.locator("#tip").inner_text().split())

    requests, cache, stranded = (
        "running requests 1 page, 256 KiB",
        "cache alone 2 pages, 512 KiB",
        "stranded 1 page, 256 KiB",
    )
    assert told(2) == f"frame 2, 1 MiB {requests} {cache} {stranded}"
    assert told(7) == "frame 7, 1 MiB returned to the system"
    assert told(5) == "frame 5, 1 MiB empty, has memory"
    assert told(0).endswith(f"{stranded} holds SGLang's padding page: never returned")  # three pages are for others


def test_a_frame_is_filled_as_far_as_it_is_held(still):
    frame = still.locator(".rank").nth(0).locator(".grid i").nth(2)
    assert frame.evaluate("one => one.style.getPropertyValue('--requests')") == "25%"
    assert frame.evaluate("one => one.style.getPropertyValue('--held')") == "75%"


def test_the_map_and_the_sizes_follow_the_server(page, server):
    server.states[0] = emptied()
    expect(page.locator(".rank").nth(0).locator(".returned")).to_have_count(7, timeout=SOON)
    assert squares(page, 0) == ["padding", *["returned"] * 7]
    assert tile(page, "Resident memory") == "Resident memory 1 MiB of 8 MiB; 3 MiB held"
    label = page.locator("#reclaim-chart svg")
    expect(label).to_have_attribute("aria-label", re.compile("returned to the system 5 MiB"), timeout=SOON)
    expect(page.locator("#prefixes tbody tr")).to_have_count(1, timeout=SOON)


def test_the_hit_rate_is_of_what_was_prefilled_meanwhile(page, server):
    """30 tokens hit and 10 computed on one rank, 60 computed on the other: 30%."""
    server.states[0] |= {"hit_tokens": 630, "computed_tokens": 210}
    server.states[1] |= {"computed_tokens": 260}
    expect(page.locator("#hit-chart svg")).to_have_attribute("aria-label", "hit rate 30.0%", timeout=SOON)
    assert tile(page, "Hit rate").startswith("Hit rate 30.0% last 30 s")


def test_a_server_that_starts_anew_takes_nothing_back(page, server):
    server.states[0] |= {"pages_reclaimed": 10}
    expect(page.locator("#reclaim-chart svg")).to_have_attribute(
        "aria-label", re.compile("evictions 1 MiB"), timeout=SOON
    )
    server.states[0] |= {"pages_reclaimed": 4}
    expect(page.locator("#reclaim-chart svg")).to_have_attribute(
        "aria-label", re.compile("evictions 2 MiB"), timeout=SOON
    )


def test_shared_prefixes_are_listed_the_best_first_with_their_rank(page, server):
    better = PREFIX | {"tokens": 1600, "spared_tokens": 1000, "locks": 0}
    server.states[1]["shared_prefixes"] = {"is_complete": False, "largest": [better]}
    rows = page.locator("#prefixes tbody tr")
    expect(rows.nth(0)).to_contain_text("1,600", timeout=SOON)
    assert rows.nth(0).locator("td").all_inner_texts() == ["1,600", "32", "3", "2", "1,000", "0", "9", "1"]
    assert rows.nth(1).locator("td").all_inner_texts()[-1] == "0"
    assert page.get_by_text("too large to see all of it").is_visible()


def test_a_server_that_goes_away_is_told_and_its_last_picture_stays(page, server):
    server.answer = (503, "{}")
    banner = page.locator("#banner")
    expect(banner).to_have_text(re.compile(r"No answer since \d\d:\d\d:\d\d \(\d+ s\): .*503.*; trying again\."))
    assert len(squares(page, 0)) == 8
    expect(page.locator("#pulse")).to_have_text("waiting")
    server.answer = None
    expect(banner).to_be_hidden(timeout=SOON)
    expect(page.locator("#pulse")).to_have_class("live", timeout=SOON)


def test_what_a_server_says_is_text_and_nothing_else(page, server):
    server.states[0]["degraded"] = "<img src=x onerror=\"document.title='run'\"><b>bold</b>"
    warning = page.locator("#warnings li").first
    expect(warning).to_contain_text("<img src=x", timeout=SOON)
    assert page.locator("#warnings img, #warnings b").count() == 0
    assert page.title() == "radix-pages watch"


def test_trouble_of_a_rank_is_told(page, server):
    server.states[0]["memory"]["ceiling_refusals"] = 3
    broken = {key: value for key, value in looking().items() if not key.endswith(("_pages", "_frames", "_holders"))}
    server.states[1] = broken | {"ledger_error": "page 17 is held twice"}
    expect(page.locator("#warnings li")).to_have_text(
        ["Rank 0: 3 times the ceiling kept frames from being committed.", "Rank 1: page 17 is held twice"],
        timeout=SOON,
    )
    assert squares(page, 1) == []
    assert page.locator(".rank").nth(1).locator(".note").inner_text() == "page 17 is held twice"


def test_of_many_frames_a_square_stands_for_several(page, server):
    state = mapped()
    holders = {"frames_per_cell": 3, "requests": "4 0*2", "cache": "2 7 0", "returned": "0*2 2"}
    server.states[0] = state | {"frame_holders": holders}
    expect(page.locator(".rank").nth(0).locator(".grid i")).to_have_count(3, timeout=SOON)
    assert squares(page, 0) == ["requests", "cache", "returned"]
    assert page.locator(".rank").nth(0).locator(".note").inner_text().startswith("A square is 3 frames.")
    page.locator(".rank").nth(0).locator(".grid i").nth(2).hover()
    assert page.locator("#tip").inner_text().startswith("frames 6 to 7, 2 MiB")


def test_a_page_whose_watch_has_ended_says_so(browser, server):
    with watching(server.url) as served:
        page = browser.new_page()
        page.goto(served.url)
        expect(page.locator("#pulse")).to_have_class("live", timeout=SOON)
    expect(page.locator("#banner")).to_contain_text("watch does not answer: has it ended?", timeout=SOON)
    page.close()
