"""The numbers that can be set while a server runs, by their names in SGLang's `/set_internal_state`, and the modes.

Server and commands share them; the standard library is all they need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MODES = ("observe", "place", "return", "move")
"""Each does what the ones before it do: count frames, place pages, give memory back, move pages to give back more.
Numbered in this order, which is what the knob MODE takes."""

RETURNING = ("return", "move")
"""The modes that give memory back."""

MODE = "radix_pages_mode"
MAX_CACHED_TOKENS = "radix_pages_max_cached_tokens"
MAX_RESIDENT_BYTES = "radix_pages_max_resident_bytes"
RESERVE_FRAMES = "radix_pages_reserve_frames"
IDLE_TRIM_SECONDS = "radix_pages_idle_trim_seconds"
FREE_FRAMES = "radix_pages_free_frames"
TRIM = "radix_pages_trim"

NO_BOUND = -1
"""The value of MAX_CACHED_TOKENS or MAX_RESIDENT_BYTES that takes the bound away."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A number that can be set while the server runs: a whole one unless `is_whole` is False."""

    value: float
    minimum: float
    maximum: float
    is_whole: bool = True
    can_be_unbounded: bool = False

    def complaint(self, name: str, value: object) -> str:
        """Why `value` cannot be set, in a sentence; empty if it can."""
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (isinstance(value, float) and not math.isfinite(value))  # raises for ints beyond a float's range
        ):
            return f"{name} takes a number, not {value!r}."
        if self.is_whole and value != int(value):
            return f"{name} takes a whole number, not {value!r}."
        if self.minimum <= value <= self.maximum or (self.can_be_unbounded and value == NO_BOUND):
            return ""
        unbounded = f", or {NO_BOUND} for no bound" if self.can_be_unbounded else ""
        return f"{name}={value} is out of the range [{self.minimum}, {self.maximum}]{unbounded}."
