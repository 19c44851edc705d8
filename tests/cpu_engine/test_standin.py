"""The stand-in for SGLang's GPU kernels, and what SGLang computes with once it is in place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radix_pages_sglang.cpu_engine import STANDIN, environment

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def probe():
    """What probe.py found in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("probe.py"))],
        env=environment(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_stand_in_comes_before_the_gpu_package(probe):
    assert Path(probe["placeholders"]["file"]).is_relative_to(STANDIN)


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        ("name", "sgl_kernel.moe_fused_gate"),
        ("submodule", "sgl_kernel.kvcacheio.transfer_kv_direct"),
        ("nested", "sgl_kernel.some.where.kernel"),
    ],
)
def test_a_missing_kernel_can_be_imported_and_names_itself_when_called(probe, asked, kernel):
    assert probe["placeholders"][asked] == (
        f"NotImplementedError: {kernel} is a GPU kernel without a CPU stand-in: "
        "radix-pages runs Llama-family models on the CPU, anything else needs a GPU"
    )


@pytest.mark.parametrize("submodule", ["scalar_type", "allreduce"])
def test_a_submodule_that_sglang_replaces_itself_stays_absent(probe, submodule):
    assert probe["placeholders"][submodule].startswith("ModuleNotFoundError")


def test_what_sglang_and_python_probe_for_stays_absent(probe):
    """With `convert_weight_packed` defined SGLang would take the path of the AMX kernels."""
    assert probe["placeholders"]["dunder"] is False
    assert probe["placeholders"]["probed operator"] is False


def test_a_list_of_cpus_is_read_as_the_kernel_writes_it(probe):
    assert probe["placeholders"]["cpus"] == [0, 1, 2, 5, 7, 8]


def test_start_up_operators_bind_threads_and_decline_shared_memory(probe):
    assert probe["start-up"] == {"line": True, "affinity": True, "threads": 1, "shared memory": False}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "result", ["rmsnorm", "rmsnorm of a sum", "sum", "silu_and_mul", "rotary query", "rotary key"]
)
def test_a_layer_computes_what_float64_does(probe, dtype, result):
    assert probe[dtype][result] < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layers_keep_their_inputs_and_their_type(probe, dtype):
    """The GPU kernels add in place; torch's path returns the sum, and no caller may count on more."""
    assert probe[dtype]["inputs kept"] is True
    assert probe[dtype]["dtype kept"] is True
