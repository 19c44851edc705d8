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

from radix_pages_sglang import convert
from radix_pages_sglang.allocator import FrameAware, least_frames
from radix_pages_sglang.config import MODES, MOST_IDLE_TRIM_SECONDS
from radix_pages_sglang.metrics import MemoryMetrics
from radix_pages_sglang.pool import MmapBacking
from radix_pages_sglang.resident import process_resident_bytes

if TYPE_CHECKING:
    from radix_pages.ledger import Frames
    from radix_pages.residency import Residency
    from radix_pages_sglang.cache import RadixPagesCache

logger = logging.getLogger(__name__)

MODE = "radix_pages_mode"
MAX_CACHED_TOKENS = "radix_pages_max_cached_tokens"
MAX_RESIDENT_BYTES = "radix_pages_max_resident_bytes"
RESERVE_FRAMES = "radix_pages_reserve_frames"
IDLE_TRIM_SECONDS = "radix_pages_idle_trim_seconds"
TRIM = "radix_pages_trim"
NO_BOUND = -1

REGROWN_SOON_SECONDS = 60.0
_REPORT_SECONDS = 5.0


class OwnershipError(RuntimeError):
    """Ledger, placement and returned frames contradict each other: serving on could hand one page to two owners."""


@dataclass(frozen=True, slots=True)
class IdleTrim:
    """Rank 0's decision that the server has been idle for long enough; carried to the others like a request."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A number that can be set while the server runs: a whole one unless `is_whole` is False."""

    value: float
    minimum: float
    maximum: float
    is_whole: bool = True
    can_be_unbounded: bool = False

    def complaint(self, name: str, value: object) -> str:
        """Why `value` cannot be set, in a sentence; empty if it can."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"{name} takes a number, not {value!r}."
        if self.is_whole and value != int(value):
            return f"{name} takes a whole number, not {value!r}."
        if self.minimum <= value <= self.maximum or (self.can_be_unbounded and value == NO_BOUND):
            return ""
        unbounded = f", or {NO_BOUND} for no bound" if self.can_be_unbounded else ""
        return f"{name}={value} is out of the range [{self.minimum}, {self.maximum}]{unbounded}."


class MemoryControl:
    """Keeps one rank's cache and memory within their bounds.

    `mode` may be lowered and raised again up to `highest_mode`, the one the server started in. The ceiling holds in
    mode return alone; below it nothing more is given back, and what was returned comes back as it is needed.
    """

    def __init__(self, cache: RadixPagesCache, allocator: FrameAware) -> None:
        settings = allocator.settings
        self._cache = cache
        self._allocator = allocator
        self._geometry = allocator.geometry
        self._agree = partial(convert.all_agree, group=cache.tp_group)
        self.residency: Residency | None = allocator.residency
        self.mode = self.highest_mode = MODES.index(settings.mode)
        self.max_cached_tokens = settings.max_cached_tokens
        self.max_resident_bytes = settings.max_resident_bytes
        self.idle_trim_seconds = settings.idle_trim_seconds
        self.degraded = ""
        self.trims = 0
        self.trim_seconds = 0.0
        self.capped_tokens = 0
        self._regrown_frames = 0
        self._idle_since: float | None = None
        self._is_idle_trimmed = False
        self._resident = 0
        self._resident_at = -math.inf
        self._report_at = 0.0
        collector = cache.metrics_collector
        self._metrics = None if collector is None else MemoryMetrics(collector.labels)
        if self.residency is not None:
            self.residency.agree = self._agree
            self.residency.on_return = self._note_return
            self.residency.on_commit = self._note_commit
            self._returned_at = np.full(self.residency.ledger.num_frames, -math.inf)

    # ------------------------------------------------------------------------------- between batches

    def step(self) -> None:
        """What has to be done before the next batch is chosen; next to nothing while every bound is kept."""
        self._keep_cap()
        residency = self.residency
        if residency is None:
            return
        if residency.over_ceiling_frames:
            self._keep_ceiling(residency)
        if residency.reserve_frames and self._returns:
            residency.refill_reserve()
        if self._metrics is not None and time.monotonic() >= self._report_at:
            self.report()

    def trim(self) -> int:
        """Give back every empty frame but the reserve, then hold the accounts against each other; frames returned.

        Raises OwnershipError when nobody can say any more who owns a page.
        """
        residency = self.residency
        if residency is None or not self._returns:
            return 0
        start = time.perf_counter()
        try:
            returned = residency.trim()
        except OSError as error:  # the frames are marked as returned and nobody uses them: only the memory stays
            self._degrade(f"memory could not be given back: {error}")
            returned = 0
        self._reconcile(residency)
        seconds = time.perf_counter() - start
        self.trims += 1
        self.trim_seconds += seconds
        if self._metrics is not None:
            self._metrics.trim_seconds.observe(seconds)
            self.report()
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
    def watches_idleness(self) -> bool:
        return self._returns and self.residency is not None and self.idle_trim_seconds > 0

    @property
    def _returns(self) -> bool:
        return MODES[self.mode] == "return"

    def _keep_cap(self) -> None:
        if self.max_cached_tokens is None:
            return
        surplus = self._cache.evictable_size() - self.max_cached_tokens
        if surplus > 0:
            self.capped_tokens += self._cache.evict_surplus(surplus)

    def _keep_ceiling(self, residency: Residency) -> None:
        """The ceiling was lowered: return empty frames, then evict until enough of them are, in the cache's order.

        What requests and sessions hold stays; it is looked at again when something was released or evicted.
        """
        residency.trim(keep_committed=residency.max_frames)
        while (over := residency.over_ceiling_frames) and (cached := self._cache.evictable_size()):
            frames = self._geometry.slots(over * self._geometry.pages_per_frame)
            evicted = self._cache.evict_surplus(min(frames, cached))
            if not evicted:
                return
            self.capped_tokens += evicted
            residency.trim(keep_committed=residency.max_frames)

    def _reconcile(self, residency: Residency) -> None:
        if found := residency.disagreements():
            raise OwnershipError(
                "radix_pages stops this server, because it can no longer say who owns which page: "
                f"{'; '.join(found)}. Start it again with RADIX_PAGES_MODE=observe and report this."
            )
        overspent = residency.overspent()
        if not self._agree(not overspent):
            self._degrade(overspent or "another rank's accounts do not agree")

    def _degrade(self, reason: str) -> None:
        if not self.degraded:
            logger.error("radix_pages: falling back to mode observe: %s", reason)
            self.degraded = reason
            self.highest_mode = 0
            self._set_mode(0)

    def _set_mode(self, mode: int) -> None:
        self.mode = mode
        self._allocator.use_placement(self._allocator.settings.placement_in(MODES[mode]))
        self._set_ceiling()

    def _set_ceiling(self) -> None:
        if self.residency is not None:
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
        if residency is None or MODES[self.highest_mode] != "return":
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
            RESERVE_FRAMES: Knob(residency.reserve_frames, 0, max(allowed - least_frames(0), 0)),
            IDLE_TRIM_SECONDS: Knob(self.idle_trim_seconds, 0, MOST_IDLE_TRIM_SECONDS, is_whole=False),
            TRIM: Knob(0, 1, 1),
        }

    def set(self, name: str, value: float) -> None:
        """Set the knob `name` to `value`, which has no complaint, and bring the server within its bounds at once."""
        bound = None if value == NO_BOUND else int(value)
        if name == MODE:
            self._set_mode(int(value))
        elif name == MAX_CACHED_TOKENS:
            self.max_cached_tokens = bound
        elif name == MAX_RESIDENT_BYTES:
            self.max_resident_bytes = bound
            self._set_ceiling()
        elif name == RESERVE_FRAMES and self.residency is not None:
            self.residency.reserve_frames = int(value)
        elif name == IDLE_TRIM_SECONDS:
            self.idle_trim_seconds = float(value)
            self._is_idle_trimmed = False
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
            "resident_bytes": self._resident_bytes(2.0),
            "returned_frames": residency.ledger.num_returned_frames,
            "returned_bytes": residency.returned_bytes,
            "over_ceiling_frames": residency.over_ceiling_frames,
            "trims": self.trims,
            "trim_seconds": self.trim_seconds,
            "regrown_frames": self._regrown_frames,
        }
        if isinstance(backing, MmapBacking):
            state["region"] = [backing.mapping.start, backing.mapping.end]
        return state | counts

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
                "resident_bytes": self._resident_bytes(_REPORT_SECONDS),
                "returned_frames_now": residency.ledger.num_returned_frames,
                "returned_bytes_now": residency.returned_bytes,
                "reserve_frames": residency.reserve_frames,
                "ceiling_bytes": 0 if ceiling is None else ceiling * residency.backing.frame_bytes,
                "over_ceiling_frames": residency.over_ceiling_frames,
            }
            totals = {
                "returned_frames": counts.returned_frames_total,
                "returned_bytes": counts.returned_bytes_total,
                "commit_failures": counts.commit_failures,
                "ceiling_refusals": counts.ceiling_refusals,
                "regrown_frames": self._regrown_frames,
            }
        self._metrics.report(gauges, totals)

    def _resident_bytes(self, seconds_old: float) -> int:
        """What the system counts, at most so many seconds old: asking takes milliseconds."""
        if self.residency is not None and time.monotonic() - self._resident_at > seconds_old:
            self._resident = self.residency.backing.resident_bytes()
            self._resident_at = time.monotonic()
        return self._resident

    def _note_return(self, frames: Frames) -> None:
        self._returned_at[frames] = time.monotonic()
        self._resident_at = -math.inf

    def _note_commit(self, frames: Frames) -> None:
        self._resident_at = -math.inf
        self._regrown_frames += int((time.monotonic() - self._returned_at[frames] < REGROWN_SOON_SECONDS).sum())
