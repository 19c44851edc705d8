"""Puts our allocators, KV buffers and steps in place. Nothing changes unless the server selected this backend."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from radix_pages_sglang import BACKEND

if TYPE_CHECKING:
    from radix_pages.units import Geometry

logger = logging.getLogger(__name__)

_BUILD_ALLOCATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator"

_CREATE_BUFFERS = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal"

_RETRACT_LOOK_AHEAD = "sglang.srt.managers.schedule_batch.evict_from_tree_cache"
"""The name under which the batch calls it after a retraction; allocations use another module's name."""


def register() -> None:
    """Register the hooks; SGLang applies them when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_BUILD_ALLOCATOR, _build_allocator, HookType.AROUND)
    HookRegistry.register(_RETRACT_LOOK_AHEAD, _retract_look_ahead, HookType.AROUND)
    HookRegistry.register(_CREATE_BUFFERS, _create_buffers, HookType.AROUND)


def is_selected() -> bool:
    """Whether this server selected our backend; known only once its configuration is published."""
    from sglang.srt.runtime_context import get_memory

    return get_memory().radix_cache_backend == BACKEND


def _build_allocator(build, configurator, *args, **kwargs):
    given = kwargs.get("token_to_kv_pool_allocator")
    built = build(configurator, *args, **kwargs)
    # A draft worker is handed the target's allocator, which stays as it is.
    if not is_selected() or built is given:
        return built
    return frame_aware(built)


def _create_buffers(create, pool):
    """Key and value buffers over memory that can be given back, for the one kind of pool that has it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from radix_pages_sglang.config import Settings

    if not is_selected() or type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        return create(pool)
    if Settings.from_environment().backing_on(str(pool.device)) != "mmap":
        return create(pool)
    from radix_pages_sglang.pool import create_buffers

    pool.radix_pages_mapping = create_buffers(pool)
    return None


def _retract_look_ahead(evict, tree_cache, num_tokens: int):
    """After a retraction SGLang frees memory for the next steps at once; ours would wait for the next allocation."""
    from radix_pages_sglang.allocator import FrameAware

    allocator = None if tree_cache is None else tree_cache.token_to_kv_pool_allocator
    if isinstance(allocator, FrameAware) and tree_cache.supports_prefix_sharing():
        return allocator.evict_now(tree_cache, num_tokens)
    return evict(tree_cache, num_tokens)


def frame_aware(stock):
    """Our allocator in place of SGLang's `stock`, which nobody has used yet; other kinds are left alone."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    from radix_pages_sglang import support
    from radix_pages_sglang.allocator import RadixPagesPagedAllocator, RadixPagesTokenAllocator
    from radix_pages_sglang.config import Settings, frame_geometry

    kinds = {
        TokenToKVPoolAllocator: RadixPagesTokenAllocator,
        PagedTokenToKVPoolAllocator: RadixPagesPagedAllocator,
    }
    kind = kinds.get(type(stock))
    if kind is None:
        return stock
    settings = Settings.from_environment()
    kvcache = stock.get_kvcache()
    rows = row_bytes(kvcache)
    device = str(stock.device)
    backing_kind = settings.backing_on(device)
    mapping = getattr(kvcache, "radix_pages_mapping", None)
    if backing_kind == "mmap" and mapping is None:
        raise support.backing_refusal(kvcache)
    geometry = frame_geometry(
        settings, stock.page_size, rows, on_cuda=device.startswith("cuda"), is_backed=mapping is not None
    )
    logger.info(
        "radix_pages: %s, mode %s, placement %s, backing %s%s",
        describe(geometry, rows),
        settings.mode,
        settings.placement_in(settings.mode),
        backing_kind,
        " (auto: memory cannot be given back on CUDA yet)" if settings.backing == "auto" and device != "cpu" else "",
    )
    if geometry.slots(geometry.pages_per_frame) > stock.size:
        logger.warning(
            "radix_pages: a frame is larger than the pool of %d tokens and can never be empty; set "
            "RADIX_PAGES_FRAME_TOKENS",
            stock.size,
        )
    ours = kind(stock, geometry, settings)
    if mapping is not None:
        from radix_pages_sglang.pool import MmapBacking

        ours.back_with(MmapBacking(mapping, geometry), starts_returned=settings.gives_back)
    return ours


_NATIVE_SCALES = ("native_k_scale_buffer", "native_v_scale_buffer")


def row_bytes(kvcache) -> list[int]:
    """Bytes that one slot takes in each buffer of a KV pool: keys and values of every layer, and their scales.

    The layers of a separate draft model are not among them: their pool is built later.
    """
    buffers = []
    for name in (
        "k_buffer",
        "v_buffer",
        "kv_buffer",
        "k_scale_buffer",
        "v_scale_buffer",
        "kv_scale_buffer",
        *_NATIVE_SCALES,
    ):
        found = getattr(kvcache, name, None)
        if isinstance(found, list | tuple):
            buffers += [buffer for buffer in found if hasattr(buffer, "element_size") and buffer.dim() > 0]
    if not buffers:
        return []
    slots = kvcache.size + kvcache.page_size  # the padding page is a page of the buffers, too
    return [buffer.numel() * buffer.element_size() // slots for buffer in buffers]


def describe(geometry: Geometry, rows: list[int]) -> str:
    """One line for the start-up log."""
    pages, slots = geometry.pages_per_frame, geometry.slots(geometry.pages_per_frame)
    return (
        f"a frame is {pages} pages of {geometry.page_size} tokens: {slots} tokens, "
        f"{slots * sum(rows)} bytes over {len(rows)} buffers"
    )
