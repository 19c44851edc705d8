"""The package is installed and nobody asks for it: the server is SGLang's own, in types, objects and results.

Two servers run the same conversations one after the other: one that has loaded our plugin without the flag, one that
was told not to load it. A plugin of the test's own reports what each of them is made of.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from radix_pages_sglang.counts import STATE_KEY
from radix_pages_sglang.cpu_engine.checkpoints import tiny_llama
from radix_pages_sglang.local_server import Server, serving
from tests.engine.load import chat_load

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ARGUMENTS = (
    *("--load-format", "dummy", "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "1024"),
    *("--chunked-prefill-size", "256", "--enable-metrics"),
)

PROBE = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    HookRegistry.register(target + ".get_internal_state", add_parts, HookType.AFTER)


def add_parts(result, controller, *args, **kwargs):
    import sys

    from sglang.srt.mem_cache.registry import registered_radix_cache_backends

    scheduler = controller.scheduler
    tree = scheduler.tree_cache
    allocator = scheduler.token_to_kv_pool_allocator
    parts = {
        "tree cache": tree,
        "tree core": tree.tree_core if hasattr(tree, "tree_core") else tree,
        "allocator": allocator,
        "kv pool": allocator.get_kvcache(),
        "request pool": scheduler.req_to_token_pool,
    }
    names = {what: f"{type(part).__module__}.{type(part).__name__}" for what, part in parts.items()}
    result.internal_state["parts"] = names
    result.internal_state["free pages"] = allocator.get_all_free_pages().tolist()
    result.internal_state["attributes"] = sorted(vars(allocator))
    result.internal_state["one allocator"] = tree.token_to_kv_pool_allocator is allocator
    result.internal_state["offered"] = sorted(registered_radix_cache_backends())
    result.internal_state["loaded"] = sorted(name for name in sys.modules if name.startswith("radix_pages"))
    return result
"""


def plugin(folder: Path, name: str, source: str) -> dict[str, str]:
    """Install `source` as an SGLang plugin called `name` in `folder`; the environment of servers that load it."""
    (folder / f"{name}.py").write_text(source)
    record = folder / f"{name}-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def internal_state(server: Server) -> dict:
    return json.loads(server.request("/server_info"))["internal_states"][0]


def evicted_tokens(metrics: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith("sglang:evicted_tokens_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def what_happens(environment: dict[str, str]) -> dict:
    """What a server without the flag is made of, and what it answers while it evicts all the time."""
    with serving(tiny_llama(), *ARGUMENTS, env=environment, backend=None) as server:
        before = internal_state(server)
        replies = chat_load(server, talks=12, concurrency=1, turns=3)
        again = server.generate(list(range(100, 164)), max_tokens=4)
        again = server.generate(list(range(100, 164)), max_tokens=4)
        return {
            "before": before,
            "after": internal_state(server),
            "replies": replies,
            "cached tokens": again["meta_info"]["cached_tokens"],
            "metrics": server.request("/metrics"),
            "log": server.log_text(),
        }


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    return plugin(tmp_path_factory.mktemp("probe"), "absent_probe", PROBE)


@pytest.fixture(scope="module")
def installed(probe):
    return what_happens(probe)


@pytest.fixture(scope="module")
def kept_out(probe):
    return what_happens({**probe, "SGLANG_PLUGINS": "absent_probe"})


def test_the_plugin_was_loaded_in_one_server_and_not_in_the_other(installed, kept_out):
    """Otherwise the tests below compare nothing."""
    assert "radix_pages_sglang" in installed["after"]["loaded"]
    assert kept_out["after"]["loaded"] == []
    assert set(installed["after"]["offered"]) - set(kept_out["after"]["offered"]) == {"radix_pages"}


def test_tree_cache_core_allocator_and_pools_are_sglangs_own(installed, kept_out):
    parts = installed["after"]["parts"]
    assert parts == kept_out["after"]["parts"]
    assert parts["allocator"] == "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
    assert parts["kv pool"] == "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
    assert all(part.startswith("sglang.") for part in parts.values())


def test_the_allocator_has_no_attribute_of_ours(installed, kept_out):
    assert installed["after"]["attributes"] == kept_out["after"]["attributes"]
    assert installed["after"]["one allocator"]


def test_replies_and_cache_hits_are_the_same(installed, kept_out):
    assert installed["replies"] == kept_out["replies"]
    assert installed["cached tokens"] == kept_out["cached tokens"] == 48


def test_after_much_eviction_the_same_pages_are_free_in_the_same_order(installed, kept_out):
    assert installed["before"]["free pages"] == kept_out["before"]["free pages"]
    assert installed["after"]["free pages"] == kept_out["after"]["free pages"]
    assert evicted_tokens(installed["metrics"]) == evicted_tokens(kept_out["metrics"]) > 0


def test_server_info_and_metrics_know_nothing_of_us(installed):
    assert STATE_KEY not in installed["after"]
    assert "radix_pages" not in installed["metrics"]


def test_the_log_does_not_speak_of_us(installed):
    assert [line for line in installed["log"].splitlines() if "radix_pages" in line] == []
