"""The options of the command, checked. Imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from radix_pages_sglang.experiments.traces import FORMATS, Trace, open_trace
from radix_pages_sglang.serve import CommandError

Part = TypeVar("Part")

POLICIES = ("lru", "lfu", "slru", "tlru", "fifo", "filo", "mru")
"""Every policy but `priority`: requests of a trace have none."""
CORES = ("ours", "rust", "python")
QUICK_BLOCKS = 300_000
CAPS = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Caps of the frontier, as shares of the pool."""
QUICK_CAPS = (0.5, 0.25)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. `sizes` None: those that fit the trace. `others` are the policies where requests last."""

    sizes: tuple[int, ...] | None
    policies: tuple[str, ...]
    others: tuple[str, ...]
    cores: tuple[str, ...]
    ms_per_token: tuple[float, ...]
    frame_tokens: tuple[int, ...]
    token_bytes: int
    caps: tuple[float, ...]
    lent: tuple[bool, ...]
    most_blocks: int | None


def make_plan(
    blocks: str | None,
    policy: str | None,
    core: str,
    ms_per_token: str,
    frame_tokens: str,
    token_bytes: int,
    *,
    frontier: bool,
    quick: bool,
) -> Plan:
    """The options, checked. Raises CommandError."""
    durations = tuple(dict.fromkeys(_listed("--ms-per-token", ms_per_token, _duration)))
    frames = tuple(_listed("--frame-tokens", frame_tokens, _count))
    policies = tuple(_names("--policy", policy, POLICIES)) if policy else ("lru",) if quick else POLICIES
    return Plan(
        tuple(sorted(set(_listed("--blocks", blocks, _count)))) if blocks else None,
        policies,
        policies if policy else ("lru",),
        tuple(_names("--core", core, CORES)),
        durations[:1] if quick else durations,
        frames[:1] if quick else frames,
        token_bytes,
        () if not frontier else QUICK_CAPS if quick else CAPS,
        (True,) if quick else (True, False),
        QUICK_BLOCKS if quick else None,
    )


def _listed(option: str, text: str, parse: Callable[[str], Part]) -> list[Part]:
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise CommandError(f"{option} {text}: {error}") from None


def _names(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    def parse(name: str) -> str:
        if name.lower() not in allowed:
            raise ValueError(f"{name!r} is none of {', '.join(allowed)}")
        return name.lower()

    return list(dict.fromkeys(_listed(option, text, parse)))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise ValueError(f"{text!r} is not a whole number from 1 to 2,147,483,647; separate several by commas")
    return int(text)


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ValueError(f"{text!r} is not a number of milliseconds from 0; separate several by commas")
    return value


def opened(paths: Sequence[Path] | None, skip_bad: bool, block_tokens: int | None) -> dict[str, Trace]:
    """The traces by the names they have in the report: the file's without its ending, or the whole path."""
    if not paths:
        raise CommandError(f"no trace to replay: none comes with this package; give --trace FILE, {FORMATS}")
    paths = list(dict.fromkeys(paths))
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    return {
        name: open_trace(path, skip_bad=skip_bad, block_tokens=block_tokens)
        for name, path in zip(names, paths, strict=True)
    }


def check_frames(traces: dict[str, Trace], plan: Plan) -> None:
    for name, trace in traces.items():
        for tokens in plan.frame_tokens:
            if tokens % trace.block_tokens:
                raise CommandError(
                    f"--frame-tokens {tokens} is no whole number of {name}'s blocks of {trace.block_tokens} tokens: "
                    f"give a multiple of {trace.block_tokens}"
                )
