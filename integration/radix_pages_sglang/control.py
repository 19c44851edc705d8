"""Mode, bounds and trims of one rank: what is kept, what is given back, and when.

Everything here happens between batches, on the scheduler's thread. Ranks stay alike: they make the same calls with
the same numbers, and what only one can know (whether memory could be had, what the system counts, how long nothing
came) is either agreed on or decided by rank 0. Clocks are otherwise read for reports only.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from radix_pages.frame_planner import CachedPages, FreeFrames, HeldFrames
from radix_pages_sglang import convert
from radix_pages_sglang.allocator import FrameAware, least_frames
from radix_pages_sglang.config import MOST_IDLE_TRIM_SECONDS
from radix_pages_sglang.knobs import (
    FREE_FRAMES,
    IDLE_TRIM_SECONDS,
    MAX_CACHED_TOKENS,
    MAX_RESIDENT_BYTES,
    MODE,
    MODES,
    NO_BOUND,
    RESERVE_FRAMES,
    RETURNING,
    TRIM,
    Knob,
)
from radix_pages_sglang.metrics import MemoryMetrics
from radix_pages_sglang.moving import PoolMover, Reclaimer, moves_in, returns_in
from radix_pages_sglang.pool import MmapBacking
from radix_pages_sglang.resident import ResidentWatch, process_resident_bytes

if TYPE_CHECKING:
    from radix_pages.ledger import Frames
    from radix_pages.residency import Residency
    from radix_pages_sglang.cache import RadixPagesCache

logger = logging.getLogger(__name__)

CHECK_RANKS = "RADIX_PAGES_CHECK_RANKS"
"""Environment variable: with `1`, the plans of all ranks are compared, which waits for the others at each."""

REGROWN_SOON_SECONDS = 60.0
LEAST_REST, MOST_REST = 8, 64
"""Steps between one plan for free frames or a ceiling and the next; more and more while plans fall short."""

_REPORT_SECONDS = 5.0


class OwnershipError(RuntimeError):
    """Ledger, placement and returned frames contradict each other: serving on could hand one page to two owners."""


class RanksDisagree(RuntimeError):
    """Two ranks made different plans from the same operations."""


def _same_everywhere(number: int, group) -> None:
    if convert.least(number, group) != -convert.least(-number, group):
        raise RanksDisagree(
            f"radix_pages stops this server: its ranks planned different moves (here {number:x}). Serve with "
            "RADIX_PAGES_MODE=return and report this."
        )


def _not_compared(number: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class IdleTrim:
    """Rank 0's decision that the server has been idle for long enough; carried to the others like a request."""


class MemoryControl:
    """Keeps one rank's cache and memory within their bounds.

    `mode` may be lowered and raised again up to `highest_mode`, the one the server started in. The ceiling holds in
    modes return and move alone; below them nothing more is given back, and what was returned comes back as it is
    needed. While requests run, pages move and frames go back in slices, one a step; otherwise frames go back at once.
    """

    def __init__(self, cache: RadixPagesCache, allocator: FrameAware) -> None:
        settings = allocator.settings
        self._cache = cache
        self._allocator = allocator
        self._geometry = allocator.geometry
        self._agree = partial(convert.all_agree, group=cache.tp_group)
        self._least = partial(convert.least, group=cache.tp_group)
        self.residency: Residency | None = allocator.residency
        self.mode = self.highest_mode = MODES.index(settings.mode)
        self.max_cached_tokens = settings.max_cached_tokens
        self.max_resident_bytes = settings.max_resident_bytes
        self.idle_trim_seconds = settings.idle_trim_seconds
        self.free_frames = settings.free_frames
        self._reclaimer = self._make_reclaimer()
        self._is_trimming = False
        self._left_to_return: int | None = None
        """So many frames at most are still to go back; None when no return is under way."""
        self._return_seconds = 0.0
        self.returns_per_slice = 1
        self._has_returned = False
        """Whether the last step gave frames back, so that the next has to look whether the bounds are kept now."""
        self._is_catching_up = False
        """Whether frames for a neighbour are being given back, and planned for if what is empty does not do."""
        self._rest = 0
        self._next_rest = LEAST_REST
        self._fixed_then = 0
        self.degraded = ""
        self.trims = 0
        self.trim_seconds = 0.0
        self.longest_step_seconds = 0.0
        """The longest that a plan, a slice of moves or a return kept the requests of a busy server waiting."""
        self.longest_step_cpu_seconds = 0.0
        """The most processor time of one such step: what is longer by the clock was spent waiting for a core."""
        self.longest_commit_seconds = 0.0
        """The longest that a frame committed ahead for the reserve kept them waiting: the kernel clears it whole."""
        self.capped_tokens = 0
        self._regrown_frames = 0
        self._idle_since: float | None = None
        self._is_idle_trimmed = False
        self._is_system_asked_later = False
        self._report_at = 0.0
        collector = cache.metrics_collector
        self._metrics = None if collector is None else MemoryMetrics(collector.labels)
        if self.residency is not None:
            self.residency.agree = self._agree
            self.residency.on_return = self._note_return
            self.residency.on_commit = self._note_commit
            self._resident = ResidentWatch(self.residency.backing.resident_bytes, _REPORT_SECONDS)
            self._returned_at = np.full(self.residency.ledger.num_frames, -math.inf)
            self.returns_per_slice = self._least(returns_in(self.residency, settings.trim_budget_ms / 1000))

    # ------------------------------------------------------------------------------- between batches

    def step(self) -> None:
        """What has to be done before the next batch is chosen; next to nothing while every bound is kept."""
        self._keep_cap()
        if self.residency is None:
            return
        commits = self._commits_tried(self.residency)
        start, start_cpu = time.perf_counter(), time.thread_time()
        self._keep_memory(self.residency)
        seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - start_cpu
        if seconds <= self._shortest_record or not self._fixed_pages(self.residency):
            return
        if self._commits_tried(self.residency) > commits:
            self.longest_commit_seconds = max(seconds, self.longest_commit_seconds)
        else:
            self.longest_step_seconds = max(seconds, self.longest_step_seconds)
            self.longest_step_cpu_seconds = max(cpu_seconds, self.longest_step_cpu_seconds)

    @property
    def _shortest_record(self) -> float:
        return min(self.longest_commit_seconds, self.longest_step_seconds, self.longest_step_cpu_seconds)

    @staticmethod
    def _commits_tried(residency: Residency) -> int:
        return residency.counts.committed_again_total + residency.counts.commit_failures

    def _keep_memory(self, residency: Residency) -> None:
        self._has_returned = False
        if self._is_system_asked_later and not self._fixed_pages(residency):
            self._ask_system(residency)
        has_worked = residency.over_ceiling_frames > 0 and self._keep_ceiling(residency)
        if self._moves_pages and not has_worked:
            self._keep_free_frames(residency)
        if not has_worked:
            has_worked = self._work(residency)
        if self._returns and not has_worked:  # the kernel clears a frame: not on top of a slice in one step
            residency.refill_reserve()
        if self._metrics is not None and time.monotonic() >= self._report_at:
            self.report()

    def trim(self) -> None:
        """Give back every empty frame but the reserve, then hold the accounts against each other.

        In mode move pages are first packed into as few frames as can hold them. While requests run, and in mode move,
        that begins with the next step; a trim that is under way begins anew. Raises
        OwnershipError when nobody can say any more who owns a page.
        """
        if self.residency is None or not self._returns:
            return
        self._is_trimming = True
        if self._reclaimer is not None and self._moves_pages:
            self._reclaimer.aim(CachedPages(self.residency.ledger.num_pages))  # whatever is cached by then stays
            self._left_to_return = None
            return
        self._begin_return(self.residency)
        if not self._fixed_pages(self.residency):
            self._work(self.residency)

    def _begin_return(self, residency: Residency) -> None:
        """What is empty now goes back; what comes free meanwhile is the next return's, or this one might not end."""
        keep = self._kept_committed(residency)
        kept_empty = residency.reserve_frames if keep is None else 0
        surplus = residency.committed_frames - (0 if keep is None else keep)
        self._left_to_return = max(min(residency.num_empty_frames - kept_empty, surplus), 0)
        self._return_seconds = 0.0

    def _return_slice(self, residency: Residency, left: int) -> None:
        """Give back as many of `left` frames as the budget allows; with the last, hold the accounts to each other."""
        start, is_trimming = time.perf_counter(), self._is_trimming
        returned = self._give_back(residency, self._kept_committed(residency), left)
        self._left_to_return = left - returned if self._returns and 0 < returned < left else None
        if self._left_to_return is None:
            self._is_trimming = False
            if is_trimming:
                self._reconcile(residency)
            else:
                self._check_ownership(residency)
        self._return_seconds += time.perf_counter() - start
        if is_trimming and self._left_to_return is None:
            self._count_trim(self._return_seconds)

    def _count_trim(self, seconds: float) -> None:
        self.trims += 1
        self.trim_seconds += seconds
        if self._metrics is not None:
            self._metrics.trim_seconds.observe(seconds)
            self.report()

    def _kept_committed(self, residency: Residency) -> int | None:
        """Where the return that is under way stops; None for a trim, which leaves the reserve alone."""
        if self._is_trimming:
            return None
        keep = residency.ledger.num_frames - residency.free_frames
        return keep if residency.max_frames is None else min(keep, residency.max_frames)

    def _give_back(self, residency: Residency, keep_committed: int | None, most: int | None = None) -> int:
        """`Residency.trim`, within the budget while requests run; how many frames that were.

        Where the system refuses, on any rank, all fall back to observe. Frames that could not be given back are
        marked as returned all the same: nobody uses them, only the memory stays.
        """
        if self._fixed_pages(residency):
            most = min(self.returns_per_slice, residency.ledger.num_frames if most is None else most)
        before, refusal = residency.ledger.num_returned_frames, ""
        try:
            residency.trim(keep_committed, most)
        except OSError as error:
            refusal = f"memory could not be given back: {error}"
        returned = residency.ledger.num_returned_frames - before
        self._has_returned |= returned > 0
        if returned and not self._agree(not refusal):
            self._degrade(refusal or "another rank could not give memory back")
        return returned

    def is_idle_trim_due(self, is_idle: bool) -> bool:
        """Whether nothing has run for so long that empty frames go back. Rank 0 asks and tells the others."""
        if not is_idle:
            self._idle_since, self._is_idle_trimmed = None, False
            return False
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        if self._is_idle_trimmed or now - self._idle_since < self.idle_trim_seconds:
            return False
        self._is_idle_trimmed = True
        return True

    @property
    def has_ceiling(self) -> bool:
        return self.residency is not None and self.residency.max_frames is not None

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens can ever be served below the ceiling."""
        return self._allocator.fits_alone(num_tokens)

    @property
    def watches_idleness(self) -> bool:
        return self._returns and self.residency is not None and self.idle_trim_seconds > 0

    @property
    def is_working(self) -> bool:
        """Whether a trim, the free frames or the reserve are being worked on, so that another step is due at once."""
        residency = self.residency
        if residency is None or not self._returns:
            return False
        if self._is_reclaiming or residency.lacking_reserve:
            return True
        if not residency.over_ceiling_frames and not self._lacks_free_frames(residency):
            return False
        if self._reclaimer is None or not self._moves_pages:
            return self._has_returned
        return self._has_returned or not (self._reclaimer.fell_short and self._is_resting(residency))

    @property
    def _is_reclaiming(self) -> bool:
        """Whether there is a need to meet, or what came free for one has yet to be returned."""
        return self._left_to_return is not None or (self._reclaimer is not None and self._reclaimer.is_working)

    @property
    def _returns(self) -> bool:
        return MODES[self.mode] in RETURNING

    @property
    def _moves_pages(self) -> bool:
        return self._reclaimer is not None and MODES[self.mode] == "move"

    def _make_reclaimer(self) -> Reclaimer | None:
        residency = self.residency
        if MODES[self.highest_mode] != "move" or residency is None:
            return None
        allocator = self._allocator
        mover = PoolMover(allocator.get_kvcache(), self._geometry)
        seconds = allocator.settings.trim_budget_ms / 1000
        budget = moves_in(mover, int(residency.ledger.sizes[0]), residency.total_bytes, seconds)
        return Reclaimer(
            self._cache,
            mover,
            lambda: allocator.store.placement,
            self._least(budget),
            partial(_same_everywhere, group=self._cache.tp_group)
            if os.environ.get(CHECK_RANKS) == "1"
            else _not_compared,
        )

    def _keep_free_frames(self, residency: Residency) -> None:
        """Keep `free_frames` frames empty and returned for a neighbour: work begins when an eighth of them lacks.

        Allocations spare those frames while something can be evicted instead, so what is missing was taken for
        requests; it comes free when they end. A try that falls short is followed by longer and longer rests, until
        half of the pages that could not go are free to go.
        """
        if self._is_resting(residency):
            self._rest -= 1
            return
        self._rest = 0
        if self._reclaimer is None or self._is_reclaiming:
            return
        has_returned, self._is_catching_up = self._is_catching_up, self._lacks_free_frames(residency)
        if not self._is_catching_up:
            return
        if residency.num_empty_frames and not has_returned:
            self._begin_return(residency)
        else:  # what has come free since then is the plan's, or frames that come and go would keep it from being made
            self._is_catching_up = False
            self._reclaimer.aim(FreeFrames(residency.free_frames - residency.ledger.num_returned_frames))

    def _lacks_free_frames(self, residency: Residency) -> bool:
        """Whether more of those kept free for a neighbour lack than may: an eighth, or none once it was more."""
        lacking = residency.free_frames - residency.ledger.num_returned_frames
        return lacking > (0 if self._is_catching_up else residency.free_frames // 8)

    def _is_resting(self, residency: Residency) -> bool:
        """Whether it is too early for another plan: too few pages were released since the last one."""
        return self._rest > 0 and 2 * self._fixed_pages(residency) >= self._fixed_then

    def _work(self, residency: Residency) -> bool:
        """One slice of what is being worked on; what came free goes back from the step after the last.

        Whether there was anything to do.
        """
        if self._left_to_return is not None:
            self._return_slice(residency, self._left_to_return)
            return True
        if self._reclaimer is None or not self._reclaimer.is_working:
            return False
        if self._reclaimer.step():
            self._begin_return(residency)
            self._begin_rest(self._reclaimer, residency)
        return True

    def _begin_rest(self, reclaimer: Reclaimer, residency: Residency) -> None:
        self._next_rest = min(2 * self._next_rest, MOST_REST) if reclaimer.fell_short else LEAST_REST
        self._rest, self._fixed_then = self._next_rest, self._fixed_pages(residency)

    def _fixed_pages(self, residency: Residency) -> int:
        """Pages that no plan can evict or move: locked, or of requests and sessions."""
        return residency.ledger.num_held - self._geometry.whole_pages(self._cache.evictable_size())

    def _keep_cap(self) -> None:
        if self.max_cached_tokens is None:
            return
        surplus = self._cache.evictable_size() - self.max_cached_tokens
        if surplus > 0:
            self.capped_tokens += self._cache.evict_surplus(surplus)

    def _keep_ceiling(self, residency: Residency) -> bool:
        """The ceiling was lowered: return empty frames, then evict until enough of them are, in the cache's order.

        What requests and sessions hold stays; it is looked at again when something was released or evicted. Whether
        frames were returned.
        """
        returned = self._give_back(residency, residency.max_frames)
        if self._reclaimer is not None and self._moves_pages and residency.max_frames is not None:
            if residency.over_ceiling_frames and not (returned or self._is_reclaiming or self._is_resting(residency)):
                self._reclaimer.aim(HeldFrames(residency.max_frames))
        else:
            while not returned or not self._fixed_pages(residency):
                over, cached = residency.over_ceiling_frames, self._cache.evictable_size()
                frames = self._geometry.slots(over * self._geometry.pages_per_frame)
                evicted = self._cache.evict_surplus(min(frames, cached)) if frames and cached else 0
                if not evicted:
                    break
                self.capped_tokens += evicted
                returned += self._give_back(residency, residency.max_frames)
        return returned > 0

    def _reconcile(self, residency: Residency) -> None:
        """Hold ledger, placement and the system's count against each other.

        Asking the system takes milliseconds: while requests run it waits for the first moment without any.
        """
        self._check_ownership(residency)
        if self._fixed_pages(residency):
            self._is_system_asked_later = True
        else:
            self._ask_system(residency)

    def _ask_system(self, residency: Residency) -> None:
        self._is_system_asked_later = False
        overspent = residency.overspent()
        if not self._agree(not overspent):
            self._degrade(overspent or "another rank's accounts do not agree")

    def _check_ownership(self, residency: Residency) -> None:
        if found := residency.disagreements():
            raise OwnershipError(
                "radix_pages stops this server, because it can no longer say who owns which page: "
                f"{'; '.join(found)}. Start it again with RADIX_PAGES_MODE=observe and report this."
            )

    def _degrade(self, reason: str) -> None:
        if not self.degraded:
            logger.error("radix_pages: falling back to mode observe: %s", reason)
            self.degraded = reason
            self.highest_mode = 0
            self._set_mode(0)

    def _set_mode(self, mode: int) -> None:
        if mode == self.mode:  # another placement would not know of pages on their way
            return
        self.mode = mode
        self._allocator.use_placement(self._allocator.settings.placement_in(MODES[mode]))
        self._set_bounds()
        if not self._moves_pages:
            self._is_trimming, self._left_to_return = False, None
            if self._reclaimer is not None:
                self._reclaimer.drop()

    def _set_bounds(self) -> None:
        """Tell the residency what holds in this mode."""
        if self.residency is not None:
            self.residency.free_frames = self.free_frames if self._moves_pages else 0
            bound = self.max_resident_bytes if self._returns else None
            self.residency.max_frames = None if bound is None else bound // self.residency.backing.frame_bytes

    # ------------------------------------------------------------------------------- settings at run time

    def knobs(self) -> dict[str, Knob]:
        """What can be set now, with ranges. Those that mean nothing for this server are left out."""
        pool_tokens = self._allocator.size
        cap = NO_BOUND if self.max_cached_tokens is None else self.max_cached_tokens
        knobs = {
            MODE: Knob(self.mode, 0, self.highest_mode),
            MAX_CACHED_TOKENS: Knob(cap, 0, pool_tokens, can_be_unbounded=True),
        }
        residency = self.residency
        if residency is None or MODES[self.highest_mode] not in RETURNING:
            return knobs
        ceiling = NO_BOUND if self.max_resident_bytes is None else self.max_resident_bytes
        frame_bytes, num_frames = residency.backing.frame_bytes, residency.ledger.num_frames
        allowed = num_frames if residency.max_frames is None else residency.max_frames
        return knobs | {
            MAX_RESIDENT_BYTES: Knob(
                ceiling,
                least_frames(residency.reserve_frames) * frame_bytes,
                num_frames * frame_bytes,
                can_be_unbounded=True,
            ),
            **self._moving_knobs(residency),
            RESERVE_FRAMES: Knob(residency.reserve_frames, 0, max(allowed - least_frames(0), 0)),
            IDLE_TRIM_SECONDS: Knob(self.idle_trim_seconds, 0, MOST_IDLE_TRIM_SECONDS, is_whole=False),
            TRIM: Knob(0, 1, 1),
        }

    def _moving_knobs(self, residency: Residency) -> dict[str, Knob]:
        if MODES[self.highest_mode] != "move":
            return {}
        return {FREE_FRAMES: Knob(self.free_frames, 0, residency.ledger.num_frames - least_frames(0))}

    def set(self, name: str, value: float) -> None:
        """Set the knob `name` to `value`, which has no complaint, and bring the server within its bounds at once."""
        bound = None if value == NO_BOUND else int(value)
        if name == MODE:
            self._set_mode(min(int(value), self.highest_mode))  # lower, if a trim of the same request degraded it
        elif name == MAX_CACHED_TOKENS:
            self.max_cached_tokens = bound
        elif name == MAX_RESIDENT_BYTES:
            self.max_resident_bytes = bound
            self._set_bounds()
        elif name == RESERVE_FRAMES and self.residency is not None:
            self.residency.reserve_frames = int(value)
        elif name == FREE_FRAMES:
            self.free_frames = int(value)
            self._set_bounds()
            self._rest = 0
        elif name == IDLE_TRIM_SECONDS:
            self.idle_trim_seconds = float(value)
            self._is_idle_trimmed = False
        if name != TRIM:  # its step might end an earlier trim, and that be taken for this one
            self.step()
        if name in (TRIM, MAX_CACHED_TOKENS, MAX_RESIDENT_BYTES):
            self.trim()
        logger.info("radix_pages: %s set to %s", name, value)

    # ------------------------------------------------------------------------------- reports

    def state(self) -> dict[str, object]:
        """What `/server_info` tells of mode, memory and knobs."""
        return {
            "mode": MODES[self.mode],
            "highest_mode": MODES[self.highest_mode],
            "degraded": self.degraded,
            "backing": "none" if self.residency is None else "mmap",
            "capped_tokens": self.capped_tokens,
            "memory": self._memory(),
            "knobs": {
                name: {"value": knob.value, "minimum": knob.minimum, "maximum": knob.maximum}
                for name, knob in self.knobs().items()
            },
        }

    def _memory(self) -> dict[str, object] | None:
        residency = self.residency
        if residency is None:
            return None
        backing = residency.backing
        counts = asdict(residency.counts)
        del counts["committed_again_total"]
        state: dict[str, object] = {
            "pid": os.getpid(),
            "process_bytes": process_resident_bytes(),
            "frame_bytes": backing.frame_bytes,
            "total_bytes": residency.total_bytes,
            "committed_frames": residency.committed_frames,
            "committed_bytes": residency.committed_bytes,
            "resident_bytes": self._resident.latest() if self._fixed_pages(residency) else self._resident.now(),
            "returned_frames": residency.ledger.num_returned_frames,
            "returned_bytes": residency.returned_bytes,
            "over_ceiling_frames": residency.over_ceiling_frames,
            "trims": self.trims,
            "trim_seconds": self.trim_seconds,
            "longest_step_seconds": self.longest_step_seconds,
            "longest_step_cpu_seconds": self.longest_step_cpu_seconds,
            "longest_commit_seconds": self.longest_commit_seconds,
            "regrown_frames": self._regrown_frames,
            "free_frames": residency.free_frames,
        }
        state["returns_per_slice"] = self.returns_per_slice
        if self._reclaimer is not None:
            state |= asdict(self._reclaimer.counts)
            state["moves_per_slice"] = self._reclaimer.moves_per_slice
            state["moved_bytes"] = self._moved_bytes()
        if isinstance(backing, MmapBacking):
            state["region"] = [backing.mapping.start, backing.mapping.end]
        return state | counts

    def _moved_bytes(self) -> int:
        if self._reclaimer is None or self.residency is None:
            return 0
        page_bytes = self.residency.backing.frame_bytes // self._geometry.pages_per_frame
        return self._reclaimer.counts.moved_pages * page_bytes

    def report(self) -> None:
        """Set the metrics."""
        self._report_at = time.monotonic() + _REPORT_SECONDS
        if self._metrics is None:
            return
        gauges: dict[str, float] = {"mode": self.mode, "degraded": bool(self.degraded)}
        totals: dict[str, int] = {}
        residency = self.residency
        if residency is not None:
            ceiling = residency.max_frames
            counts = residency.counts
            gauges |= {
                "committed_bytes": residency.committed_bytes,
                "resident_bytes": self._resident.latest(),
                "returned_frames_now": residency.ledger.num_returned_frames,
                "returned_bytes_now": residency.returned_bytes,
                "reserve_frames": residency.reserve_frames,
                "ceiling_bytes": 0 if ceiling is None else ceiling * residency.backing.frame_bytes,
                "over_ceiling_frames": residency.over_ceiling_frames,
                "free_frames_target": residency.free_frames,
            }
            totals = {
                "returned_frames": counts.returned_frames_total,
                "returned_bytes": counts.returned_bytes_total,
                "commit_failures": counts.commit_failures,
                "ceiling_refusals": counts.ceiling_refusals,
                "regrown_frames": self._regrown_frames,
                "moved_pages": 0 if self._reclaimer is None else self._reclaimer.counts.moved_pages,
                "moved_bytes": self._moved_bytes(),
            }
        self._metrics.report(gauges, totals)

    def _note_return(self, frames: Frames) -> None:
        self._returned_at[frames] = time.monotonic()

    def _note_commit(self, frames: Frames) -> None:
        self._regrown_frames += int((time.monotonic() - self._returned_at[frames] < REGROWN_SOON_SECONDS).sum())
