"""The sweep: every policy and pool size of a trace, a row each. Imports torch and SGLang."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from radix_pages.ledger import Ledger
from radix_pages.units import Geometry
from radix_pages_sglang.experiments import cores
from radix_pages_sglang.experiments.prefix_sharing.replay import (
    CacheServer,
    FarthestServer,
    LastingCountServer,
    Work,
)
from radix_pages_sglang.experiments.prefix_sharing.running import Peak, serve
from radix_pages_sglang.experiments.prefix_sharing.spool import Spool

FARTHEST = "farthest-next-use"
LASTING_LFU = "lfu with lasting counts"
BOUND, MODEL = "bound", "model"

SHARES = (0.01, 0.05, 0.1)
USUAL_TOKENS = 3_000_000
"""Pool sizes by default: these shares of a trace's distinct blocks, and the blocks of so many tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """One replay to make: `core` is a name of `cores.CLASSES`, BOUND or MODEL."""

    blocks: int
    policy: str
    core: str
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class Row:
    """What a replay found, None where nothing was; the documented keys are these names.

    Frames are those at the trace's end, frame 0 with the padding page included; `reclaimed_frames` counts how often
    a frame was left empty. `evicted_per_asked` is blocks evicted over blocks that allocations lacked.
    """

    trace: str
    blocks: int
    policy: str
    core: str
    ms_per_token: float
    hit_rate: float | None
    frames_held: int | None
    reclaimed_frames: int | None
    evicted_per_asked: float | None
    evicted_blocks: int | None
    evictions: int | None
    eviction_seconds: float | None
    seconds: float | None
    infeasible: bool
    note: str


def default_sizes(spool: Spool) -> list[int]:
    """Pool sizes, in blocks, at which a trace has to evict."""
    usual = Geometry(spool.block_tokens).pages_to_hold(USUAL_TOKENS)
    shares = [int(share * spool.num_distinct) for share in SHARES]
    return sorted({max(size, 1) for size in (*shares, usual) if size < spool.num_distinct}) or [1]


def cases(
    sizes: Sequence[int], policies: Sequence[str], core_names: Sequence[str], ms_per_token: float
) -> Iterator[Case]:
    """All replays with one duration: every policy through every core, then the bound."""
    for blocks in sizes:
        for policy in policies:
            for core in core_names:
                yield Case(blocks, policy, core, ms_per_token)
            if policy == "lfu":
                yield Case(blocks, LASTING_LFU, MODEL, ms_per_token)
        yield Case(blocks, FARTHEST, BOUND, ms_per_token)


def row_of(name: str, spool: Spool, case: Case, frame_blocks: int, peak: Peak, progress: Callable[[], None]) -> Row:
    """Make one replay of the trace called `name`; `progress` hears of every request."""
    head = (name, case.blocks, case.policy, case.core, case.ms_per_token)
    if case.blocks < peak.all:
        for _ in range(len(spool)):
            progress()
        note = f"running requests need {peak.all} blocks at once"
        return Row(*head, None, None, None, None, None, None, None, None, infeasible=True, note=note)
    gc.collect()
    start = time.perf_counter()
    server, ledger = _server(case, frame_blocks)
    for _ in serve(spool, server, case.ms_per_token):
        progress()
    seconds = time.perf_counter() - start
    hit_rate, work = server.work.hits / spool.num_asked, server.work
    if ledger is None:
        return Row(*head, hit_rate, None, None, None, None, None, None, seconds, infeasible=False, note="")
    return Row(
        *head,
        hit_rate,
        ledger.num_held_frames,
        ledger.frames_emptied,
        _per_asked(work),
        work.evicted,
        work.evictions,
        work.eviction_seconds,
        seconds,
        infeasible=False,
        note="",
    )


def _server(case: Case, frame_blocks: int) -> tuple[CacheServer | FarthestServer, Ledger | None]:
    if case.core == BOUND:
        return FarthestServer(case.blocks), None
    if case.core == MODEL:
        return LastingCountServer(case.blocks), None
    cache = cores.framed_cache(case.core, case.blocks, frame_blocks, case.policy)
    return CacheServer(cache), cache.token_to_kv_pool_allocator.ledger()


def _per_asked(work: Work) -> float | None:
    return work.evicted / work.lacking if work.lacking else None
