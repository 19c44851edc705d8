"""radix_pages for SGLang: the plugin that SGLang's `sglang.srt.plugins` entry-point group loads.

Only the standard library is imported here: SGLang logs and swallows what a plugin raises, so an import that fails
must wait until somebody asks for the backend and can be told.
"""

from __future__ import annotations

import logging

BACKEND = "radix_pages"

logger = logging.getLogger(__name__)
_failure: Exception | None = None
_registered = False


def register() -> None:
    """Offer the backend to SGLang under `--radix-cache-backend radix_pages`; idempotent.

    Without that flag nothing of SGLang changes. What goes wrong here is raised again, with its cause, when a
    server selects the backend.
    """
    global _failure, _registered
    if _registered:
        return
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(BACKEND, _cache_factory)
    _registered = True
    try:
        _register_rest()
    except Exception as error:  # kept for whoever selects the backend: SGLang would only log it
        _failure = error
        logger.exception("radix_pages did not load completely; selecting it will raise this error")


def _register_rest() -> None:
    from radix_pages_sglang import counts, hooks, scheduler_hooks, support

    support.check_version()
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend

    register_tree_core_backend(BACKEND, _tree_core_factory)
    register_resolution_hook("handle_cache_compatibility")(support.check_arguments)
    counts.register_hooks()
    hooks.register()
    scheduler_hooks.register()


def _cache_factory(ctx):
    """The prefix cache for a server that selected this backend; raises what it cannot work with."""
    from radix_pages_sglang import support

    support.check(ctx)
    if _failure is not None:
        raise support.UnsupportedError(
            f"--radix-cache-backend {BACKEND} did not load: {_failure}. Reinstall radix-pages for this SGLang, or "
            "leave out --radix-cache-backend and keep SGLang's own cache."
        ) from _failure
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from radix_pages_sglang.allocator import FrameAware
    from radix_pages_sglang.cache import RadixPagesCache

    if not isinstance(ctx.params.token_to_kv_pool_allocator, FrameAware):
        raise support.UnsupportedError(
            f"--radix-cache-backend {BACKEND} could not put its slot allocator in place: SGLang built a "
            f"{type(ctx.params.token_to_kv_pool_allocator).__name__}. Look for 'Failed to apply hooks' in the log; "
            "another plugin may have replaced KVCacheConfigurator."
        )
    ctx.params.tree_core_backend = BACKEND
    return create_unified_radix_cache(ctx, cache_class=RadixPagesCache)


def _tree_core_factory(params, components):
    from radix_pages_sglang import support
    from radix_pages_sglang.tree_core import RadixPagesTreeCore

    support.check_components(params)
    return RadixPagesTreeCore(params)
