"""The radix-cache backend `radix_pages`: SGLang's UnifiedRadixCache on our tree core."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.utils.rank_consensus_checker import rank_consensus


class RadixPagesCache(UnifiedRadixCache):
    """UnifiedRadixCache that evicts what an allocation lacks, to the page, and nothing more.

    The stock controller turns an allocator's shortfall into a walk over everything evictable and looks at the
    allocator after each leaf; with whole leaves as the unit that over-evicts. Here the core gets the number itself
    and answers with one plan. The controller's step-wise walk exists for host tiers and more than one component,
    which are refused at start-up; the core implements it too, for whoever drives a core directly.
    """

    @rank_consensus(same_params=True, same_results=True)
    def evict(self, params: EvictParams) -> EvictResult:
        if self.disable:
            return EvictResult()
        start_time = time.perf_counter()
        evicted = self.tree_core.evict_tokens(params.num_tokens)
        if evicted.num_tokens:
            # Whole pages in key order: one page-exact segment.
            self.token_to_kv_pool_allocator.free_segment(evicted.slots, start_pos=0)
        self.update_eviction_metrics(evicted.num_tokens, start_time)
        return EvictResult(num_tokens_evicted=evicted.num_tokens)

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
