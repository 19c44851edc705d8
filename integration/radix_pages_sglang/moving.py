"""Moving cached pages so that whole frames come free: frame plans, carried out in slices between batches.

Only unlocked nodes move. No request reads them: waiting and retracted requests hold no rows, a running one locks what
it reads, and slots are taken off a path only after it was locked. On a CPU no forward is under way between batches.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import move_kv_cache_native

from radix_pages.backing import CommitError
from radix_pages.frame_planner import FrameNeed, FramePlan, plan_frames
from radix_pages.reclaim import Moves, relocated
from radix_pages_sglang import convert

if TYPE_CHECKING:
    from radix_pages.ledger import Pages
    from radix_pages.node import Node
    from radix_pages.placement import Placement
    from radix_pages.residency import Residency
    from radix_pages.units import Geometry
    from radix_pages_sglang.cache import RadixPagesCache

_MORE_THAN_CACHES = 64 << 20

MOST_REPLANS = 8
"""So often in a row a plan may be overtaken by what requests do before the need is dropped."""


class PoolMover:
    """`radix_pages.reclaim.Mover` for a pool of key and value buffers with a row a slot."""

    def __init__(self, kvcache, geometry: Geometry) -> None:
        self._kvcache = kvcache
        self._geometry = geometry

    def pages_of(self, nodes: Sequence[Node]) -> Pages:
        slots = torch.cat([node.payload for node in nodes])
        return self._geometry.page_of(convert.host_array(slots)[:: self._geometry.page_size])

    def copy(self, sources: Pages, targets: Pages) -> None:
        with _one_thread():
            move_kv_cache_native(
                self._kvcache.k_buffer, self._kvcache.v_buffer, self._slots(targets), self._slots(sources)
            )

    def repointed(self, payload: torch.Tensor, sources: Pages, targets: Pages) -> torch.Tensor:
        pages = self._geometry.page_of(convert.cpu_array(payload)[:: self._geometry.page_size])
        return self._slots(relocated(pages, sources, targets))

    def _slots(self, pages: Pages) -> torch.Tensor:
        return torch.from_numpy(self._geometry.slots_of(pages))


@contextmanager
def _one_thread() -> Iterator[None]:
    """A slice has hundreds of copies too small to share: waking sleeping threads for each made 1 page cost 10 ms."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@dataclass(slots=True)
class MovingCounts:
    """Totals since start. A plan is void when what it was made for changed before its last slice."""

    plans: int = 0
    void_plans: int = 0
    moved_pages: int = 0
    plan_seconds: float = 0.0
    move_seconds: float = 0.0


class Reclaimer:
    """Meets one need for frames at a time, a slice of moves a step.

    `moves_per_slice` is the budget in pages: measured once, at start, and the least of all ranks'. `same` raises
    when a number is not the same on every rank (RADIX_PAGES_CHECK_RANKS=1), and does nothing otherwise.
    """

    def __init__(
        self,
        cache: RadixPagesCache,
        mover: PoolMover,
        placement: Callable[[], Placement],
        moves_per_slice: int,
        same: Callable[[int], None],
    ) -> None:
        self._cache = cache
        self._mover = mover
        self._placement = placement
        self._same = same
        self.moves_per_slice = moves_per_slice
        self.counts = MovingCounts()
        self._need: FrameNeed | None = None
        self._moves: Moves | None = None
        self._replans = 0
        self.fell_short = False

    @property
    def is_working(self) -> bool:
        return self._need is not None

    def aim(self, need: FrameNeed) -> None:
        """Work on `need` from now on, in place of what was worked on before."""
        self._need, self._moves, self._replans = need, None, 0

    def drop(self) -> None:
        """Work on nothing any more; what has moved stays where it is."""
        self._need = self._moves = None

    def step(self) -> bool:
        """Plan, or move a slice; whether the need is met as far as it can be, or was dropped."""
        if self._need is None:
            return True
        start = time.perf_counter()
        if self._moves is None:
            self._moves = self._begin(self._need)
            self.counts.plan_seconds += time.perf_counter() - start
        else:
            self.counts.moved_pages += self._moves.step(self.moves_per_slice)
            self.counts.move_seconds += time.perf_counter() - start
        return self._moves.is_done and self._ends(self._moves.is_stale)

    def _ends(self, is_void: bool) -> bool:
        """The plan is carried out or void: whether the work on its need ends with it."""
        self._moves = None
        if is_void:
            self.counts.void_plans += 1
            self._replans += 1
        if is_void and self._replans <= MOST_REPLANS:
            return False
        self.fell_short |= is_void
        self._need = None
        return True

    def _begin(self, need: FrameNeed) -> Moves:
        """Make a plan and carry out its evictions."""
        core, placement = self._cache.tree_core, self._placement()
        plan = plan_frames(core.leaves, placement.ledger, need, self._mover.pages_of)
        self._same(digest(plan))
        self.fell_short = plan.shortfall_frames > 0
        self._cache.evict_planned(plan)
        self.counts.plans += 1
        return Moves(core.tree, placement, self._mover, plan)


def digest(plan: FramePlan) -> int:
    """A number that is the same for the same plan, on every rank."""
    parts: list[Any] = [
        plan.sources,
        plan.targets,
        plan.frames,
        np.array([(eviction.leaf.id, eviction.span.start) for eviction in plan.evictions], dtype=np.int64),
    ]
    hashed = hashlib.blake2b(b"".join(part.astype(np.int64).tobytes() + b"|" for part in parts), digest_size=7)
    return int.from_bytes(hashed.digest(), "big")


def moves_in(mover: PoolMover, num_pages: int, pool_bytes: int, seconds: float) -> int:
    """How many pages one call can copy in that time, at least one.

    Tried on the `num_pages` pages of frame 0, which always has memory, before anything is stored there. Caches are as
    cold as a pool of `pool_bytes` leaves them, since that is how a slice finds its pages; the second slowest try
    counts: a server under load copies at half the speed of an idle one, and one hiccup must not size it for good.
    """
    count = min(max(num_pages // 2, 1), 8)
    sources = np.arange(count)
    targets = np.minimum(sources + count, num_pages - 1)
    others = np.zeros(min(pool_bytes, _MORE_THAN_CACHES), dtype=np.uint8)
    times = []
    for _ in range(12):
        others += 1
        start = time.perf_counter()
        mover.copy(sources, targets)
        times.append(time.perf_counter() - start)
    return max(int(seconds * count / sorted(times[1:])[-2]), 1)


def returns_in(residency: Residency, seconds: float) -> int:
    """How many frames can be given back in that time, at least one.

    Tried on a frame that nobody has used, if there is one and it can be had; the second slowest try counts, as in
    `moves_in`.
    """
    unused = np.flatnonzero(residency.ledger.is_returned)[:1]
    if not len(unused):
        return 1
    times = []
    for _ in range(4):
        try:
            residency.backing.commit(unused)
        except CommitError:
            return 1
        start = time.perf_counter()
        residency.backing.decommit(unused)
        times.append(time.perf_counter() - start)
    return max(int(seconds / sorted(times)[-2]), 1)
