"""Settings from the environment, read and validated once, at start-up."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from radix_pages.placement import PLACEMENTS
from radix_pages.units import Geometry

CPU_GRANULE_BYTES = 4096
CUDA_GRANULE_BYTES = 2 * 1024 * 1024
TOKEN_POOL_FRAME_SLOTS = 16
"""Slots of a frame at page_size 1, where a page is too small to account by."""


class SettingError(ValueError):
    """A setting that cannot be used; the message names the variable and says what it takes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says. `frame_tokens` and `frame_bytes` exclude each other; with neither, a default."""

    placement: str = "pack"
    frame_tokens: int | None = None
    frame_bytes: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read RADIX_PAGES_PLACEMENT, RADIX_PAGES_FRAME_TOKENS and RADIX_PAGES_FRAME_BYTES."""
        placement = environment.get("RADIX_PAGES_PLACEMENT", "pack")
        if placement not in PLACEMENTS:
            raise SettingError(f"RADIX_PAGES_PLACEMENT={placement}: choose one of {', '.join(PLACEMENTS)}")
        tokens = _count(environment, "RADIX_PAGES_FRAME_TOKENS")
        size = _count(environment, "RADIX_PAGES_FRAME_BYTES")
        if tokens is not None and size is not None:
            raise SettingError("set RADIX_PAGES_FRAME_TOKENS or RADIX_PAGES_FRAME_BYTES, not both")
        return cls(placement, tokens, size)


def frame_geometry(settings: Settings, page_size: int, row_bytes: list[int], on_cuda: bool) -> Geometry:
    """The geometry of a pool whose buffers take `row_bytes` each for one slot (one entry a layer and buffer).

    By default a frame is the smallest run of pages that fills whole granules in every buffer: 4 KiB on a CPU, 2 MiB
    on CUDA. Raises SettingError for a frame that is not a whole number of pages.
    """
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
        return Geometry(page_size, pages_per_frame=TOKEN_POOL_FRAME_SLOTS)
    granule = CUDA_GRANULE_BYTES if on_cuda else CPU_GRANULE_BYTES
    pages = math.lcm(*(granule // math.gcd(granule, page_size * row) for row in set(row_bytes)))
    return Geometry(page_size, pages_per_frame=pages)


def _count(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(f"{name}={text}: a whole number from 1 up is needed")
    return int(text)
