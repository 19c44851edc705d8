"""Which requests run at a time: durations are modelled, so many milliseconds for every token of the answer.

With 0 a request ends before the next one starts and its answer takes no room. Else its prompt's blocks are locked
from its arrival to its end, and its answer takes as many blocks as it will need, from its arrival on; at the end
these are free, because a trace does not say what follows the answer.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from radix_pages_sglang.experiments.prefix_sharing.spool import Asked, Spool


class Server(Protocol):
    """Serves requests of a trace and keeps what it can."""

    def start(self, request: Asked, output_blocks: int) -> Any:
        """Find or make room for the prompt and lock it, and take `output_blocks` more; what `end` has to be given."""

    def end(self, held: Any) -> None:
        """Unlock the prompt and free the answer's blocks."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most blocks that running requests ever needed at once: of prompts, each block once, and with answers."""

    prompts: int
    all: int


def serve(spool: Spool, server: Server, ms_per_token: float) -> Iterator[Asked]:
    """Let `server` serve the whole trace; yields every request once it was started, if it has no duration, ended."""
    ends: list[tuple[float, int, Any]] = []
    for request in spool:
        while ends and ends[0][0] <= request.seconds:
            server.end(heapq.heappop(ends)[2])
        if ms_per_token:
            held = server.start(request, request.output_blocks)
            seconds = request.seconds + request.output_tokens * ms_per_token / 1000
            heapq.heappush(ends, (seconds, request.number, held))
        else:
            server.end(server.start(request, 0))
        yield request


def pinned_peak(spool: Spool, ms_per_token: float) -> Peak:
    """What a pool must have room for, whatever it keeps: smaller ones cannot serve this trace without waiting."""
    counting = _Counting()
    for _ in serve(spool, counting, ms_per_token):
        pass
    return Peak(counting.most_pinned, counting.most)


class _Counting:
    """Keeps nothing and counts what runs."""

    def __init__(self) -> None:
        self.pins: Counter[int] = Counter()
        self.num_output = self.most_pinned = self.most = 0

    def start(self, request: Asked, output_blocks: int) -> tuple[list[int], int]:
        blocks = request.blocks.tolist()
        self.pins.update(blocks)
        self.num_output += output_blocks
        self.most_pinned = max(self.most_pinned, len(self.pins))
        self.most = max(self.most, len(self.pins) + self.num_output)
        return blocks, output_blocks

    def end(self, held: tuple[list[int], int]) -> None:
        blocks, output_blocks = held
        self.num_output -= output_blocks
        for block in blocks:
            self.pins[block] -= 1
            if not self.pins[block]:
                del self.pins[block]
