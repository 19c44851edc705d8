"""The first line of every committed result: commit, machine, seed, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def provenance(seed: int | None = None) -> dict[str, str]:
    """Where a number comes from. A commit with a trailing + had uncommitted changes to code."""
    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "--", "radix_pages", "integration", "scripts/*.py"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "commit": commit + ("+" if dirty else ""),
        "machine": f"{os.cpu_count()} cores, {cpu}",
        "seed": str(seed),
        "python": platform.python_version(),
        "torch": version("torch"),
        "sglang": version("sglang"),
    }


def first_line(seed: int | None = None) -> str:
    """`provenance` as one line of text."""
    return "# " + "; ".join(f"{key} {value}" for key, value in provenance(seed).items())
