"""One replay: a trace, a policy, a pool size; through a cache of `cores`, or through a policy that knows the future.

A block is a page of one slot with one token in it, whose id is the block's: hits, evictions and frames are those of
a pool with the block as its page, and a replay costs by the block, not by the token. Unlike a server, which computes
the last token of every prompt, a prompt that is cached as a whole hits as a whole. Imports torch and SGLang.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.allocation import alloc_token_slots
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_pages_sglang.experiments.farthest import KeyedBlocks
from radix_pages_sglang.experiments.prefix_sharing.spool import Asked


@dataclass(slots=True)
class Work:
    """Totals of a replay, in blocks. `lacking` is what allocations lacked, `evicted` what went for it."""

    hits: int = 0
    lacking: int = 0
    evicted: int = 0
    evictions: int = 0
    eviction_seconds: float = 0.0


class Held(NamedTuple):
    """What a running request has: its lock in the tree, and the slots of its answer, None for no answer."""

    lock: object
    output_slots: torch.Tensor | None


class CacheServer:
    """Serves through a cache of `cores.framed_cache`, with the calls that SGLang's scheduler makes for a request."""

    def __init__(self, cache) -> None:
        self.cache = cache
        self.allocator = cache.token_to_kv_pool_allocator
        self.work = Work()

    def start(self, request: Asked, output_blocks: int) -> Held:
        cache = self.cache
        key = RadixKey(array("q", request.blocks.tobytes()))
        match = cache.match_prefix(MatchPrefixParams(key=key))
        hits = match.device_prefix_len
        lock = cache.lock(match.last_device_node)
        row = cache.path_device_indices(match.last_device_node)[:hits]
        num_new = len(request.blocks) - hits
        if num_new:
            row = torch.cat([row, self._allocate(num_new)])
        output_slots = self._allocate(output_blocks) if output_blocks else None
        done = cache.insert(InsertParams(key=key, value=row, prev_prefix_len=hits))
        held = Held(cache.lock(done.last_device_node), output_slots)
        cache.unlock(lock)
        self.work.hits += hits
        return held

    def end(self, held: Held) -> None:
        self.cache.unlock(held.lock)
        if held.output_slots is not None:
            self.allocator.free(held.output_slots)

    def _allocate(self, num_blocks: int) -> torch.Tensor:
        """Slots for blocks that are not cached; evicts what they lack, and counts it."""
        free = self.allocator.available_size()
        if num_blocks <= free:
            return alloc_token_slots(self.cache, num_blocks)
        start = time.perf_counter()
        slots = alloc_token_slots(self.cache, num_blocks)
        self.work.eviction_seconds += time.perf_counter() - start
        self.work.evictions += 1
        self.work.lacking += num_blocks - free
        self.work.evicted += self.allocator.available_size() + num_blocks - free
        return slots


class FarthestServer:
    """Evicts the block whose next use is farthest."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = KeyedBlocks(num_blocks)
        self.work = Work()

    def start(self, request: Asked, output_blocks: int) -> tuple[list[int], int]:
        blocks = request.blocks.tolist()
        self.work.hits += self.blocks.start(blocks, self.urgencies(request), output_blocks)
        return blocks, output_blocks

    def end(self, held: tuple[list[int], int]) -> None:
        self.blocks.end(*held)

    def urgencies(self, request: Asked) -> list[int]:
        """What each block is worth from now on."""
        return (-request.next_uses).tolist()


class LastingCountServer(FarthestServer):
    """LFU that remembers the uses of evicted blocks; of equals the one unused longest goes."""

    def urgencies(self, request: Asked) -> list[int]:
        return ((request.uses.astype(np.int64) << 32) + request.number).tolist()
