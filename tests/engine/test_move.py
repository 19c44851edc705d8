"""Servers that move cached pages so that whole frames come free: under load, on two ranks, and with a real model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import pytest

from radix_pages_sglang.control import CHECK_RANKS
from radix_pages_sglang.cpu_engine.checkpoints import smollm2_checkpoint, tiny_llama
from radix_pages_sglang.knobs import FREE_FRAMES, MAX_CACHED_TOKENS, NO_BOUND, TRIM
from radix_pages_sglang.local_server import Server, repeating, reply, serving
from radix_pages_sglang.resident import process_resident_bytes
from tests.engine.load import chat_load, chat_loads, wait_until
from tests.engine.test_absent import plugin
from tests.engine.test_frames import SLOT_BYTES, STRICT, arguments, complaints, state
from tests.engine.test_return import resident, set_knob

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MOVE = {**STRICT, "RADIX_PAGES_MODE": "move", "RADIX_PAGES_IDLE_TRIM_SECONDS": "0", "RADIX_PAGES_FRAME_TOKENS": "128"}


def trims_and_moves(server: Server) -> tuple[int, int]:
    memory = state(server)["memory"]
    return memory["trims"], memory["moved_pages"]


def trimmed(server: Server) -> None:
    """Trim once, and wait until that is done: moves go on in slices after the answer."""
    before, _ = trims_and_moves(server)
    set_knob(server, TRIM, 1)
    wait_until(lambda: trims_and_moves(server)[0] > before)


@contextmanager
def trimming_every_second(server: Server) -> Iterator[None]:
    """Meanwhile the cache is cut, packed and let grow again, and frames are kept for a neighbour and given up."""

    def trim() -> None:
        for name, value in ((MAX_CACHED_TOKENS, 1200), (MAX_CACHED_TOKENS, NO_BOUND), (TRIM, 1), (FREE_FRAMES, 12)):
            set_knob(server, name, value)

    def give_up() -> None:
        set_knob(server, FREE_FRAMES, 0)

    acts = cycle((trim, give_up))
    with repeating(lambda: next(acts)(), every_seconds=0.5):
        yield


@pytest.fixture(scope="module")
def moving() -> Iterator[Server]:
    with serving(tiny_llama(), *arguments(16), "--sleep-on-idle", env=MOVE) as server:
        yield server


def test_checks_stay_silent_with_trims_and_moves_every_second_under_load(moving):
    chat_load(moving, talks=8)
    trims, moved = trims_and_moves(moving)

    def is_enough() -> bool:
        now = trims_and_moves(moving)
        return now[0] > trims + 3 and now[1] > moved

    with trimming_every_second(moving):
        replies = chat_loads(moving, 24, until=is_enough)
    assert {len(turns) for turns in replies} == {4}
    assert complaints(moving) == []


def test_an_idle_server_comes_down_to_the_packed_floor(moving):
    set_knob(moving, FREE_FRAMES, 0)
    set_knob(moving, MAX_CACHED_TOKENS, NO_BOUND)
    chat_load(moving, talks=24)
    set_knob(moving, MAX_CACHED_TOKENS, 1_500)
    set_knob(moving, MAX_CACHED_TOKENS, NO_BOUND)
    trimmed(moving)
    now = state(moving)
    # The padding page takes a place of its own, so one frame more may be needed.
    floor = -(-(now["held_pages"] + 1) // now["pages_per_frame"])
    assert now["held_frames"] == now["memory"]["committed_frames"] == floor
    assert resident(moving) == now["memory"]["committed_bytes"]
    assert now["cached_tokens"] == 1_488
    assert complaints(moving) == []


def test_frames_kept_free_for_a_neighbour_are_free_again_after_the_load(moving):
    set_knob(moving, FREE_FRAMES, 16)
    chat_load(moving, talks=24)
    wait_until(lambda: state(moving)["memory"]["returned_frames"] >= 14)  # an eighth may lack
    assert state(moving)["cached_tokens"] > 1_000
    set_knob(moving, FREE_FRAMES, 0)
    assert complaints(moving) == []


SUBJECTS = ("the tides", "sourdough bread", "night trains", "how bats find their way")
TURNS = ("Tell me something about {}.", "What do people get wrong about it?", "Say that again in other words.")


def test_a_real_model_says_the_same_when_its_cache_moves_between_every_two_turns():
    """Turns go around the conversations, so that each one's cache has been moved before it is used again."""
    size = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "2048", "--sleep-on-idle")

    def conversations(server: Server, between) -> list[list[str]]:
        histories: list[list[dict[str, str]]] = [[] for _ in SUBJECTS]
        for question in TURNS:
            for subject, history in zip(SUBJECTS, histories, strict=True):
                history.append({"role": "user", "content": question.format(subject)})
                history.append({"role": "assistant", "content": reply(server.chat(history, 16))})
                between()
        return [[message["content"] for message in history] for history in histories]

    with serving(smollm2_checkpoint(), *size, env=STRICT, backend=None) as stock:
        expected = conversations(stock, lambda: None)
    scattered = {**MOVE, "RADIX_PAGES_PLACEMENT": "stock", "RADIX_PAGES_FRAME_TOKENS": "64"}
    with serving(smollm2_checkpoint(), *size, env=scattered) as ours:
        numbers = random.Random(0)

        def shake() -> None:
            """Something else is cached, as much is cut off what was used longest ago, and the holes are packed."""
            ours.generate([numbers.randrange(1_000, 40_000) for _ in range(95)], 1)
            set_knob(ours, MAX_CACHED_TOKENS, max(state(ours)["cached_tokens"] - 96, 400))
            set_knob(ours, MAX_CACHED_TOKENS, NO_BOUND)
            trimmed(ours)

        assert conversations(ours, shake) == expected
        trims, moved = trims_and_moves(ours)
        assert trims >= len(SUBJECTS) * len(TURNS)
        assert moved >= 10
        assert complaints(ours) == []


ON_ONE_RANK = """
import os


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("radix_pages_sglang.pool.MmapBacking.commit", commit, HookType.AROUND)
    HookRegistry.register("radix_pages_sglang.moving.digest", digest, HookType.AFTER)


def says(what):
    import torch

    told = os.environ["ON_ONE_RANK"]
    return torch.distributed.get_rank() == 1 and os.path.exists(told) and open(told).read() == what


calls = 0


def commit(original, backing, frames):
    from radix_pages.backing import CommitError

    global calls
    calls += 1
    if says("fail") and calls % 3 == 0:
        raise CommitError("no memory, says the test")
    return original(backing, frames)


def digest(number, plan):
    return number + 1 if says("differ") else number
"""


def test_two_ranks_stay_alike_and_a_difference_between_their_plans_stops_them(tmp_path):
    """A commit that fails on one rank fails on both, memory leaves both, and rank 0's idle trim is done by both."""
    told = tmp_path / "told"
    environment = {
        **{**MOVE, "RADIX_PAGES_IDLE_TRIM_SECONDS": "2", CHECK_RANKS: "1", "ON_ONE_RANK": str(told)},
        **plugin(tmp_path, "on_one_rank", ON_ONE_RANK),
        **{"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nonexistent"},
    }
    size = ("--max-total-tokens", "65536", "--tp", "2", "--sleep-on-idle")
    with serving(tiny_llama(), *arguments(16), *size, env=environment) as server:
        told.write_text("fail")
        with trimming_every_second(server):  # rank 0's account of what failed on rank 1
            chat_loads(server, 16, until=lambda: state(server)["memory"]["commit_failures"] > 0)
        told.write_text("")
        set_knob(server, MAX_CACHED_TOKENS, NO_BOUND)
        set_knob(server, FREE_FRAMES, 0)
        for first in range(24):
            server.generate([1000 + first] * 1500, 1)
        ranks = sorted(server.processes(), key=process_resident_bytes)[-2:]
        full = [process_resident_bytes(pid) for pid in ranks]
        held = state(server)["held_pages"] * 16 * SLOT_BYTES // 2  # each rank has half of the heads
        assert held > 4 << 20
        set_knob(server, MAX_CACHED_TOKENS, 1_000)
        set_knob(server, MAX_CACHED_TOKENS, NO_BOUND)
        trimmed(server)
        for pid, before in zip(ranks, full, strict=True):
            assert before - process_resident_bytes(pid) > 0.8 * held
        assert trims_and_moves(server)[1] > 0
        chat_load(server, talks=2)
        trims, _ = trims_and_moves(server)
        wait_until(lambda: trims_and_moves(server)[0] > trims)
        assert server.generate("still there?", 4)["text"]
        assert complaints(server) == []
        told.write_text("differ")
        set_knob(server, TRIM, 1)
        wait_until(lambda: "planned different moves" in server.log_text(), 60)
        wait_until(lambda: server.process.poll() is not None, 60)
