"""The two operators that SGLang calls at start-up on an ARM machine, before any model is loaded.

Signatures and call order: SGLang 0.5.23, `sglang/srt/distributed/bootstrap.py`, `_init_cpu_threads_env`.
On x86 it calls neither, because it takes this package to lack AMX support.
"""

import os

import torch


def parse_cpus(text: str) -> list[int]:
    """The CPU ids in a list such as "0-2,5", which is how the kernel writes them: [0, 1, 2, 5]."""
    cpus = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def init_cpu_threads_env(cpu_ids: str) -> str:
    """Keep the calling thread, and threads it starts later, on `cpu_ids` with one torch thread for each.

    Returns a line to log. The kernel binds each thread to a CPU of its own; this binds them to the set.
    """
    cpus = parse_cpus(cpu_ids)
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(len(cpus))
    return f"{len(cpus)} threads on CPUs {cpu_ids}"


def initialize(size: int, rank: int) -> None:
    """Decline the all-reduce over shared memory that SGLang sets up here, so that it goes through gloo.

    SGLang uses shared memory when a group is as large as $LOCAL_SIZE, set just before this call; without the
    variable it calls torch.distributed. `size` and `rank` are those of the tensor-parallel group.
    """
    os.environ.pop("LOCAL_SIZE", None)


LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
LIBRARY.define("init_cpu_threads_env(str cpu_ids) -> str")
LIBRARY.define("initialize(int size, int rank) -> ()")
LIBRARY.impl("init_cpu_threads_env", init_cpu_threads_env, "CompositeExplicitAutograd")
LIBRARY.impl("initialize", initialize, "CompositeExplicitAutograd")
