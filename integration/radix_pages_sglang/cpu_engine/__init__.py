"""Runs SGLang on a machine without a GPU: what a server needs in its environment and on its command line."""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from radix_pages_sglang.cpu_engine import arguments, cores

STANDIN = Path(__file__).with_name("standin")
"""Folder that holds the stand-in for the package `sgl_kernel`; it has to come before the real one."""

FLAGS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "disable-overlap-schedule": None,
    "mem-fraction-static": "0.3",  # of the free memory; SGLang would take most of it for KV
    "max-total-tokens": "32768",  # filling even that fraction takes half a minute
}
"""Flags of `sglang serve` that a CPU needs, with their values; the last two bound the memory for KV."""


AMD_DRIVER = Path("/dev/kfd")
"""Exists where the driver of an AMD GPU is loaded."""


def is_needed() -> bool:
    """Whether there is neither an AMD GPU nor a CUDA driver that shows this process a device. Imports no torch."""
    if AMD_DRIVER.exists():
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    count = ctypes.c_int()
    return driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0


def environment(base: Mapping[str, str], argv: Sequence[str] = ()) -> dict[str, str]:
    """`base` with what a CPU server started with `argv` needs; only PYTHONPATH and the engine switch are replaced.

    SGLang spawns its processes, so the stand-in has to be on PYTHONPATH: an import hook would not reach them.
    """
    ranks = arguments.num_ranks(argv)
    shares = cores.split(cores.physical_cores(), ranks)
    defaults = {
        "OMP_NUM_THREADS": str(len(shares[0])),
        # Threads that spin while they wait slow a server twentyfold as soon as anything else wants a core.
        "OMP_WAIT_POLICY": "PASSIVE",
        # torch.compile would spend 20 s on the first request with a repetition penalty, and needs a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if ranks > 1:
        # Without a binding SGLang wants a NUMA node for each rank; the missing library keeps NCCL unloaded.
        defaults["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
        defaults["SGLANG_NCCL_SO_PATH"] = "/nonexistent"
    path = os.pathsep.join(filter(None, [str(STANDIN), base.get("PYTHONPATH")]))
    return {**defaults, **base, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": path}


def server_arguments(argv: Sequence[str]) -> list[str]:
    """`argv` of `sglang serve` with the FLAGS it lacks.

    They go before the flags given, so that a given flag wins even when abbreviated, and after a model named by
    position, which SGLang expects first.
    """
    given = arguments.options(argv)
    wanted = [flag for flag in FLAGS if flag not in given]
    if "mem-fraction-static" in given and "max-total-tokens" in wanted:
        wanted.remove("max-total-tokens")  # the fraction given is to be used
    added = [f"--{flag}={FLAGS[flag]}" if FLAGS[flag] else f"--{flag}" for flag in wanted]
    model = 1 if argv and not argv[0].startswith("-") else 0
    return [*argv[:model], *added, *argv[model:]]


def activate() -> None:
    """Have this process use the CPU engine. Call it before anything imports `sglang`; it cannot be undone."""
    os.environ.update(environment(os.environ))
    sys.path.insert(0, str(STANDIN))
