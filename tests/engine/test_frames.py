"""Real servers whose frames are 1, 4, 64 and 128 pages, under load and eviction with SGLang's strictest checks on.

SGLang counts its pool after every step and looks through the allocator's free list; at idle our recount runs too, and
whatever any of them finds ends the server. That the look through the free list bites is shown by planting a page in
it twice.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import URLError

import pytest

from radix_pages_sglang.counts import STATE_KEY
from radix_pages_sglang.cpu_engine.checkpoints import TINY_LLAMA, tiny_llama
from radix_pages_sglang.local_server import Server, serving
from tests.engine.load import chat_load
from tests.engine.test_absent import plugin

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
POOL_TOKENS = 4096
SLOT_BYTES = 2 * TINY_LLAMA["num_hidden_layers"] * TINY_LLAMA["num_key_value_heads"] * TINY_LLAMA["head_dim"] * 4
COMPLAINT = re.compile(
    r"[Ll]eak|double free|use-after-free|Traceback|AssertionError|LedgerError|disagree|held by nobody"
)


@dataclass(frozen=True)
class Frames:
    """A server's choice: page size in slots and pages in a frame."""

    page_size: int
    pages: int

    @property
    def tokens(self) -> int:
        return self.page_size * self.pages

    def __str__(self) -> str:
        return f"{self.pages} pages of {self.page_size}"


@dataclass(frozen=True)
class Loaded:
    """A server that has been under load, its frames, and its state before."""

    server: Server
    frames: Frames
    fresh: dict


def arguments(page_size: int) -> tuple[str, ...]:
    return (
        *("--load-format", "dummy", "--dtype", "float32", "--page-size", str(page_size)),
        *("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "16", "--chunked-prefill-size", "256"),
        "--enable-metrics",
    )


def state(server: Server) -> dict:
    return json.loads(server.request("/server_info"))["internal_states"][0][STATE_KEY]


def complaints(server: Server) -> list[str]:
    """Lines of the log in which SGLang, or we, found something wrong."""
    return [line for line in server.log_text().splitlines() if "server_args=" not in line and COMPLAINT.search(line)]


PLANT = """
import os

import torch


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "radix_pages_sglang.allocator.FrameAware.get_all_free_pages"
    HookRegistry.register(target, plant, HookType.AFTER)


def plant(free, allocator):
    if not os.path.exists(os.environ["PLANT_A_PAGE_TWICE"]):
        return free
    assert type(allocator).__module__ == "radix_pages_sglang.allocator"
    return torch.cat((free, free[:1]))
"""


def test_a_page_that_is_in_the_free_list_twice_is_what_sglangs_check_bites_on(tmp_path):
    """The server is healthy until the page is planted; then the next step of a running request ends it."""
    planted = tmp_path / "now"
    environment = {**STRICT, **plugin(tmp_path, "double_free_plant", PLANT), "PLANT_A_PAGE_TWICE": str(planted)}
    with serving(tiny_llama(), *arguments(16), env=environment) as server:
        assert server.generate("one two three", max_tokens=8)["text"]
        assert complaints(server) == []
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.generate, "go on " * 20, 2000, ignore_eos=True)
            planted.touch()
            deadline = time.monotonic() + 60
            while "KV double free" not in server.log_text() and time.monotonic() < deadline:
                time.sleep(0.2)
            with pytest.raises((URLError, ConnectionError, HTTPException)):  # it ends with the server
                running.result()
        assert "KV double free: sub-pool 0 has 1 duplicate pages" in server.log_text()


@pytest.fixture(scope="module", params=[Frames(16, 1), Frames(1, 4), Frames(16, 64), Frames(1, 128)], ids=str)
def loaded(request) -> Iterator[Loaded]:
    frames = request.param
    environment = {**STRICT, "RADIX_PAGES_FRAME_TOKENS": str(frames.tokens), "RADIX_PAGES_MODE": "place"}
    with serving(tiny_llama(), *arguments(frames.page_size), env=environment) as server:
        server.chat("warm up", max_tokens=4)
        fresh = state(server)
        replies = chat_load(server, talks=32)
        assert [len(turns) for turns in replies] == [4] * 32
        yield Loaded(server, frames, fresh)


def test_neither_sglangs_checks_nor_ours_complain(loaded):
    """After the load the server is idle: SGLang's sums and our recount have been through."""
    loaded.server.request("/flush_cache?timeout=60", {})
    time.sleep(1)
    assert complaints(loaded.server) == []
    assert loaded.server.process.poll() is None
    assert loaded.server.generate("still there?", max_tokens=4)["text"]


def test_the_load_evicted_and_every_eviction_took_what_was_asked(loaded):
    counts = state(loaded.server)
    assert counts["evictions"] > 50
    assert counts["evicted_tokens"] == counts["asked_page_rounded"] - counts["unmet_tokens"]
    assert counts["asked_page_rounded"] - counts["asked_tokens"] < counts["evictions"] * loaded.frames.page_size
    assert counts["pages_reclaimed"] * loaded.frames.page_size == counts["evicted_tokens"]


def test_the_state_accounts_for_every_page_and_frame(loaded):
    frames, num_pages = loaded.frames, POOL_TOKENS // loaded.frames.page_size
    num_frames = math.ceil((num_pages + 1) / frames.pages)
    for now in (loaded.fresh, state(loaded.server)):
        assert (now["page_size"], now["pages_per_frame"]) == (frames.page_size, frames.pages)
        assert now["held_pages"] + now["stranded_pages"] + now["empty_pages"] == num_pages
        assert now["held_frames"] + now["empty_frames"] == num_frames
        assert now["packed_floor"] == math.ceil(now["held_pages"] / frames.pages) <= now["held_frames"]
        assert sum(now["frames_by_occupancy"].values()) == num_frames - 1
        assert now["frames_by_occupancy"]["empty"] == now["empty_frames"]
        assert now["frames_emptied"] <= now["frames_refilled"]


def test_frames_were_emptied_and_filled_again(loaded):
    """With 64 and 128 pages in a frame a small pool has few of them; they need not come free."""
    after = state(loaded.server)
    assert after["frames_refilled"] > loaded.fresh["frames_refilled"]
    if loaded.frames.pages <= 4:
        assert after["frames_emptied"] > loaded.fresh["frames_emptied"]


def test_the_start_up_log_states_tokens_pages_and_bytes_of_a_frame(loaded):
    frames = loaded.frames
    said = [line for line in loaded.server.log_text().splitlines() if "radix_pages: a frame is" in line]
    assert len(said) == 1
    assert f"{frames.pages} pages of {frames.page_size} tokens: {frames.tokens} tokens" in said[0]
    assert f"{frames.tokens * SLOT_BYTES} bytes over {2 * TINY_LLAMA['num_hidden_layers']} buffers" in said[0]
    assert "mode place, placement pack, backing none" in said[0]


METRICS = (
    "reclaimed_pages_total",
    "emptied_frames_total",
    "asked_tokens_total",
    "evicted_tokens_per_reclaimed_page",
    "held_pages",
    "stranded_pages",
    "empty_pages",
    "packed_floor_frames",
    "frames",
    "evicted_page_age_seconds_count",
    "evicted_page_idle_seconds_count",
    "evicted_page_reuse_count",
)


def samples(metrics: str, name: str) -> dict[str, float]:
    """The values of one metric by their labels, as text."""
    found = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", metrics, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def test_metrics_stand_beside_sglangs_own_with_the_same_rank_labels(loaded):
    metrics = loaded.server.request("/metrics")
    theirs = next(iter(samples(metrics, "sglang:evicted_tokens_total")))
    for name in METRICS:
        ours = samples(metrics, f"radix_pages:{name}")
        assert ours, name
        for labels in ours:
            assert set(theirs.split(",")) <= set(labels.split(",")), name
    assert 'tp_rank="0"' in theirs


def test_metrics_say_what_the_state_says(loaded):
    metrics, now = loaded.server.request("/metrics"), state(loaded.server)
    assert sum(samples(metrics, "sglang:evicted_tokens_total").values()) == now["evicted_tokens"]
    assert sum(samples(metrics, "radix_pages:reclaimed_pages_total").values()) == now["pages_reclaimed"]
    assert sum(samples(metrics, "radix_pages:asked_tokens_total").values()) == now["asked_tokens"]
    pages = [sum(samples(metrics, f"radix_pages:{kind}_pages").values()) for kind in ("held", "stranded", "empty")]
    assert sum(pages) == POOL_TOKENS // loaded.frames.page_size
    per_page = sum(samples(metrics, "radix_pages:evicted_tokens_per_reclaimed_page").values())
    assert per_page == pytest.approx(loaded.frames.page_size)
