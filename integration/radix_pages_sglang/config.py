"""Settings from the environment, read and validated once, at start-up."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from radix_pages.placement import PLACEMENTS
from radix_pages.units import Geometry
from radix_pages_sglang.knobs import MODES, RETURNING
from radix_pages_sglang.sizes import parse_size

CPU_GRANULE_BYTES = 4096
CUDA_GRANULE_BYTES = 2 * 1024 * 1024
TOKEN_POOL_FRAME_SLOTS = 16
"""Slots of a frame at page_size 1, where a page is too small to account by."""

MAX_RESIDENT_BYTES = "RADIX_PAGES_MAX_RESIDENT_BYTES"
RESERVE_FRAMES = "RADIX_PAGES_RESERVE_FRAMES"
IDLE_TRIM_SECONDS = "RADIX_PAGES_IDLE_TRIM_SECONDS"
DEFAULT_IDLE_TRIM_SECONDS = 30.0
MOST_IDLE_TRIM_SECONDS = 86_400
FREE_FRAMES = "RADIX_PAGES_FREE_FRAMES"
TRIM_BUDGET_MS = "RADIX_PAGES_TRIM_BUDGET_MS"
DEFAULT_TRIM_BUDGET_MS = 5.0
MOST_TRIM_BUDGET_MS = 1000.0


class SettingError(ValueError):
    """A setting that cannot be used; the message names the variable and says what it takes."""


BACKINGS = ("none", "mmap", "auto")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says. `frame_tokens` and `frame_bytes` exclude each other; with neither, a default.

    `placement` None stands for SGLang's order in mode observe and for `pack` in the others. The bounds are None
    where there is none; `max_resident_bytes`, `reserve_frames`, `idle_trim_seconds` and `trim_budget_ms` belong to
    modes return and move, `free_frames` to move.
    """

    placement: str | None = None
    frame_tokens: int | None = None
    frame_bytes: int | None = None
    mode: str = "observe"
    backing: str = "auto"
    max_cached_tokens: int | None = None
    max_resident_bytes: int | None = None
    reserve_frames: int = 0
    idle_trim_seconds: float = DEFAULT_IDLE_TRIM_SECONDS
    free_frames: int = 0
    trim_budget_ms: float = DEFAULT_TRIM_BUDGET_MS

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the RADIX_PAGES_* variables that README's table of settings lists; raises SettingError."""
        tokens = _count(environment, "RADIX_PAGES_FRAME_TOKENS")
        size = _count(environment, "RADIX_PAGES_FRAME_BYTES")
        if tokens is not None and size is not None:
            raise SettingError("set RADIX_PAGES_FRAME_TOKENS or RADIX_PAGES_FRAME_BYTES, not both")
        mode = _choice(environment, "RADIX_PAGES_MODE", MODES) or "observe"
        backing = _choice(environment, "RADIX_PAGES_BACKING", BACKINGS) or "auto"
        if mode in RETURNING and backing == "none":
            raise SettingError(
                "RADIX_PAGES_BACKING=none cannot give memory back: set auto, or RADIX_PAGES_MODE=place"
            )
        for names, modes in (
            ((MAX_RESIDENT_BYTES, RESERVE_FRAMES, IDLE_TRIM_SECONDS, TRIM_BUDGET_MS), RETURNING),
            ((FREE_FRAMES,), ("move",)),
        ):
            for name in names:
                if name in environment and mode not in modes:
                    raise SettingError(
                        f"{name}={environment[name]} needs RADIX_PAGES_MODE={' or '.join(modes)}, the mode is {mode}"
                    )
        reserve = _count(environment, RESERVE_FRAMES, least=0)
        free = _count(environment, FREE_FRAMES, least=0)
        return cls(
            _choice(environment, "RADIX_PAGES_PLACEMENT", tuple(PLACEMENTS)),
            tokens,
            size,
            mode,
            backing,
            _count(environment, "RADIX_PAGES_MAX_CACHED_TOKENS", least=0),
            _size(environment, MAX_RESIDENT_BYTES),
            0 if reserve is None else reserve,
            _number(environment, IDLE_TRIM_SECONDS, "seconds", 0, MOST_IDLE_TRIM_SECONDS, DEFAULT_IDLE_TRIM_SECONDS),
            0 if free is None else free,
            _number(environment, TRIM_BUDGET_MS, "milliseconds", 0.1, MOST_TRIM_BUDGET_MS, DEFAULT_TRIM_BUDGET_MS),
        )

    @property
    def gives_back(self) -> bool:
        """Whether the mode is one that gives memory back."""
        return self.mode in RETURNING

    def placement_in(self, mode: str) -> str:
        """The rule by which pages are placed in `mode`."""
        return self.placement or ("stock" if mode == "observe" else "pack")

    def backing_on(self, device: str) -> str:
        """`none` or `mmap`, for a pool on `device`; raises SettingError for what cannot be had there."""
        if device == "cpu":
            return ("mmap" if self.gives_back else "none") if self.backing == "auto" else self.backing
        if self.gives_back or self.backing == "mmap":
            raise SettingError(
                f"memory of a KV pool on {device} cannot be given back yet: use RADIX_PAGES_MODE=place and leave "
                "RADIX_PAGES_BACKING out, or serve on a CPU"
            )
        return "none"


def frame_geometry(
    settings: Settings, page_size: int, row_bytes: list[int], on_cuda: bool, is_backed: bool = False
) -> Geometry:
    """The geometry of a pool whose buffers take `row_bytes` each for one slot (one entry a layer and buffer).

    By default a frame is the smallest run of pages that fills whole granules in every buffer: 4 KiB on a CPU, 2 MiB
    on CUDA. Raises SettingError for a frame that is not a whole number of pages, or, with a backing, of granules.
    """
    granule = CUDA_GRANULE_BYTES if on_cuda else CPU_GRANULE_BYTES
    least = math.lcm(*(granule // math.gcd(granule, page_size * row) for row in set(row_bytes)))
    geometry = _frame_geometry(settings, page_size, row_bytes, least, is_backed)
    if is_backed and geometry.pages_per_frame % least:
        raise SettingError(
            f"a frame of {geometry.slots(geometry.pages_per_frame)} tokens does not fill whole pages of {granule} "
            "bytes in every KV buffer, so its memory cannot be given back: set RADIX_PAGES_FRAME_TOKENS to a "
            f"multiple of {least * page_size}, or leave the frame size out"
        )
    return geometry


def _frame_geometry(
    settings: Settings, page_size: int, row_bytes: list[int], least: int, is_backed: bool
) -> Geometry:
    if settings.frame_tokens is not None:
        if settings.frame_tokens % page_size:
            raise SettingError(
                f"RADIX_PAGES_FRAME_TOKENS={settings.frame_tokens} is not a multiple of --page-size {page_size}"
            )
        return Geometry(page_size, pages_per_frame=settings.frame_tokens // page_size)
    if settings.frame_bytes is not None:
        page_bytes = page_size * sum(row_bytes)
        if not page_bytes or settings.frame_bytes % page_bytes:
            raise SettingError(
                f"RADIX_PAGES_FRAME_BYTES={settings.frame_bytes} is not a multiple of a page's {page_bytes} bytes "
                "over all layers and buffers"
            )
        return Geometry(page_size, pages_per_frame=settings.frame_bytes // page_bytes)
    if page_size == 1:
        slots = math.lcm(TOKEN_POOL_FRAME_SLOTS, least) if is_backed else TOKEN_POOL_FRAME_SLOTS
        return Geometry(page_size, pages_per_frame=slots)
    return Geometry(page_size, pages_per_frame=least)


def _choice(environment: Mapping[str, str], name: str, choices: Sequence[str]) -> str | None:
    text = environment.get(name)
    if text is not None and text not in choices:
        raise SettingError(f"{name}={text}: choose one of {', '.join(choices)}")
    return text


def _count(environment: Mapping[str, str], name: str, least: int = 1) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise SettingError(f"{name}={text}: a whole number from {least} up is needed")
    return int(text)


def _size(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise SettingError(f"{name}={text}: {error}") from error


def _number(environment: Mapping[str, str], name: str, unit: str, least: float, most: float, default: float) -> float:
    text = environment.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise SettingError(f"{name}={text}: {unit} from {least} to {most} are needed")
    return number
