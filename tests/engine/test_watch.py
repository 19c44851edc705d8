"""The page map in a browser, before a real server that moves pages and gives memory back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from radix_pages_sglang.cpu_engine.checkpoints import tiny_llama
from radix_pages_sglang.knobs import MAX_CACHED_TOKENS, NO_BOUND, TRIM
from radix_pages_sglang.local_server import Server, serving
from tests.engine.load import chatting, wait_until
from tests.engine.test_frames import STRICT, arguments, complaints, state
from tests.engine.test_return import set_knob
from tests.watch.browser import chromium
from tests.watch.served import watch_command
from tests.watch.states import mapped

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MOVE = {**STRICT, "RADIX_PAGES_MODE": "move", "RADIX_PAGES_IDLE_TRIM_SECONDS": "0", "RADIX_PAGES_FRAME_TOKENS": "128"}
FRAMES = 33
"""4,096 tokens and the padding page, 128 tokens a frame."""
SOON = 60_000
"""Milliseconds within which the page shows what happened, while server and browser share two cores."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(tiny_llama(), *arguments(16), "--sleep-on-idle", env=MOVE) as server:
        server.chat("warm up", max_tokens=4)
        yield server


@pytest.fixture(scope="module")
def page(server) -> Iterator[Page]:
    with watch_command("--url", server.url, "--interval", "0.2") as (_, address), chromium() as browser:
        page = browser.new_page()
        page.goto(address)
        expect(page.locator("#pulse")).to_have_class("live", timeout=SOON)
        yield page


def emptied(server: Server) -> None:
    """Nothing is cached and all memory but frame 0's is returned."""
    set_knob(server, MAX_CACHED_TOKENS, 0)
    set_knob(server, MAX_CACHED_TOKENS, NO_BOUND)
    set_knob(server, TRIM, 1)


def unpacked(runs: str) -> list[int]:
    """The numbers that `page_map.runs` tells."""
    pairs = (run.partition("*") for run in runs.split())
    return [int(number) for number, _, times in pairs for _ in range(int(times or 1))]


def test_the_pretended_states_of_the_fast_tests_say_nothing_that_a_server_does_not(server):
    server.chat("something to share a prefix with", max_tokens=4)
    server.chat("something else", max_tokens=4)
    real, pretended = state(server), mapped()
    assert set(pretended) <= set(real)
    assert set(pretended["frame_holders"]) == set(real["frame_holders"])
    assert set(pretended["shared_prefixes"]) == set(real["shared_prefixes"])
    assert set(pretended["shared_prefixes"]["largest"][0]) == set(real["shared_prefixes"]["largest"][0])
    assert real["page_bytes"] * real["pages_per_frame"] == real["memory"]["frame_bytes"]


def test_the_map_fills_with_a_chat_load_and_a_trim_empties_it(server, page):
    emptied(server)
    expect(page.locator(".grid .returned")).to_have_count(FRAMES - 1, timeout=SOON)
    assert page.locator(".grid i").count() == FRAMES
    with chatting(server, 32):
        expect(page.locator(".grid .requests").first).to_be_visible(timeout=SOON)
    expect(page.locator(".grid .requests")).to_have_count(0, timeout=SOON)
    cached = state(server)["held_frames"]
    assert cached > FRAMES // 2
    expect(page.locator(".grid .cache, .grid .padding")).to_have_count(cached, timeout=SOON)
    assert page.locator("#prefixes tbody tr").count() > 1
    expect(page.locator("#hit-chart svg")).to_have_attribute("aria-label", re.compile(r"hit rate \d"), timeout=SOON)
    emptied(server)
    expect(page.locator(".grid .returned")).to_have_count(FRAMES - 1, timeout=SOON)
    frame = state(server)["memory"]["frame_bytes"]
    expect(page.locator(".tile strong").first).to_have_text(f"{frame // 1024} KiB", timeout=SOON)


def test_what_no_running_request_uses_is_just_what_can_be_evicted(server):
    """Rows tell who uses which pages, and the tree counts what is locked; under load the two agree at every look."""

    looks: list[dict] = []

    def is_busy() -> bool:
        """Requests that run have been seen, more than a few at once."""
        looks.append(state(server))
        return looks[-1]["running_requests"] > 4 and sum(unpacked(looks[-1]["frame_holders"]["requests"])) > 50

    with chatting(server, 24):
        wait_until(is_busy)
        for _ in range(10):
            looks.append(state(server))
    for look in [*looks, state(server)]:
        requests, cache = (sum(unpacked(look["frame_holders"][name])) for name in ("requests", "cache"))
        assert requests + cache == look["held_pages"]
        assert cache * 16 == look["cached_tokens"]


def test_hits_are_counted_as_sglang_counts_them(server):
    prompt = [1_000 + place for place in range(100)]
    for expected in (0, 96):
        before = state(server)
        found = server.generate(prompt, 1)["meta_info"]["cached_tokens"]
        after = state(server)
        assert after["hit_tokens"] - before["hit_tokens"] == found == expected
        assert after["computed_tokens"] - before["computed_tokens"] == 100 - expected


def test_after_all_that_no_check_has_complained(server):
    assert complaints(server) == []
