"""KV buffers whose physical memory can be given back frame by frame: one anonymous mapping on a CPU.

SGLang sees ordinary torch tensors. torch's own begin 64 bytes into an operating-system page, which would keep the
edges of every frame resident; here every buffer begins on a page of its own.
"""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from radix_pages.backing import CommitError, runs
from radix_pages_sglang.resident import resident_bytes

if TYPE_CHECKING:
    from radix_pages.ledger import Frames
    from radix_pages.units import Geometry

logger = logging.getLogger(__name__)

GRANULE = mmap.PAGESIZE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not in Python 3.11's mmap module


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer of the pool: where it begins in the mapping, bytes a slot, slots (the padding page included)."""

    offset: int
    row_bytes: int
    num_rows: int

    @property
    def size(self) -> int:
        return self.row_bytes * self.num_rows


class Mapping:
    """Private anonymous memory for all buffers of a pool, each on pages of its own; resident as it is touched.

    The mapping carries flags that its neighbours do not have, so the kernel keeps it apart from them and its Rss is
    that of the buffers alone. Huge pages are off: the kernel would make 4 KiB that were given back resident again.
    """

    def __init__(self, rows: Sequence[tuple[int, int]]) -> None:
        """`rows` are (bytes a slot, number of slots), one for each buffer."""
        self.buffers: list[Buffer] = []
        end = GRANULE  # the first and last page only keep other mappings at a distance
        for row_bytes, num_rows in rows:
            self.buffers.append(Buffer(end, row_bytes, num_rows))
            end = _round_up(end + row_bytes * num_rows)
        self.memory = mmap.mmap(-1, end + GRANULE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._inside = (GRANULE, end - GRANULE)
        self.memory.madvise(mmap.MADV_DONTDUMP, *self._inside)
        try:
            self.memory.madvise(mmap.MADV_NOHUGEPAGE, *self._inside)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages does not know the advice
                raise
        base = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.start = base + self._inside[0]
        self.end = self.start + self._inside[1]

    @property
    def size(self) -> int:
        """Bytes of all buffers, each rounded up to whole pages."""
        return self._inside[1]

    def tensor(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros over `buffer`'s memory; the memory lives as long as it does."""
        raw = torch.frombuffer(self.memory, dtype=torch.uint8, offset=buffer.offset, count=buffer.size)
        return raw.view(dtype).view(shape)


class MmapBacking:
    """`radix_pages.backing.Backing` over a Mapping, where a frame fills whole pages of every buffer."""

    def __init__(self, mapping: Mapping, geometry: Geometry) -> None:
        self.mapping = mapping
        frame_slots = geometry.slots(geometry.pages_per_frame)
        for buffer in mapping.buffers:
            if frame_slots * buffer.row_bytes % GRANULE:
                size = frame_slots * buffer.row_bytes
                raise ValueError(f"a frame takes {size} bytes of a buffer, which are not whole pages of {GRANULE}")
        self._can_populate = True
        # Of each buffer: bytes a frame takes in it, and where its last page ends, from its beginning.
        self._extents = [(frame_slots * buffer.row_bytes, _round_up(buffer.size)) for buffer in mapping.buffers]
        self.frame_bytes = frame_slots * sum(buffer.row_bytes for buffer in mapping.buffers)

    def commit(self, frames: Frames) -> None:
        try:
            self._each_range(frames, self._populate)
        except OSError as error:
            with suppress(OSError):  # what stays all the same is found when the system is next asked
                self.decommit(frames)
            raise CommitError(f"{len(frames)} frames could not be committed: {error}") from error

    def decommit(self, frames: Frames) -> None:
        self._each_range(frames, lambda start, size: self.mapping.memory.madvise(mmap.MADV_DONTNEED, start, size))

    def bytes_of(self, frames: Frames) -> int:
        return sum(
            int((np.minimum((frames + 1) * frame, end) - np.minimum(frames * frame, end)).sum())
            for frame, end in self._extents
        )

    def resident_bytes(self) -> int:
        return resident_bytes(self.mapping.start, self.mapping.end)

    def _each_range(self, frames: Frames, act: Callable[[int, int], None]) -> None:
        together = runs(frames)
        for buffer, (frame, end) in zip(self.mapping.buffers, self._extents, strict=True):
            for first, stop in together:
                start, size = first * frame, min(stop * frame, end) - first * frame
                if size > 0:
                    act(buffer.offset + start, size)

    def _populate(self, start: int, size: int) -> None:
        memory = self.mapping.memory
        if self._can_populate:
            try:
                memory.madvise(_POPULATE_WRITE, start, size)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self._can_populate = False
            logger.info("radix_pages: this kernel cannot commit memory ahead (Linux 5.14 can): pages are touched")
        for place in range(start, start + size, GRANULE):
            memory[place] = 0


_NORESERVE = 0x4000
"""MAP_NORESERVE: the pool may be larger than what the system would promise to fill."""


def _round_up(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def create_buffers(pool) -> Mapping:
    """Give `pool`, an MHATokenToKVPool in NHD layout on a CPU, its key and value buffers over one Mapping."""
    shapes = pool._kv_buffer_shapes()
    rows = [(int(np.prod(shape[1:])) * pool.store_dtype.itemsize, shape[0]) for shape in shapes]
    mapping = Mapping(rows * pool.layer_num)
    tensors = [
        mapping.tensor(buffer, shapes[place % 2], pool.store_dtype) for place, buffer in enumerate(mapping.buffers)
    ]
    pool.k_buffer, pool.v_buffer = tensors[::2], tensors[1::2]
    return mapping
