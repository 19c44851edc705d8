"""A server's HTTP API without a server: states as `/server_info` carries them, and knobs that can be set."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MIB = 1024**2
FRAME_BYTES = MIB


def observing() -> dict[str, Any]:
    """A rank that has no backing and may only look: 8 frames of 4 pages of 16 tokens, 5 of them held."""
    return {
        **{"evictions": 3, "asked_tokens": 90, "asked_page_rounded": 96, "evicted_tokens": 96, "unmet_tokens": 0},
        **{"pages_reclaimed": 6, "eviction_seconds": 0.01, "page_size": 16, "pages_per_frame": 4},
        **{"held_pages": 12, "stranded_pages": 7, "empty_pages": 12, "held_frames": 5, "empty_frames": 3},
        **{"packed_floor": 3, "frames_emptied": 2, "frames_refilled": 7, "cached_tokens": 62},
        "frames_by_occupancy": {"empty": 3, "to 25%": 1, "to 50%": 1, "to 75%": 1, "below 100%": 0, "full": 1},
        **{"mode": "observe", "highest_mode": "observe", "degraded": "", "backing": "none", "memory": None},
        "knobs": {
            "radix_pages_mode": {"value": 0, "minimum": 0, "maximum": 0},
            "radix_pages_max_cached_tokens": {"value": -1, "minimum": 0, "maximum": 496},
        },
        "frame_map": {"frames_per_cell": 1, "cells": "1123#..."},
    }


def returning() -> dict[str, Any]:
    """The same rank with a backing, in the mode that returns memory: two of its empty frames are out."""
    state = observing()
    state |= {"mode": "return", "highest_mode": "return", "backing": "mmap"}
    state["memory"] = {
        **{"pid": 4711, "region": [4096, 4096 + 8 * FRAME_BYTES], "frame_bytes": FRAME_BYTES},
        **{"total_bytes": 8 * FRAME_BYTES, "committed_frames": 6, "committed_bytes": 6 * FRAME_BYTES},
        **{"resident_bytes": 5 * FRAME_BYTES + MIB // 2, "returned_frames": 2, "returned_bytes": 2 * FRAME_BYTES},
        **{"returned_frames_total": 9, "returned_bytes_total": 9 * FRAME_BYTES, "commit_failures": 0},
        **{"ceiling_refusals": 0, "trims": 4, "trim_seconds": 0.125, "regrown_frames": 1, "over_ceiling_frames": 0},
    }
    state["knobs"] = {
        "radix_pages_mode": {"value": 2, "minimum": 0, "maximum": 2},
        "radix_pages_max_cached_tokens": {"value": -1, "minimum": 0, "maximum": 496},
        "radix_pages_max_resident_bytes": {"value": -1, "minimum": 2 * FRAME_BYTES, "maximum": 8 * FRAME_BYTES},
        "radix_pages_reserve_frames": {"value": 0, "minimum": 0, "maximum": 7},
        "radix_pages_idle_trim_seconds": {"value": 0, "minimum": 0, "maximum": 86400},
        "radix_pages_trim": {"value": 0, "minimum": 1, "maximum": 1},
    }
    state["frame_map"]["cells"] = "1123#.--"
    return state


class FakeServer:
    """Answers as SGLang does: `states` for its ranks, changes collected in `changes` and carried out.

    Ranks in `refusing` refuse every change; with `slow_trim` a trim is accepted and never done. `admin_key` guards
    changes, `key` everything else. An `answer` of status and text takes the place of every other answer.
    """

    def __init__(self, *states: dict[str, Any]) -> None:
        self.url = ""
        self.states = list(states)
        self.changes: list[dict[str, float]] = []
        self.refusing: set[int] = set()
        self.slow_trim = False
        self.key = self.admin_key = ""
        self.answer: tuple[int, str] | None = None

    def reply(self, path: str, authorization: str, body: Any) -> tuple[int, str]:
        if self.answer is not None:
            return self.answer
        key = self.key if body is None else self.admin_key or self.key
        if key and authorization != f"Bearer {key}":
            return 401, '{"error": "Unauthorized"}'
        if body is None and path == "/server_info":
            ranks = [{"radix_pages": state} if state else {} for state in self.states]
            return 200, json.dumps({"internal_states": ranks})
        if body is not None and path == "/set_internal_state":
            self.changes.append(body["server_args"])
            return 200, json.dumps([self.change(rank, **body["server_args"]) for rank in range(len(self.states))])
        return 404, "{}"

    def change(self, rank: int, **knobs: float) -> bool:
        if rank in self.refusing:
            return False
        state = self.states[rank]
        for knob, value in knobs.items():
            if knob != "radix_pages_trim":
                state["knobs"][knob]["value"] = value
            elif not self.slow_trim:
                memory = state["memory"]
                memory["trims"] += 1
                memory["returned_frames_total"] += 1
                memory["returned_bytes_total"] += FRAME_BYTES
                memory["resident_bytes"] -= FRAME_BYTES
        return True


@contextmanager
def listening(server: FakeServer) -> Iterator[FakeServer]:
    """`server` behind a port of this host, its `url` set."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.finish_with(None)

        def do_POST(self) -> None:
            self.finish_with(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def finish_with(self, body: Any) -> None:
            status, text = server.reply(self.path, self.headers.get("Authorization", ""), body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
