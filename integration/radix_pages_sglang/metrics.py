"""Our Prometheus metrics, in SGLang's registry and with its rank labels, and one log line a minute.

Clocks are read here for reports only; nothing that decides reads them.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from radix_pages.ledger import Ledger, Occupancy
    from radix_pages.results import Removal
    from radix_pages_sglang.counts import EvictionCounts

logger = logging.getLogger(__name__)

OCCUPANCY_BANDS = ("empty", "to 25%", "to 50%", "to 75%", "below 100%", "full")
"""How full a frame is: the values of the label `occupancy`."""

_AGE_BUCKETS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 10800, 43200, 86400)
_TRIM_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_REUSE_BUCKETS = (0, 1, 2, 3, 5, 8, 13, 21, 50, 100, 1000)


class TickClock:
    """When a tick was: the tree counts accesses, people think in seconds. Straight lines between samples."""

    def __init__(self, limit: int = 4096) -> None:
        self._ticks = [0]
        self._times = [time.monotonic()]
        self._limit = limit

    def sample(self, tick: int) -> None:
        """It is `tick` now."""
        if tick > self._ticks[-1]:
            self._ticks.append(tick)
            self._times.append(time.monotonic())
            if len(self._ticks) > self._limit:  # every second sample still draws the same lines, coarser
                del self._ticks[1:-1:2]
                del self._times[1:-1:2]

    def age(self, tick: int) -> float:
        """Seconds between `tick` and the last sample."""
        right = min(bisect.bisect_left(self._ticks, tick), len(self._ticks) - 1)
        if not right:
            return self._times[-1] - self._times[0]
        first, last = self._ticks[right - 1], self._ticks[right]
        begin, end = self._times[right - 1], self._times[right]
        return self._times[-1] - (begin + (end - begin) * (tick - first) / (last - first))


class _Make:
    """Metrics named `radix_pages:...` with one rank's labels."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels

    def counter(self, name: str, text: str):
        from prometheus_client import Counter as PrometheusCounter

        return PrometheusCounter(f"radix_pages:{name}", text, labelnames=list(self._labels)).labels(**self._labels)

    def gauge(self, name: str, text: str):
        from prometheus_client import Gauge

        found = Gauge(f"radix_pages:{name}", text, labelnames=list(self._labels), multiprocess_mode="mostrecent")
        return found.labels(**self._labels)

    def histogram(self, name: str, text: str, buckets: Sequence[float]):
        from prometheus_client import Histogram

        found = Histogram(f"radix_pages:{name}", text, labelnames=list(self._labels), buckets=buckets)
        return found.labels(**self._labels)


class CacheMetrics:
    """Counters and histograms of what evictions did, gauges of what frames hold."""

    def __init__(self, labels: dict[str, str]) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before it builds caches; prometheus_client reads it when imported.
        from prometheus_client import Gauge

        names = list(labels)
        self._values = labels
        make = _Make(labels)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram

        self.reclaimed_pages = counter("reclaimed_pages", "Pages that evictions left wholly empty.")
        self.emptied_frames = counter(
            "emptied_frames", "Frames that releases left wholly empty; counted on a CPU only."
        )
        self.asked_tokens = counter("asked_tokens", "Tokens that allocations lacked and asked the cache for.")
        self.tokens_per_page = gauge("evicted_tokens_per_reclaimed_page", "Tokens evicted for each reclaimed page.")
        self.pages = {
            kind: gauge(f"{kind}_pages", text)
            for kind, text in (
                ("held", "Pages that the cache, a request or a session holds."),
                ("stranded", "Free pages inside frames that something keeps occupied."),
                ("empty", "Free pages in frames that are wholly empty."),
            )
        }
        self.packed_floor = gauge("packed_floor_frames", "The least frames that could hold the held pages.")
        self._frames = Gauge(
            "radix_pages:frames",
            "Frames by how many of their pages are held.",
            labelnames=[*names, "occupancy"],
            multiprocess_mode="mostrecent",
        )
        self.lifetime = histogram(
            "evicted_page_age_seconds", "From a page's first use in the cache to its eviction.", _AGE_BUCKETS
        )
        self.idle = histogram(
            "evicted_page_idle_seconds", "From a page's last use in the cache to its eviction.", _AGE_BUCKETS
        )
        self.reuse = histogram(
            "evicted_page_reuse", "Requests that used a page again, counted at its eviction.", _REUSE_BUCKETS
        )
        self._emptied_before = 0

    def evicted(
        self, removals: Sequence[Removal], asked_tokens: int, counts: EvictionCounts, clock: TickClock
    ) -> None:
        """One eviction happened."""
        self.asked_tokens.inc(asked_tokens)
        self.reclaimed_pages.inc(sum(removal.num_pages for removal in removals))
        if counts.pages_reclaimed:
            self.tokens_per_page.set(counts.evicted_tokens / counts.pages_reclaimed)
        for removal in removals:
            lifetime, idle = clock.age(removal.created), clock.age(removal.tick)
            for _ in range(removal.num_pages):  # prometheus_client has no weights
                self.lifetime.observe(lifetime)
                self.idle.observe(idle)
                self.reuse.observe(max(removal.hits - 1, 0))

    def occupied(self, occupancy: Occupancy, ledger: Ledger) -> None:
        """What frames hold now."""
        self.pages["held"].set(occupancy.held_pages)
        self.pages["stranded"].set(occupancy.stranded_pages)
        self.pages["empty"].set(occupancy.empty_pages)
        self.packed_floor.set(occupancy.packed_floor)
        for band, count in frames_by_occupancy(ledger).items():
            self._frames.labels(**self._values, occupancy=band).set(count)
        self.emptied_frames.inc(max(ledger.frames_emptied - self._emptied_before, 0))
        self._emptied_before = ledger.frames_emptied


class MemoryMetrics:
    """What the pool's memory is doing: gauges of now, counters of what was given back, had again and refused."""

    def __init__(self, labels: dict[str, str]) -> None:
        make = _Make(labels)
        self._gauges = {
            name: make.gauge(name, text)
            for name, text in (
                ("mode", "What the server does: 0 observe, 1 place, 2 return, 3 move."),
                ("degraded", "1 when accounts did not agree and the server fell back to observe."),
                ("committed_bytes", "Bytes of frames that have memory; 0 where nothing is followed."),
                ("resident_bytes", "Bytes of the KV buffers that the operating system counts; 0 where not followed."),
                ("returned_frames_now", "Frames whose memory is given back now."),
                ("returned_bytes_now", "Bytes that are given back now."),
                ("reserve_frames", "Empty frames that stay committed against regrowth."),
                ("ceiling_bytes", "The most bytes that may be committed; 0 without a ceiling."),
                ("over_ceiling_frames", "Committed frames beyond the ceiling, held by something."),
                ("free_frames_target", "Frames that are kept free for a neighbour."),
            )
        }
        self._counters = {
            name: make.counter(name, text)
            for name, text in (
                ("returned_frames", "Frames whose memory was given back."),
                ("returned_bytes", "Bytes that were given back."),
                ("commit_failures", "Commits that failed: requests waited or the cache was evicted instead."),
                ("ceiling_refusals", "Times that the ceiling kept frames from being committed."),
                ("regrown_frames", "Frames committed again within a minute of their return."),
                ("moved_pages", "Pages moved so that frames came free."),
                ("moved_bytes", "Bytes copied for that."),
            )
        }
        self._before = dict.fromkeys(self._counters, 0)
        self.trim_seconds = make.histogram("trim_seconds", "How long trims took.", _TRIM_BUCKETS)

    def report(self, gauges: Mapping[str, float], totals: Mapping[str, int]) -> None:
        """What holds now, and totals since start."""
        for name, value in gauges.items():
            self._gauges[name].set(value)
        for name, total in totals.items():
            self._counters[name].inc(total - self._before[name])
            self._before[name] = total


def frames_by_occupancy(ledger: Ledger) -> dict[str, int]:
    """Frames in each of OCCUPANCY_BANDS, without frame 0."""
    per_frame = ledger.geometry.pages_per_frame
    bands = dict.fromkeys(OCCUPANCY_BANDS, 0)
    for held, frames in Counter(ledger.occupancy[1:]).items():
        if not held:
            band = "empty"
        elif held >= per_frame:
            band = "full"
        else:
            band = OCCUPANCY_BANDS[1 + held * 4 // per_frame]
        bands[band] += frames
    return bands


MAP_CELLS = 1024
"""Most characters of a frame map."""


def frame_map(ledger: Ledger) -> dict[str, object]:
    """The frames in order, one character for each or for several neighbours: `-` returned, `.` empty, `1` to `4`
    held up to 25, 50, 75, below 100 %, `#` full. A cell of several is returned or empty only if all are."""
    per_cell = -(-ledger.num_frames // MAP_CELLS)
    starts = np.arange(0, ledger.num_frames, per_cell)
    held = np.add.reduceat(ledger.occupancy, starts)
    sizes = np.add.reduceat(ledger.sizes, starts)
    returned = np.add.reduceat(ledger.is_returned.astype(np.int64), starts)
    several = np.diff(np.append(starts, ledger.num_frames))
    quarters = np.minimum(1 + held * 4 // sizes, 4)
    kinds = np.where(held >= sizes, 5, np.where(held == 0, 0, quarters))
    kinds = np.where(returned == several, 6, kinds)
    return {"frames_per_cell": per_cell, "cells": "".join(_MAP[kind] for kind in kinds)}


_MAP = ".1234#-"


class MinuteLog:
    """Says at most once a minute what happened since it last spoke, and nothing when nothing did."""

    def __init__(self, every_seconds: float = 60.0) -> None:
        self._every = every_seconds
        self._spoke = time.monotonic()
        self._evicted = 0

    def is_due(self, counts: EvictionCounts) -> bool:
        return counts.evicted_tokens != self._evicted and time.monotonic() - self._spoke >= self._every

    def speak(self, counts: EvictionCounts, occupancy: Occupancy | None) -> None:
        evicted = counts.evicted_tokens - self._evicted
        seconds = time.monotonic() - self._spoke
        self._spoke, self._evicted = time.monotonic(), counts.evicted_tokens
        held = ""
        if occupancy is not None:
            held = (
                f"; {occupancy.held_pages} pages held in {occupancy.held_frames} frames (packed floor "
                f"{occupancy.packed_floor}), {occupancy.stranded_pages} pages stranded, "
                f"{occupancy.empty_frames} frames empty"
            )
        logger.info("radix_pages: %d tokens evicted in %.0f s%s", evicted, seconds, held)
