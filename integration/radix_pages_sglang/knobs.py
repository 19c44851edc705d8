"""The numbers that can be set while a server runs, by their names in SGLang's `/set_internal_state`, and the modes.

Server and commands share them; the standard library is all they need.
"""

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
