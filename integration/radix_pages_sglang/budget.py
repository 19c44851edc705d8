"""How much a prefill batch may take: SGLang's own budget, bounded by memory that is there.

SGLang admits requests on free and evictable slots and fails hard when an admitted batch cannot be allocated. Where
memory may be withheld by a ceiling or refused by the operating system, frames are therefore committed while a
request is being admitted; one that cannot have them waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

if TYPE_CHECKING:
    from radix_pages_sglang.allocator import FrameAware


class CommittedPrefillBudget(PrefillBudget):
    """Counts only slots that can be had under the ceiling, and commits what it admits."""

    allocator: FrameAware

    def _available_and_evictable(self) -> int:
        return super()._available_and_evictable() - self.allocator.withheld_size()

    def check_prefill(self, *, extend_input_len: int, chunk_limit: int | None, **rest) -> tuple[bool, int | None]:
        admitted, limit = super().check_prefill(extend_input_len=extend_input_len, chunk_limit=chunk_limit, **rest)
        if not admitted:
            return False, None
        wanted = extend_input_len if limit is None else min(extend_input_len, limit)
        return (True, limit) if self._has_memory_for(wanted) else (False, None)

    def can_allocate_prefill(self, *, paged_input: int, **rest) -> bool:
        return super().can_allocate_prefill(paged_input=paged_input, **rest) and self._has_memory_for(paged_input)

    def fit_chunk(self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int) -> int | None:
        """The next chunk of a request that is under way; a shorter one, or none for now, where memory is short."""
        wanted = min(extend_input_len, chunk_limit)
        if self._has_memory_for(wanted):
            return chunk_limit
        there = self.allocator.committed_size() + self.tree_cache.evictable_size() - self.current_offset
        fits = (there - self.page_size) // self.page_size * self.page_size
        return fits if fits > 0 else None

    def _has_memory_for(self, num_tokens: int) -> bool:
        """Commit what the batch and `num_tokens` more need beyond free and evictable slots that have memory."""
        wanted = self.current_offset + self.ceil_paged_tokens(num_tokens) + self.page_size
        return self.allocator.commit_ahead(wanted, self.tree_cache.evictable_size())
