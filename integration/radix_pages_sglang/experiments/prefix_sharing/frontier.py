"""What a cap on cached blocks returns, and what it costs: our cache, with moves and without, frame by frame.

A pool whose memory can be returned serves a trace and keeps at most so many cached blocks that no request uses
(RADIX_PAGES_MAX_CACHED_TOKENS): always, or in every other of 24 turns of the trace, in between without a cap. While
the cap holds, the memory of empty frames is returned every tenth of a turn, and committed again as it is needed. Only
the memory is imaginary: placement, plans, moves and residency are the product's. Imports torch and SGLang.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from radix_pages.frame_planner import CachedPages, plan_frames
from radix_pages.reclaim import Moves
from radix_pages_sglang.experiments import cores
from radix_pages_sglang.experiments.no_memory import NoMemory
from radix_pages_sglang.experiments.prefix_sharing.replay import CacheServer
from radix_pages_sglang.experiments.prefix_sharing.running import serve
from radix_pages_sglang.experiments.prefix_sharing.spool import Spool

TURNS, TRIMS_A_TURN = 24, 10
WARM_UP = 0.25
"""Share of the trace before memory is measured: pools fill up first."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How pages are placed, and whether a trim moves them before it returns what is empty."""

    name: str
    placement: str
    moves: bool


RULES = (
    Rule("SGLang's order", "stock", moves=False),
    Rule("placed", "pack", moves=False),
    Rule("placed, moved", "pack", moves=True),
)


@dataclass(frozen=True, slots=True)
class Pool:
    """What is served: blocks of the pool, blocks of a frame, and for how long a token of an answer runs."""

    blocks: int
    frame_blocks: int
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class Point:
    """`returned` are means over requests of the measured part while the cap holds; shares are of all frames.

    `returned_share_after_trims` is a mean over its trims, and so is `floor_share`: what would be out then if all that
    is held were packed. `moved` counts the blocks of all trims.
    """

    hit_rate: float
    returned_frames: float
    returned_share: float
    returned_share_after_trims: float
    floor_share: float
    moved: int
    trims: int
    seconds: float


class Lender:
    """A cache of ours that keeps a cap while it is told to and returns the memory of empty frames."""

    def __init__(self, pool: Pool, rule: Rule) -> None:
        cache = cores.framed_cache("ours", pool.blocks, pool.frame_blocks, placement=rule.placement)
        self.server = CacheServer(cache)
        self.cache = cache
        # Only now: a cache that finds a residency would watch the system's counts of it on a thread.
        cache.token_to_kv_pool_allocator.back_with(NoMemory(), starts_returned=True)
        self.residency = cache.token_to_kv_pool_allocator.residency
        self.moves = rule.moves
        self.mover = cores.NoContents()

    def keep_cap(self, num_blocks: int) -> None:
        """Evict the cached blocks that no request uses beyond so many."""
        surplus = self.cache.evictable_size() - num_blocks
        if surplus > 0:
            self.cache.evict_surplus(surplus)

    def trim(self) -> None:
        """Return the memory of empty frames, after moving what is cached into the fewest where the rule says so."""
        if self.moves:
            self._pack()
        self.residency.trim()

    def _pack(self) -> None:
        core, ledger = self.cache.tree_core, self.residency.ledger
        plan = plan_frames(core.leaves, ledger, CachedPages(ledger.num_pages), self.mover.pages_of)
        moves = Moves(core.tree, self.residency.placement, self.mover, plan)
        while not moves.is_done:
            moves.step(ledger.num_pages)
        if plan.evictions or moves.is_stale:
            raise RuntimeError("a plan to pack evicted something or was void although nothing else happened")

    def disagreements(self) -> list[str]:
        """What tree, ledger and residency contradict each other in."""
        return self.cache.tree_core.disagreements() + self.residency.disagreements()


def lend(spool: Spool, pool: Pool, cap: int, rule: Rule, *, by_turns: bool, progress=lambda: None) -> Point:
    """Serve the trace under a cap; raises RuntimeError if accounts do not agree at the end."""
    start = time.perf_counter()
    lender = Lender(pool, rule)
    ledger = lender.residency.ledger
    turn = max(len(spool) // TURNS, 1)
    every = max(turn // TRIMS_A_TURN, 1)
    returned, after_trims, floors, trims = [], [], [], 0
    for request in serve(spool, lender.server, pool.ms_per_token):
        progress()
        number = request.number
        if by_turns and number // turn % 2 == 0:
            continue
        lender.keep_cap(cap)
        is_trimmed = number % every == 0
        if is_trimmed:
            lender.trim()
            trims += 1
        if number >= WARM_UP * len(spool):
            returned.append(ledger.num_returned_frames)
            if is_trimmed:
                after_trims.append(ledger.num_returned_frames)
                # The padding page takes a place, too, in frame 0.
                floors.append(ledger.num_frames - ledger.geometry.frames_to_hold(ledger.num_held + 1))
    if found := lender.disagreements():
        raise RuntimeError("; ".join(found))
    return Point(
        lender.server.work.hits / spool.num_asked,
        _mean(returned),
        _mean(returned) / ledger.num_frames,
        _mean(after_trims) / ledger.num_frames,
        _mean(floors) / ledger.num_frames,
        lender.mover.num_moved,
        trims,
        time.perf_counter() - start,
    )


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
