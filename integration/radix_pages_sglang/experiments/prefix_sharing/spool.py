"""A trace on disk as arrays, read once and replayed often: a million requests take no more memory than a thousand.

What grows with the blocks asked (16 bytes each) lies in a temporary folder, what grows with the requests (32 bytes
each) in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radix_pages.units import Geometry
from radix_pages_sglang.experiments.traces import Trace
from radix_pages_sglang.serve import CommandError

if TYPE_CHECKING:
    from types import TracebackType

NEVER = np.iinfo(np.int32).max
"""The next use of a block that is not asked again."""

_PART = 1 << 21
"""So many blocks are sorted at a time: what bounds the memory."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a spool. `blocks`, `next_uses` and `uses` are views, an item a block of its prompt."""

    number: int
    seconds: float
    """Arrival, never before that of the request in front."""
    output_tokens: int
    output_blocks: int
    """What prompt and output need beyond the prompt's blocks."""
    blocks: NDArray[np.int64]
    next_uses: NDArray[np.int32]
    """The number of the request that asks for the block next, or NEVER."""
    uses: NDArray[np.int32]
    """How often the block was asked up to and including now."""


class Spool:
    """The requests of a trace that have a prompt, in its order. To be used as a context: then the folder goes.

    At most the first requests with `most_blocks` blocks together, at least one. `progress` hears of the bytes read.
    Raises CommandError as `Trace`, and for a trace whose ids name no prefixes.
    """

    def __init__(
        self,
        trace: Trace,
        most_blocks: int | None = None,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.path = trace.path
        self.format = trace.format
        self.block_tokens = trace.block_tokens
        self._folder = TemporaryDirectory(prefix="radix-pages-trace-")
        try:
            self._read(trace, most_blocks, progress)
            self._index()
        except BaseException:
            self._folder.cleanup()
            raise

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def __iter__(self) -> Iterator[Asked]:
        # Plain arrays: a slice of a memory map takes several times as long.
        blocks, next_uses, uses = (np.asarray(each) for each in (self._blocks, self._next_uses, self._uses))
        start = 0
        for number, stop in enumerate(self._stops):
            yield Asked(
                number,
                float(self._seconds[number]),
                int(self._output_tokens[number]),
                int(self._output_blocks[number]),
                blocks[start:stop],
                next_uses[start:stop],
                uses[start:stop],
            )
            start = stop

    def __len__(self) -> int:
        return len(self._stops)

    @property
    def num_asked(self) -> int:
        """Blocks of all prompts."""
        return len(self._blocks)

    @property
    def endless_hit_rate(self) -> float:
        """Of a cache that drops nothing."""
        return 1 - self.num_distinct / self.num_asked

    @property
    def has_arrivals(self) -> bool:
        """Whether requests arrive at different times."""
        return bool(self._seconds[-1] > self._seconds[0])

    def _read(self, trace: Trace, most_blocks: int | None, progress: Callable[[int], None]) -> None:
        geometry = Geometry(trace.block_tokens)
        stops, seconds = array("q"), array("d")
        output_tokens, output_blocks = array("q"), array("q")
        self.num_blank = 0
        """Requests without a prompt, which are left out."""
        self.is_whole = True
        """Whether this is all of the trace."""
        stop = bytes_read = 0
        with self._file("blocks").open("wb") as file:
            for request in trace:
                progress(trace.bytes_read - bytes_read)
                bytes_read = trace.bytes_read
                if not request.blocks:
                    self.num_blank += 1
                    continue
                if stop and most_blocks is not None and stop + len(request.blocks) > most_blocks:
                    self.is_whole = False
                    break
                file.write(array("q", request.blocks).tobytes())
                stop += len(request.blocks)
                stops.append(stop)
                seconds.append(request.seconds)
                output_tokens.append(request.output_tokens)
                held = geometry.pages_to_hold(request.input_tokens + request.output_tokens)
                output_blocks.append(held - geometry.pages_to_hold(request.input_tokens))
        if not stop:
            raise CommandError(f"no request of {self.path} has a prompt: give a trace with at least one")
        self.num_skipped = trace.skipped
        self._stops = np.frombuffer(stops, dtype=np.int64)
        self._seconds = np.maximum.accumulate(np.frombuffer(seconds, dtype=np.float64))
        self._output_tokens = np.frombuffer(output_tokens, dtype=np.int64)
        self._output_blocks = np.frombuffer(output_blocks, dtype=np.int64)
        self.longest = int(np.diff(self._stops, prepend=0).max())
        """Blocks of the longest prompt."""
        self._blocks = np.memmap(self._file("blocks"), dtype=np.int64, mode="r")

    def _file(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _index(self) -> None:
        """Find every block's next use and how often it was asked so far; a part of the ids at a time."""
        shape = self._blocks.shape
        self._next_uses = np.memmap(self._file("next_uses"), dtype=np.int32, mode="w+", shape=shape)
        self._uses = np.memmap(self._file("uses"), dtype=np.int32, mode="w+", shape=shape)
        num_parts = -(-len(self._blocks) // _PART)
        self.num_distinct = 0
        for part in range(num_parts):
            chosen = [
                start + np.flatnonzero(self._blocks[start : start + _PART] % num_parts == part)
                for start in range(0, len(self._blocks), _PART)
            ]
            self._index_part(np.concatenate(chosen))

    def _index_part(self, places: NDArray[np.int64]) -> None:
        """The same for all places of some ids."""
        ids = self._blocks[places]
        order = np.argsort(ids, kind="stable")
        ids, places = ids[order], places[order]
        requests = np.searchsorted(self._stops, places, side="right")
        is_first = np.ones(len(ids), dtype=np.bool_)
        is_first[1:] = ids[1:] != ids[:-1]
        self._check_prefixes(ids, places, requests, is_first)
        next_uses = np.full(len(ids), NEVER, dtype=np.int32)
        next_uses[:-1][~is_first[1:]] = requests[1:][~is_first[1:]]
        self._next_uses[places] = next_uses
        firsts = np.flatnonzero(is_first)
        self._uses[places] = np.arange(len(ids)) - firsts[np.cumsum(is_first) - 1] + 1
        self.num_distinct += len(firsts)

    def _check_prefixes(
        self,
        ids: NDArray[np.int64],
        places: NDArray[np.int64],
        requests: NDArray[np.int64],
        is_first: NDArray[np.bool_],
    ) -> None:
        """Raises CommandError where a block follows another one than before, or stands in a prompt twice."""
        starts_prompt = np.isin(places, self._stops, assume_unique=True) | (places == 0)
        before = self._blocks[np.maximum(places - 1, 0)]
        differs = (starts_prompt[1:] != starts_prompt[:-1]) | (~starts_prompt[1:] & (before[1:] != before[:-1]))
        wrong = np.flatnonzero(~is_first[1:] & differs)
        if len(wrong):
            one, other = requests[wrong[0]], requests[wrong[0] + 1]
            raise CommandError(
                f"{self.path}: block {ids[wrong[0]]} of prompts {one + 1} and {other + 1} follows two different "
                "blocks: hash_ids must name a block together with all that is before it"
            )
