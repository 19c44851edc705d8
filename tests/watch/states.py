"""States with all that the page shows, of ranks that nobody runs."""

from __future__ import annotations

from typing import Any

from tests.client.fake_server import FRAME_BYTES, observing, returning

PREFIX = {
    **{"tokens": 32, "own_tokens": 32, "spared_tokens": 64, "children": 2, "leaves": 3, "locks": 1, "hits": 9},
}


def _mapped(state: dict[str, Any]) -> dict[str, Any]:
    """Frames 0 to 4 are held: two by requests, two by the cache alone, frame 0 by both."""
    return state | {
        **{"page_bytes": FRAME_BYTES // 4, "hit_tokens": 600, "computed_tokens": 200, "protected_tokens": 96},
        **{"running_requests": 2, "waiting_requests": 1},
        "shared_prefixes": {"is_complete": True, "largest": [PREFIX]},
        "frame_holders": {"frames_per_cell": 1, "requests": "1*3 0*5", "cache": "1 0 2 3 4 0*3", "returned": "0*8"},
    }


def looking() -> dict[str, Any]:
    """A rank without a backing: frames 0 to 4 held, 5 to 7 empty."""
    return _mapped(observing())


def mapped() -> dict[str, Any]:
    """A rank that returns memory: frames 0 to 4 held, 5 empty, 6 and 7 returned."""
    state = _mapped(returning())
    state["frame_holders"]["returned"] = "0*6 1*2"
    return state


def emptied() -> dict[str, Any]:
    """The same rank after a trim of everything: only frame 0 has memory."""
    state = mapped()
    state |= {"held_pages": 0, "stranded_pages": 3, "empty_pages": 28, "held_frames": 1, "empty_frames": 7}
    state |= {"packed_floor": 0, "cached_tokens": 0, "protected_tokens": 0, "running_requests": 0}
    state["frame_holders"] = {"frames_per_cell": 1, "requests": "0*8", "cache": "0*8", "returned": "0 1*7"}
    state["shared_prefixes"]["largest"] = []
    state["memory"] |= {"committed_bytes": FRAME_BYTES, "resident_bytes": FRAME_BYTES}
    state["memory"] |= {"returned_bytes": 7 * FRAME_BYTES, "returned_bytes_total": 14 * FRAME_BYTES}
    return state
