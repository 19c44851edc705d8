"""SGLang's prefix caches and ours, in one process and without a model: pools of slots without KV, on the CPU.

Imports torch and SGLang: commands import this module when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

import radix_pages_sglang
from radix_pages.ledger import Ledger
from radix_pages.reclaim import relocated
from radix_pages.units import Geometry
from radix_pages_sglang import convert
from radix_pages_sglang.allocator import RadixPagesTokenAllocator
from radix_pages_sglang.cache import RadixPagesCache
from radix_pages_sglang.config import Settings

if TYPE_CHECKING:
    from radix_pages.ledger import Pages
    from radix_pages.node import Node

CLASSES = {"rust": UnifiedRadixCache, "python": UnifiedRadixCache, "ours": RadixPagesCache, "legacy": RadixCache}
"""The cache that each name stands for: SGLang's with its Rust or Python core, ours, SGLang's former one."""

CORES = {"ours": "radix_pages"}
_DTYPE, _DEVICE, _NO_KV, _NEED_SORT = torch.float16, "cpu", None, False


def prepare() -> None:
    """Publish an empty SGLang configuration, load our plugin, and use one thread. Call it once, before any cache."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    radix_pages_sglang.register()
    torch.set_num_threads(1)


def make_cache(name: str, page_size: int, slots: int, policy: str = "lru", *, allocator=None):
    """A cache called `name` (a key of `CLASSES`) that evicts by `policy`, over a pool of `slots` slots.

    The pool is SGLang's own unless an `allocator` is given. Raises ValueError for an unknown policy.
    """
    common = (_DTYPE, _DEVICE, _NO_KV, _NEED_SORT)
    if allocator is None and page_size == 1:
        allocator = TokenToKVPoolAllocator(slots, *common)
    elif allocator is None:
        allocator = PagedTokenToKVPoolAllocator(slots, page_size, *common)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=CORES.get(name, name),
        eviction_policy=policy,
    )
    return CLASSES[name](params)


class CountedTokenAllocator(TokenToKVPoolAllocator):
    """SGLang's pool of single slots, with a ledger that hears of every slot it hands out or takes back."""

    def __init__(self, slots: int, geometry: Geometry) -> None:
        self._ledger = Ledger(geometry, slots)
        super().__init__(slots, _DTYPE, _DEVICE, _NO_KV, _NEED_SORT)

    def ledger(self) -> Ledger:
        """Who holds what, as of now."""
        return self._ledger

    def clear(self) -> None:
        super().clear()
        self._ledger.clear()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is not None:
            self._ledger.hold(convert.cpu_array(slots))
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() and self.free_group is None:  # a group comes back here as one at its end
            self._ledger.release(convert.cpu_array(free_index))
        super().free(free_index)


def framed_cache(name: str, slots: int, pages_per_frame: int, policy: str = "lru", *, placement: str = "pack"):
    """A cache with pages of one slot whose `token_to_kv_pool_allocator.ledger()` tells what is held, frame by frame.

    Ours has its own allocator, which places pages by `placement`; the others SGLang's, whose slots are counted.
    """
    geometry = Geometry(1, pages_per_frame=pages_per_frame)
    if name == "ours":
        stock = TokenToKVPoolAllocator(slots, _DTYPE, _DEVICE, _NO_KV, _NEED_SORT)
        settings = Settings(placement=placement, mode="place")
        allocator = RadixPagesTokenAllocator(stock, geometry, settings)
    else:
        allocator = CountedTokenAllocator(slots, geometry)
    return make_cache(name, 1, slots, policy, allocator=allocator)


class NoContents:
    """`radix_pages.reclaim.Mover` for pools with pages of one slot and without KV: counts what it would copy."""

    def __init__(self) -> None:
        self.num_moved = 0

    def pages_of(self, nodes: Sequence[Node]) -> Pages:
        return convert.cpu_array(torch.cat([node.payload for node in nodes]))

    def copy(self, sources: Pages, targets: Pages) -> None:
        self.num_moved += len(sources)

    def repointed(self, payload: torch.Tensor, sources: Pages, targets: Pages) -> torch.Tensor:
        return torch.from_numpy(relocated(convert.cpu_array(payload), sources, targets))
