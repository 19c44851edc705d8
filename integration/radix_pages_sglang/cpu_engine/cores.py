"""Shares this machine's cores among server processes."""

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def physical_cores(topology: Path = TOPOLOGY) -> list[int]:
    """One CPU id for each physical core that this process may run on, ascending.

    Two hardware threads of a core share its arithmetic units, so a second one adds little to a matrix product.
    """
    first_of_core: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        core = siblings.read_text() if siblings.exists() else str(cpu)  # absent in some sandboxes
        first_of_core.setdefault(core, cpu)
    return list(first_of_core.values())


def split(cores: list[int], num_ranks: int) -> list[list[int]]:
    """`cores` cut into `num_ranks` even runs; with fewer cores than ranks, ranks take turns on a core each."""
    share = len(cores) // num_ranks
    if share == 0:
        return [[cores[rank % len(cores)]] for rank in range(num_ranks)]
    return [cores[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
