"""What evictions were asked for and did, and what prefills found cached, per process; reported in `/server_info`."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from radix_pages.units import Geometry

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult

COUNT_STOCK = "RADIX_PAGES_COUNT_STOCK"
"""Environment variable: with `1`, servers without our backend count their evictions too (for comparisons)."""

STATE_KEY = "radix_pages"
"""Under this key each rank's entry of `/server_info` -> `internal_states` carries our state."""


@dataclass(slots=True)
class EvictionCounts:
    """Totals since start. `asked_tokens` is what allocators lacked, `asked_page_rounded` that in whole pages per
    eviction, `unmet_tokens` the part of it for which nothing evictable was left."""

    evictions: int = 0
    asked_tokens: int = 0
    asked_page_rounded: int = 0
    evicted_tokens: int = 0
    unmet_tokens: int = 0
    pages_reclaimed: int = 0
    eviction_seconds: float = 0.0

    def record(self, asked_tokens: int, evicted_tokens: int, geometry: Geometry, seconds: float) -> None:
        """One call for eviction; it counts as an eviction when it evicted something."""
        rounded = geometry.slots(geometry.pages_to_hold(asked_tokens))
        self.evictions += evicted_tokens > 0
        self.asked_tokens += asked_tokens
        self.asked_page_rounded += rounded
        self.evicted_tokens += evicted_tokens
        self.unmet_tokens += max(rounded - evicted_tokens, 0)
        self.pages_reclaimed += geometry.whole_pages(evicted_tokens)
        self.eviction_seconds += seconds


@dataclass(slots=True)
class PrefillCounts:
    """Totals since start: prompt tokens found cached, and those computed. The hit rate is the part of the first.

    As in SGLang's `cache_hit_rate`, what a request prefills again after it was retracted does not count.
    """

    hit_tokens: int = 0
    computed_tokens: int = 0

    def record(self, stats: PrefillStats) -> None:
        """One batch was prefilled."""
        self.hit_tokens += stats.log_hit_tokens - stats.reprocessed_log_hit_tokens
        self.computed_tokens += stats.log_input_tokens - stats.reprocessed_log_input_tokens


_stock_counts: WeakKeyDictionary = WeakKeyDictionary()


def register_hooks() -> None:
    """Report in `/server_info`; with COUNT_STOCK also count what SGLang's own cache does. Changes no result."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        _add_state,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_prefill_stats",
        _count_prefill,
        HookType.BEFORE,
    )
    if os.environ.get(COUNT_STOCK) == "1":
        HookRegistry.register(
            "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_for_alloc",
            _count_stock_eviction,
            HookType.AROUND,
        )


def _add_state(result, controller, *args, **kwargs):
    cache = controller.scheduler.tree_cache
    if hasattr(cache, "eviction_counts"):  # ours; its class cannot be imported here, it imports this module
        from radix_pages_sglang.page_map import requests_of

        result.internal_state[STATE_KEY] = cache.state(requests_of(controller.scheduler))
    elif os.environ.get(COUNT_STOCK) == "1":
        result.internal_state[STATE_KEY] = asdict(_stock_counts.setdefault(cache, EvictionCounts()))
    return result


def _count_prefill(reporter, batch, prefill_stats: PrefillStats, *args, **kwargs) -> None:
    counts = getattr(reporter.scheduler.tree_cache, "prefill_counts", None)
    if counts is not None:
        counts.record(prefill_stats)


def _count_stock_eviction(evict_for_alloc, cache, params: EvictParams, **kwargs) -> EvictResult:
    start = time.perf_counter()
    result = evict_for_alloc(cache, params, **kwargs)
    counts = _stock_counts.setdefault(cache, EvictionCounts())
    counts.record(
        params.num_tokens, result.num_tokens_evicted, Geometry(cache.page_size), time.perf_counter() - start
    )
    return result
