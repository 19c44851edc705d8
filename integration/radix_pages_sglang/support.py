"""What the radix_pages backend works with; everything else ends as a start-up error that says what to do.

An allow-list in three parts: SGLang's version, the options that reshape a prefix cache, and what SGLang built
for the model (tree components, allocator, pools). Speculative decoding, streaming sessions and
`--disable-radix-cache` pass.

Importing this module needs neither torch nor sglang: a version whose modules moved is still refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.server_args import ServerArgs

from radix_pages_sglang import BACKEND

SUPPORTED_VERSIONS = ("0.5.23",)
"""Releases of SGLang that the adapter was tested with."""


class UnsupportedError(ValueError):
    """An option, model or pool that this backend refuses; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Option:
    """An SGLang option that this backend accepts only at one of its `harmless` values."""

    field: str
    because: str
    harmless: tuple[Any, ...] = (False,)
    instead: str = ""

    @property
    def flag(self) -> str:
        """The option as it is typed; every field here has the flag that SGLang derives from its name."""
        return "--" + self.field.replace("_", "-")

    def refusal(self, value: Any) -> UnsupportedError:
        """The error for `value`, which is not harmless."""
        culprit = self.flag if value is True else f"{self.flag} {value}"
        return _refusal(culprit, self.because, self.instead or f"Remove {self.flag}")


OPTIONS = (
    Option("enable_hierarchical_cache", "this tree does not follow KV to a host or storage tier"),
    Option("enable_unified_cache_external_linker", "this tree does not follow KV to an external store"),
    Option("enable_lmcache", "LMCache brings a prefix cache of its own, and a server has one"),
    Option("enable_flexkv", "FlexKV brings a prefix cache of its own, and a server has one"),
    Option("enable_unified_memory", "its slots are virtual and its memory moves between several pools"),
    Option("enable_page_major_kv_layout", "it keeps every layer of a slot in one row, never tested here"),
    Option("enable_hisparse", "it keeps most KV off the device, outside the slots of this tree"),
    Option("enable_session_radix_cache", "this tree does not count references by session"),
    Option("enable_kv_cache_sharding", "a rank then holds only its stripe of every page"),
    Option("dcp_size", "a rank then holds only its share of every page", (1,), "Set --dcp-size 1"),
    Option(
        "dllm_algorithm",
        "a diffusion language model rewrites tokens whose KV is cached",
        (None,),
        "Serve an autoregressive model without --dllm-algorithm",
    ),
    Option(
        "disaggregation_mode",
        "slots whose KV travels between servers were never tested here",
        ("null",),
        "Serve prefill and decode from one server without --disaggregation-mode",
    ),
)


WITH_A_BACKING = (
    Option("enable_memory_saver", "two owners would give the same KV memory back"),
    Option(
        "speculative_algorithm",
        "a draft model keeps KV of its own under the same slots, and only one pool's memory is followed",
        (None,),
        "Serve without --speculative-algorithm",
    ),
    Option("pp_size", "the stages of a pipeline would have to agree on every frame", (1,), "Set --pp-size 1"),
)
"""Refused where memory is given back (RADIX_PAGES_MODE=return or move, or RADIX_PAGES_BACKING=mmap)."""


def check(ctx: TreeCacheBuildContext) -> None:
    """Refuse what the cache that `ctx` describes would not work with. Reads SGLang's published configuration.

    Raises UnsupportedError for the first culprit, flags before models, models before pools.
    """
    from sglang.srt.runtime_context import get_context

    check_version()
    check_options(get_context().config_leaf)
    check_settings(get_context().config_leaf)
    if ctx.enable_hierarchical_cache:
        raise _option("enable_hierarchical_cache").refusal(True)
    if not ctx.disable_radix_cache:  # SGLang never builds the order of a disabled tree
        check_policy(ctx.params.eviction_policy, ctx.params.eviction_policy_config)
    _check_model(ctx.model_config, ctx.is_hybrid_swa, ctx.is_hybrid_ssm)
    check_components(ctx.params)
    _check_pools(ctx.params)


def check_arguments(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """A resolution hook: refuse what arguments and model config give away, before any weight is loaded.

    Does nothing unless the server selects this backend; then runs SGLang's own step, `previous`.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    view = resolving_view(server_args)
    if view.radix_cache_backend == BACKEND:
        check_version()
        check_options(partial(getattr, view))
        check_settings(partial(getattr, view))
        if not view.disable_radix_cache:
            check_policy(view.radix_eviction_policy, view.radix_eviction_policy_config)
        from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

        model = model_config_of(server_args)
        # A model's own defaults may have switched its second pool off after `model` was made.
        is_hybrid_swa = model.is_hybrid_swa and not view.disable_hybrid_swa_memory
        _check_model(model, is_hybrid_swa, uses_ssm_state(model))
    previous(server_args)


def check_version() -> None:
    """Refuse an SGLang release that the adapter was not tested with."""
    from sglang.version import __version__

    release = __version__.partition("+")[0]  # a local label such as +cu130 names a build, not a release
    if release not in SUPPORTED_VERSIONS:
        raise UnsupportedError(
            f"SGLang {__version__} does not work with --radix-cache-backend {BACKEND}, which supports "
            f"{', '.join(SUPPORTED_VERSIONS)}. Install sglang=={SUPPORTED_VERSIONS[-1]}, or leave out "
            "--radix-cache-backend and keep SGLang's own cache."
        )


def check_options(option: Callable[[str], Any], options: Iterable[Option] = OPTIONS) -> None:
    """Refuse the first entry of `options` whose value, `option(field)`, is not a harmless one."""
    for entry in options:
        value = option(entry.field)
        if value not in entry.harmless:
            raise entry.refusal(value)


def check_settings(option: Callable[[str], Any]) -> None:
    """Refuse settings from the environment that are wrong, or that do not go with the options of the server."""
    from radix_pages_sglang.config import Settings

    settings = Settings.from_environment()
    device = option("device")
    if settings.gives_back or settings.backing == "mmap":
        check_options(option, WITH_A_BACKING)
        if device is not None:
            settings.backing_on(str(device))


def backing_refusal(kvcache: object) -> UnsupportedError:
    """The error for a KV pool whose memory cannot be given back, although that was asked for."""
    what = f"The KV pool {_names([type(kvcache)])}"
    if getattr(kvcache, "is_quantized_kv_cache", False):
        what += " with quantized KV"
    elif layout := getattr(kvcache, "kv_cache_layout", None):
        what += f" in {layout} layout"
    return UnsupportedError(
        f"{what} cannot give memory back yet: MHATokenToKVPool in nhd layout with plain KV can. Set "
        "RADIX_PAGES_MODE=place (and leave RADIX_PAGES_BACKING out), or serve a model with plain multi-head or "
        "grouped-query attention."
    )


def check_policy(policy: str, parameters: Any) -> None:
    """Refuse an eviction policy or parameter that `radix_pages.order` does not know."""
    from radix_pages.order import make_order

    try:
        if parameters is not None and not isinstance(parameters, dict):
            raise ValueError(f"its parameters must be a JSON object, got {parameters!r}")
        make_order(policy, parameters)
    except ValueError as error:
        culprit = f"--radix-eviction-policy {policy}"
        if parameters is not None:
            culprit += f" --radix-eviction-policy-config '{json.dumps(parameters, default=repr)}'"
        raise UnsupportedError(f"{culprit}: {error}. Correct or remove it.") from error


def check_components(params: CacheInitParams) -> None:
    """Refuse a tree that carries more than full-attention KV, however it was asked for."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    if params.enable_session_radix_cache:
        raise _option("enable_session_radix_cache").refusal(True)
    components = params.tree_components
    if components is not None and tuple(components) != (ComponentType.FULL,):
        culprit = f"A tree of the components {', '.join(component.name for component in components)}"
    elif params.component_registry_override:
        culprit = f"The tree component {_names(params.component_registry_override.values())}"
    else:
        return
    raise _refusal(culprit, "this tree carries full attention alone", _FULL_ATTENTION)


_FULL_ATTENTION = "Serve a model whose layers all use full attention"


def _check_model(model: ModelConfig, is_hybrid_swa: bool, is_hybrid_ssm: bool) -> None:
    if is_hybrid_ssm:
        because = "it is a Mamba or other hybrid-state model, and this tree keeps no recurrent state"
        instead = _FULL_ATTENTION
    elif is_hybrid_swa:
        because = "it is a hybrid sliding-window model with a second pool, and this tree tracks one"
        instead = "Add --disable-hybrid-swa-memory, which puts all layers in one pool where the model allows it"
    else:
        return
    architectures = ", ".join(model.hf_config.architectures)
    raise _refusal(f"--model-path {model.model_path} ({architectures})", because, instead)


def _check_pools(params: CacheInitParams) -> None:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import (
        MHATokenToKVPool,
        MHATokenToKVPoolFP4,
        MHATokenToKVPoolMXFP8,
        MLATokenToKVPool,
        MLATokenToKVPoolFP4,
        NoOpMHATokenToKVPool,
        ReqToTokenPool,
    )

    from radix_pages_sglang.allocator import RadixPagesPagedAllocator, RadixPagesTokenAllocator

    # Exact types: a subclass may give slots another meaning, as SGLang's striped and widened ones do.
    allocator = params.token_to_kv_pool_allocator
    stock, ours = (
        (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator),
        (RadixPagesTokenAllocator, RadixPagesPagedAllocator),
    )
    _check_type("slot allocator", allocator, *stock, *ours)
    _check_type(
        "KV pool",
        allocator.get_kvcache(),
        MHATokenToKVPool,
        MLATokenToKVPool,
        MHATokenToKVPoolFP4,
        MHATokenToKVPoolMXFP8,
        MLATokenToKVPoolFP4,
        NoOpMHATokenToKVPool,
    )
    _check_type("request pool", params.req_to_token_pool, ReqToTokenPool)


def _check_type(kind: str, found: object, *known: type) -> None:
    if type(found) not in known:
        raise _refusal(
            f"The {kind} {_names([type(found)])}",
            f"{', '.join(cls.__name__ for cls in known)} {'is' if len(known) == 1 else 'are'} supported",
            "Serve a plain full-attention model on CUDA or CPU without options that replace its pools",
        )


def _option(field: str) -> Option:
    return next(option for option in OPTIONS if option.field == field)


def _names(classes: Iterable[type]) -> str:
    return ", ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in classes)


def _refusal(culprit: str, because: str, instead: str) -> UnsupportedError:
    return UnsupportedError(
        f"{culprit} does not work with --radix-cache-backend {BACKEND}: {because}. "
        f"{instead}, or leave out --radix-cache-backend and keep SGLang's own cache."
    )
