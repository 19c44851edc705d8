"""Where a number comes from: commit, machine, seed and versions, the first line of every committed result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[3]
"""The checkout, where this package is installed from one."""

RESULTS = ROOT / "scripts" / "results"
"""Where committed results are."""

CODE = ("radix_pages", "integration", "scripts/*.py")


def provenance(seed: int | None = None) -> dict[str, str]:
    """Where a number comes from. A commit with a trailing + had uncommitted changes to code."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "commit": _commit() or f"none (radix-pages {version('radix-pages')})",
        "machine": f"{os.cpu_count()} cores, {cpu}",
        "seed": str(seed),
        "python": platform.python_version(),
        "torch": version("torch"),
        "sglang": version("sglang"),
    }


def first_line(seed: int | None = None) -> str:
    """`provenance` as one line of text."""
    return "# " + in_words(provenance(seed))


def in_words(found: dict[str, str]) -> str:
    """A `provenance` as a line for people."""
    return "; ".join(f"{key} {value}" for key, value in found.items())


def _commit() -> str:
    """The checkout's commit; empty where this package was not installed from one."""
    if not (ROOT / ".git").exists():
        return ""
    commit = _git("rev-parse", "--short", "HEAD")
    return commit + ("+" if _git("status", "--porcelain", "--", *CODE) else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip()
