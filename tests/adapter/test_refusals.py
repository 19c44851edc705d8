"""Start-up refuses what this backend cannot serve, by the name the user typed, and says what to do (case C15)."""

import argparse
import dataclasses
import json
import subprocess
import sys
from unittest import mock

import pytest
import torch
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.arg_groups.hicache_hook import handle_hicache
from sglang.srt.arg_groups.kv_cache_hook import handle_cache_compatibility
from sglang.srt.arg_groups.kv_shard_hook import handle_kv_cache_sharding
from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context, restore_context, snapshot_context
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import fixtures as kit
from sglang.test.kits.unified_radix_cache.config import CacheConfig

from radix_pages_sglang import support
from radix_pages_sglang.support import BACKEND, OPTIONS, SUPPORTED_VERSIONS, UnsupportedError

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
ELSE = "leave out --radix-cache-backend and keep SGLang's own cache"

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
    },
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """name -> a folder with the config of a tiny model of that architecture"""
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(SHAPE | config))
    return lambda name: str(root / name)


@pytest.fixture(scope="module")
def model(model_path):
    return ModelConfig(model_path("llama"))


@pytest.fixture
def publish():
    """Publish SGLang's configuration with some options set, as a server does before it builds its cache."""
    overrides = []

    def published(**options):
        override = get_context().override_server_args(radix_cache_backend=BACKEND, **options)
        overrides.append(override)
        return override.install()

    yield published
    for override in reversed(overrides):
        override.restore()


def plain_pools(page_size=1, pool_class=MHATokenToKVPool):
    shape = (
        {"head_num": 2, "head_dim": 16}
        if pool_class is MHATokenToKVPool
        else {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
    )
    pool = pool_class(
        size=64,
        page_size=page_size,
        dtype=torch.float32,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        **shape,
    )
    common = {"dtype": torch.float32, "device": "cpu", "kvcache": pool, "need_sort": False}
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(64, **common)
    else:
        allocator = PagedTokenToKVPoolAllocator(64, page_size=page_size, **common)
    requests = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
    return {
        "token_to_kv_pool_allocator": allocator,
        "req_to_token_pool": requests,
        "page_size": page_size,
    }


@pytest.fixture(scope="module")
def hybrid_pools():
    """components -> the pools SGLang's own test kit builds for a model with these tree components"""

    def pools(*components):
        window = {"sliding_window_size": 4} if SWA in components else {}
        config = CacheConfig(components=components, num_layers=2, full_attention_layer_ids=(1,), kv_size=64, **window)
        state = snapshot_context()
        try:
            with mock.patch.object(kit, "get_device", return_value="cpu"):
                _, allocator, requests = kit.build_fixture(config)
        finally:
            restore_context(state)
        return {"token_to_kv_pool_allocator": allocator, "req_to_token_pool": requests, "page_size": 1}

    return pools


def context(server_args, model, pools, *, disable=False, **fields):
    """What SGLang hands to a radix-cache factory; `fields` replace its own or those of its params."""
    built_by_sglang = {
        "eviction_policy": server_args.radix_eviction_policy,
        "enable_session_radix_cache": server_args.enable_session_radix_cache,
    }
    names = {field.name for field in dataclasses.fields(CacheInitParams)}
    given = {name: fields.pop(name) for name in list(fields) if name in names}
    plain = {
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": disable,
        "tp_worker": None,
        "model_config": model,
        "tp_size": 1,
        "tp_rank": 0,
        "tp_group": None,
    }
    return TreeCacheBuildContext(
        server_args=server_args,
        params=CacheInitParams(disable=disable, **built_by_sglang | pools | given),
        **plain | fields,
    )


def refusal(ctx):
    with pytest.raises(UnsupportedError) as raised:
        support.check(ctx)
    return str(raised.value)


# What passes


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("pool_class", [MHATokenToKVPool, MLATokenToKVPool])
def test_a_full_attention_model_on_ordinary_pools_is_supported(publish, model, page_size, pool_class):
    support.check(context(publish(), model, plain_pools(page_size, pool_class)))


def test_eagle_with_a_draft_pool_is_supported(publish, model):
    pools = plain_pools()
    draft = plain_pools()["token_to_kv_pool_allocator"].get_kvcache()
    support.check(
        context(
            publish(speculative_algorithm="EAGLE"),
            model,
            pools,
            is_eagle=True,
            sidecar_draft_device_pools=(draft,),
        )
    )


def test_streaming_sessions_are_supported(publish, model):
    support.check(context(publish(enable_streaming_session=True), model, plain_pools()))


def test_a_disabled_cache_is_supported_and_its_eviction_policy_is_nobodys_business(publish, model):
    server_args = publish(disable_radix_cache=True)
    support.check(context(server_args, model, plain_pools(), disable=True, eviction_policy="whatever"))


# Options


@pytest.mark.parametrize(
    ("field", "value", "typed", "instead"),
    [
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache", "Remove"),
        ("enable_unified_cache_external_linker", True, "--enable-unified-cache-external-linker", "Remove"),
        ("enable_lmcache", True, "--enable-lmcache", "Remove --enable-lmcache"),
        ("enable_flexkv", True, "--enable-flexkv", "Remove --enable-flexkv"),
        ("enable_unified_memory", True, "--enable-unified-memory", "Remove"),
        ("enable_page_major_kv_layout", True, "--enable-page-major-kv-layout", "Remove"),
        ("enable_hisparse", True, "--enable-hisparse", "Remove --enable-hisparse"),
        ("enable_session_radix_cache", True, "--enable-session-radix-cache", "Remove"),
        ("enable_kv_cache_sharding", True, "--enable-kv-cache-sharding", "Remove"),
        ("dcp_size", 2, "--dcp-size 2", "Set --dcp-size 1"),
        ("dllm_algorithm", "LowConfidence", "--dllm-algorithm LowConfidence", "Serve an autoregressive model"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode prefill", "Serve prefill and decode from one"),
        ("disaggregation_mode", "decode", "--disaggregation-mode decode", "Serve prefill and decode from one"),
    ],
)
def test_an_option_that_reshapes_the_cache_is_refused_by_its_flag(publish, model, field, value, typed, instead):
    message = refusal(context(publish(**{field: value}), model, plain_pools()))
    assert message.startswith(f"{typed} does not work with --radix-cache-backend radix_pages: ")
    assert instead in message
    assert message.endswith(f"{ELSE}.")


def test_every_refused_option_is_one_that_sglang_has_and_leaves_harmless_by_default():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {flag: action.dest for action in parser._actions for flag in action.option_strings}
    default = ServerArgs(model_path="dummy")
    for option in OPTIONS:
        assert known.get(option.flag) == option.field
        assert getattr(default, option.field) in option.harmless


def test_what_the_factory_would_act_on_is_refused_even_when_no_flag_is_published(publish, model):
    assert "--enable-hierarchical-cache" in refusal(
        context(publish(), model, plain_pools(), enable_hierarchical_cache=True)
    )
    assert "--enable-session-radix-cache" in refusal(
        context(publish(), model, plain_pools(), enable_session_radix_cache=True)
    )


@pytest.mark.parametrize("field", ["enable_lmcache", "enable_flexkv"])
def test_a_second_cache_that_sglang_would_drop_silently_is_refused(publish, model, monkeypatch, field):
    monkeypatch.setitem(registry._RADIX_CACHE_REGISTRY, BACKEND, support.check)
    with pytest.raises(UnsupportedError, match="--" + field.replace("_", "-")):
        registry.create_tree_cache(context(publish(**{field: True}), model, plain_pools()))


# Eviction policies


@pytest.mark.parametrize(
    ("policy", "parameters", "culprit"),
    [
        ("oldest", None, "--radix-eviction-policy oldest: "),
        ("lru", {"a": 1}, "--radix-eviction-policy lru --radix-eviction-policy-config '{\"a\": 1}': "),
        ("slru", {"protected_threshold": "2"}, "protected_threshold must be a number"),
        ("tlru", {"threshold": 64, "estimate": 8}, "'estimate'"),
        ("slru", [1], "a JSON object, got [1]"),
    ],
)
def test_an_unknown_policy_or_parameter_is_refused_by_both_flags(publish, model, policy, parameters, culprit):
    message = refusal(
        context(publish(), model, plain_pools(), eviction_policy=policy, eviction_policy_config=parameters)
    )
    assert culprit in message
    assert message.startswith(f"--radix-eviction-policy {policy}")
    assert message.endswith("Correct or remove it.")


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [
        ("lru", None),
        ("lru", {}),
        ("LFU", None),
        ("slru", {"protected_threshold": 4}),
        ("tlru", {"threshold": 64, "next_prompt_estimate": 8}),
        ("priority", None),
    ],
)
def test_the_policies_of_sglangs_flag_are_supported(publish, model, policy, parameters):
    support.check(context(publish(), model, plain_pools(), eviction_policy=policy, eviction_policy_config=parameters))


# Models and pools


def test_a_hybrid_sliding_window_model_is_refused_with_the_flag_that_helps(publish, hybrid_pools, model_path):
    path = model_path("gpt-oss")
    message = refusal(context(publish(), ModelConfig(path), hybrid_pools(FULL, SWA), is_hybrid_swa=True))
    assert message.startswith(f"--model-path {path} (GptOssForCausalLM) does not work")
    assert "Add --disable-hybrid-swa-memory" in message
    assert ELSE in message


def test_a_mamba_model_is_refused(publish, hybrid_pools, model_path):
    path = model_path("falcon-h1")
    message = refusal(context(publish(), ModelConfig(path), hybrid_pools(FULL, MAMBA), is_hybrid_ssm=True))
    assert message.startswith(f"--model-path {path} (FalconH1ForCausalLM) does not work")
    assert "Serve a model whose layers all use full attention" in message
    assert ELSE in message


@pytest.mark.parametrize(
    ("components", "culprit"),
    [
        ((FULL, SWA), "slot allocator sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator"),
        ((FULL, MAMBA), "KV pool sglang.srt.mem_cache.memory_pool.HybridLinearKVPool"),
    ],
)
def test_an_unknown_allocator_or_pool_is_refused_by_its_class(publish, model, hybrid_pools, components, culprit):
    message = refusal(context(publish(), model, hybrid_pools(*components)))
    assert message.startswith(f"The {culprit} does not work")
    assert "Serve a plain full-attention model" in message
    assert ELSE in message


def test_a_subclass_of_a_known_allocator_is_unknown(publish, model):
    class Striped(PagedTokenToKVPoolAllocator):
        pass

    pools = plain_pools(16)
    pools["token_to_kv_pool_allocator"].__class__ = Striped
    assert "Striped" in refusal(context(publish(), model, pools))


def test_a_request_pool_with_more_than_slots_is_refused(publish, model, hybrid_pools):
    pools = plain_pools() | {"req_to_token_pool": hybrid_pools(FULL, MAMBA)["req_to_token_pool"]}
    assert "request pool sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool" in refusal(
        context(publish(), model, pools)
    )


def test_a_tree_with_more_than_full_attention_is_refused(publish, model):
    message = refusal(context(publish(), model, plain_pools(), tree_components=(FULL, SWA)))
    assert message.startswith("A tree of the components FULL, SWA does not work")
    assert ELSE in message


# Versions


def test_another_sglang_release_is_refused_and_the_supported_ones_are_listed(publish, model, monkeypatch):
    monkeypatch.setattr("sglang.version.__version__", "0.5.24")
    message = refusal(context(publish(enable_lmcache=True), model, plain_pools()))
    assert message.startswith("SGLang 0.5.24 does not work with --radix-cache-backend radix_pages")
    assert all(version in message for version in SUPPORTED_VERSIONS)
    assert f"Install sglang=={SUPPORTED_VERSIONS[-1]}" in message


def test_a_local_build_of_a_supported_release_is_supported(monkeypatch):
    monkeypatch.setattr("sglang.version.__version__", f"{SUPPORTED_VERSIONS[0]}+cu130")
    support.check_version()


def test_the_refusals_import_neither_torch_nor_sglang():
    code = "import sys, radix_pages_sglang.support; print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# Before any weight is loaded


@pytest.fixture
def resolve(monkeypatch, model_path):
    """Run the step of SGLang's argument resolution that the hook is registered on, for a tiny model."""
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    resolution_hooks.register_resolution_hook("handle_cache_compatibility")(support.check_arguments)

    def run(model="llama", backend=BACKEND, prepare=None, **options):
        server_args = ServerArgs(model_path=model_path(model), device="cpu", radix_cache_backend=backend, **options)
        if prepare:
            prepare(server_args)
        resolution_hooks.run_hook(handle_cache_compatibility, server_args)

    return run


def test_plain_arguments_resolve(resolve):
    resolve()
    resolve(model="gpt-oss", disable_hybrid_swa_memory=True)
    resolve(disable_radix_cache=True, radix_eviction_policy_config={"a": 1})


def test_a_model_whose_own_defaults_join_its_pools_resolves(resolve):
    def defaults(server_args):
        assert model_config_of(server_args).is_hybrid_swa
        declare_resolution(server_args, "the model's defaults", disable_hybrid_swa_memory=True)

    resolve(model="gpt-oss", prepare=defaults)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"enable_lmcache": True}, "--enable-lmcache does not work"),
        ({"dcp_size": 2, "tp_size": 2}, "--dcp-size 2 does not work"),
        ({"radix_eviction_policy": "tlru", "radix_eviction_policy_config": [1]}, "a JSON object"),
        ({"model": "gpt-oss"}, "GptOssForCausalLM"),
        ({"model": "falcon-h1"}, "FalconH1ForCausalLM"),
    ],
)
def test_arguments_are_refused_before_any_weight_is_loaded(resolve, options, culprit):
    with pytest.raises(UnsupportedError, match=culprit):
        resolve(**options)


def test_servers_that_do_not_select_this_backend_meet_only_sglangs_own_checks(resolve):
    resolve(backend=None, enable_lmcache=True)
    with pytest.raises(ValueError, match="mutually exclusive") as raised:
        resolve(backend=None, enable_lmcache=True, enable_hierarchical_cache=True)
    assert not isinstance(raised.value, UnsupportedError)


@pytest.mark.parametrize(
    ("step", "options", "flag"),
    [
        (
            handle_hicache,
            {"enable_unified_cache_external_linker": True},
            "--enable-unified-cache-external-linker",
        ),
        (
            handle_kv_cache_sharding,
            {"enable_kv_cache_sharding": True, "disaggregation_mode": "prefill"},
            "--radix-cache-backend",
        ),
    ],
)
def test_sglang_itself_refuses_some_combinations_first(step, options, flag):
    with pytest.raises(ValueError, match=flag):
        step(ServerArgs(model_path="dummy", radix_cache_backend=BACKEND, **options))
