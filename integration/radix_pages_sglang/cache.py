"""The radix-cache backend `radix_pages`: SGLang's UnifiedRadixCache on our tree core."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, DecLockRefResult, EvictParams, EvictResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from radix_pages.frame_planner import FramePlan
from radix_pages.ledger import Ledger, LedgerError
from radix_pages_sglang import convert
from radix_pages_sglang.allocator import FrameAware
from radix_pages_sglang.control import MemoryControl
from radix_pages_sglang.counts import EvictionCounts, PrefillCounts
from radix_pages_sglang.hooks import row_bytes
from radix_pages_sglang.metrics import CacheMetrics, MinuteLog, TickClock, frame_map, frames_by_occupancy
from radix_pages_sglang.page_map import Requests, frame_holders, largest_prefixes, pages_in_rows
from radix_pages_sglang.tree_core import Evicted


class RadixPagesCache(UnifiedRadixCache):
    """UnifiedRadixCache that evicts what an allocation lacks, to the page, and nothing more.

    The stock controller turns an allocator's shortfall into a walk over everything evictable and looks at the
    allocator after each leaf; with whole leaves as the unit that over-evicts. Here the core gets the number itself
    and answers with one plan. The controller's step-wise walk exists for host tiers and more than one component,
    which are refused at start-up; the core implements it too, for whoever drives a core directly.
    """

    def __init__(self, params: CacheInitParams) -> None:
        self.eviction_counts = EvictionCounts()
        self.prefill_counts = PrefillCounts()
        self._clock = TickClock()
        self._log = MinuteLog()
        self._gauges_set = 0.0
        super().__init__(params)
        self._metrics = None if self.metrics_collector is None else CacheMetrics(self.metrics_collector.labels)
        allocator = params.token_to_kv_pool_allocator
        self._frames = allocator if isinstance(allocator, FrameAware) else None
        self.control: MemoryControl | None = None
        if self._frames is not None:
            self._frames.cache = self
            self.control = MemoryControl(self, self._frames)
            self.control.report()

    @rank_consensus(same_params=True, same_results=True)
    def evict(self, params: EvictParams) -> EvictResult:
        if self.disable:
            return EvictResult()
        start_time = time.perf_counter()
        evicted = self._free(self.tree_core.evict_tokens(params.num_tokens))
        seconds = time.perf_counter() - start_time
        self.eviction_counts.record(params.num_tokens, evicted.num_tokens, self.tree_core.geometry, seconds)
        self.update_eviction_metrics(evicted.num_tokens, start_time)
        if self._metrics is not None:
            self._clock.sample(self.tree_core.tree.tick)
            self._metrics.evicted(evicted.removals, params.num_tokens, self.eviction_counts, self._clock)
        if start_time - self._gauges_set >= 1:
            self._report_while_busy()
        return EvictResult(num_tokens_evicted=evicted.num_tokens)

    def evict_surplus(self, num_tokens: int) -> int:
        """Evict what a bound says is too much; tokens evicted. No allocation asked, so it counts as none's need."""
        return 0 if self.disable else self._drop(lambda: self.tree_core.evict_tokens(num_tokens))

    def evict_planned(self, plan: FramePlan) -> int:
        """Evict what a frame plan says; tokens evicted."""
        return self._drop(lambda: self.tree_core.carry_out(plan)) if plan.evictions else 0

    def _drop(self, evict: Callable[[], Evicted]) -> int:
        start_time = time.perf_counter()
        evicted = self._free(evict())
        self.update_eviction_metrics(evicted.num_tokens, start_time)
        if self._metrics is not None:
            self._metrics.evicted(evicted.removals, 0, self.eviction_counts, self._clock)
        return evicted.num_tokens

    def _free(self, evicted: Evicted) -> Evicted:
        if evicted.num_tokens:
            # Whole pages in key order: one page-exact segment.
            self.token_to_kv_pool_allocator.free_segment(evicted.slots, start_pos=0)
        return evicted

    def _report_while_busy(self) -> None:
        """Gauges and log line, at most once a second. Never waits for a device: there frames are counted at idle."""
        self._gauges_set = time.perf_counter()
        if self._frames is not None and self._frames.ledger_is_at_hand:
            self._report_occupancy(self._frames.ledger())
        elif self._log.is_due(self.eviction_counts):
            self._log.speak(self.eviction_counts, None)

    def _report_occupancy(self, ledger: Ledger) -> None:
        occupancy = ledger.occupancy_report()
        self._clock.sample(self.tree_core.tree.tick)
        if self._metrics is not None:
            self._metrics.occupied(occupancy, ledger)
        if self._log.is_due(self.eviction_counts):
            self._log.speak(self.eviction_counts, occupancy)

    def state(self, requests: Requests | None = None) -> dict[str, object]:
        """What `/server_info` tells of this rank; `requests` are those that run, unless there is no scheduler."""
        state: dict[str, object] = asdict(self.eviction_counts) | asdict(self.prefill_counts)
        if self._frames is None:
            return state
        requests = requests or Requests()
        geometry = self._frames.geometry
        state |= asdict(geometry) | {
            "page_bytes": geometry.slots(sum(row_bytes(self._frames.get_kvcache()))),
            "cached_tokens": self.evictable_size(),
            "protected_tokens": self.protected_size(),
            "running_requests": len(requests.rows),
            "waiting_requests": requests.waiting,
            "shared_prefixes": largest_prefixes(self.tree_core.tree, geometry),
        }
        if self.control is not None:
            state |= self.control.state()
        try:
            ledger = self._frames.ledger()
        except LedgerError as error:
            return state | {"ledger_error": str(error)}
        state |= asdict(ledger.occupancy_report())
        state |= {"frames_by_occupancy": frames_by_occupancy(ledger), "frame_map": frame_map(ledger)}
        rows = [*requests.rows, *self.session_records().values()]
        used = pages_in_rows(rows, self.req_to_token_pool.req_to_token, geometry)
        state |= {"frame_holders": frame_holders(ledger, used)}
        if self._frames.ledger_is_at_hand:  # elsewhere the ledger is made anew each time and has no past
            state |= {"frames_emptied": ledger.frames_emptied, "frames_refilled": ledger.frames_refilled}
        return state

    @rank_consensus(same_params=["params", "allocation_reclaim_satisfied is not None"], same_results=True)
    def evict_for_alloc(
        self,
        params: EvictParams,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> EvictResult:
        if allocation_reclaim_satisfied is not None:
            raise NotImplementedError("radix_pages shares no memory between components: joint reclaim cannot occur")
        return self.evict(params)

    def dec_lock_ref(self, node_id: int, params: DecLockRefParams, skip_swa: bool = False) -> DecLockRefResult:
        result = super().dec_lock_ref(node_id, params, skip_swa)
        pending = self.tree_core.pending_actions
        if pending:  # pages that a request overwrote leave with their last lock
            self.tree_core.pending_actions = []
            self._apply_cache_actions(pending)
        return result

    def recount(self) -> list[str]:
        """Everything on which tree, ledger and sessions disagree, a sentence each. For idle servers: no request
        may hold a row. Waits for the device."""
        try:
            ledger = self.token_to_kv_pool_allocator.ledger()
        except LedgerError as error:
            return [str(error)]
        self._report_occupancy(ledger)
        slots = convert.host_array(self.tree_core.all_values_flatten())
        found = self.tree_core.disagreements(slots)
        tree_pages, broken = convert.whole_pages(slots, self.tree_core.geometry)
        if broken:
            found.append(f"slots {broken[:8]} do not stand in whole pages, in order, in the nodes that hold them")
        owned = np.zeros(ledger.num_pages + 1, dtype=np.bool_)
        owners = {"the tree": tree_pages}
        for session_id, kv in self.session_records().items():
            if kv.holds_kv:
                row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
                own = row[kv.cache_protected_len : kv.kv_allocated_len]
                owners[f"session {session_id}"] = convert.distinct_pages(own, self.tree_core.geometry)
        for owner, pages in owners.items():
            found += [f"page {page} belongs to {owner} and to somebody else" for page in pages[owned[pages]]]
            found += [f"page {page} belongs to {owner} and is free" for page in pages[~ledger.is_held[pages]]]
            owned[pages] = True
        owned[0] = True  # SGLang's padding page
        lost = np.flatnonzero(ledger.is_held & ~owned)
        if len(lost):
            found.append(f"{len(lost)} pages are held by nobody: {convert.host_ints(lost[:16])}")
        if self.control is not None and self.control.residency is not None:
            found += self.control.residency.disagreements()
            self.control.report()
        return found
