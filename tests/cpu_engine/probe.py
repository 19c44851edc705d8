"""Run in a Python of its own, with the CPU engine's environment: prints as JSON what the tests beside it judge.

It has to be a process of its own because a process can load only one package named `sgl_kernel`.
"""

import importlib
import json
import os
import sys

import torch


def failure(call) -> str:
    """What `call` raises, as "Type: message"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def placeholders() -> dict[str, object]:
    import sgl_kernel
    from sgl_kernel import moe_fused_gate
    from sgl_kernel.kvcacheio import transfer_kv_direct
    from sgl_kernel.some.where import kernel

    return {
        "file": sgl_kernel.__file__,
        "name": failure(lambda: moe_fused_gate(1, top_k=2)),
        "submodule": failure(transfer_kv_direct),
        "nested": failure(kernel),
        "scalar_type": failure(lambda: importlib.import_module("sgl_kernel.scalar_type")),
        "allreduce": failure(lambda: importlib.import_module("sgl_kernel.allreduce")),
        "dunder": hasattr(sgl_kernel, "__wrapped__"),
        "probed operator": hasattr(torch.ops.sgl_kernel, "convert_weight_packed"),
        "cpus": sgl_kernel.threads.parse_cpus("0-2,5,7-8"),
    }


def start_up_operators() -> dict[str, object]:
    """What SGLang calls before it loads a model on ARM. Afterwards this process has one thread on one CPU."""
    os.environ["LOCAL_SIZE"] = "2"
    cpu = min(os.sched_getaffinity(0))
    line = torch.ops.sgl_kernel.init_cpu_threads_env(str(cpu))
    torch.ops.sgl_kernel.initialize(2, 0)
    return {
        "line": line == f"1 threads on CPUs {cpu}",
        "affinity": os.sched_getaffinity(0) == {cpu},
        "threads": torch.get_num_threads(),
        "shared memory": "LOCAL_SIZE" in os.environ,
    }


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def layers(dtype: torch.dtype) -> dict[str, object]:
    """How far SGLang's layers are from the same arithmetic in float64, and whether they wrote to their inputs."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import get_rope

    torch.set_default_dtype(dtype)
    random = torch.Generator().manual_seed(7)
    x, residual, query = (torch.randn(5, 64, generator=random) for _ in range(3))
    key = torch.randn(5, 32, generator=random)
    weight = torch.rand(64, generator=random) + 0.5
    inputs = [tensor.clone() for tensor in (x, residual, query, key)]

    norm = RMSNorm(64, eps=1e-5)
    norm.weight.data.copy_(weight)
    normed, summed = norm(x, residual)
    positions = torch.tensor([0, 1, 7, 40, 63])
    rotated_query, rotated_key = get_rope(16, 16, 64, 10000, True, dtype=dtype)(positions, query, key)

    total = x.double() + residual.double()
    return {
        "rmsnorm": distance(norm(x), rms(x.double(), weight)),
        "rmsnorm of a sum": distance(normed, rms(total, weight)),
        "sum": distance(summed, total),
        "silu_and_mul": distance(SiluAndMul()(x), gated(x.double())),
        "rotary query": distance(rotated_query, rotate(query.double(), positions)),
        "rotary key": distance(rotated_key, rotate(key.double(), positions)),
        "inputs kept": all(map(torch.equal, inputs, (x, residual, query, key))),
        "dtype kept": {normed.dtype, summed.dtype, rotated_query.dtype, rotated_key.dtype} == {dtype},
    }


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each row of `x` divided by the root of its mean square, times `weight`."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def gated(x: torch.Tensor) -> torch.Tensor:
    """The first half of each row, through SiLU, times the second half."""
    gate, value = x[:, :32], x[:, 32:]
    return gate / (1 + torch.exp(-gate)) * value


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Each head's pairs (i, i + 8) turned by the angle position * 10000 ** (-i / 8), as complex numbers."""
    heads = x.view(len(positions), -1, 16)
    turn = positions[:, None].double() * 10000.0 ** (-torch.arange(8).double() / 8)
    turned = torch.complex(heads[..., :8], heads[..., 8:]) * torch.exp(1j * turn)[:, None, :]
    return torch.cat([turned.real, turned.imag], -1).view_as(x)


if __name__ == "__main__":
    found = {
        "placeholders": placeholders(),
        "float32": layers(torch.float32),
        "bfloat16": layers(torch.bfloat16),
        "start-up": start_up_operators(),
    }
    json.dump(found, sys.stdout)
