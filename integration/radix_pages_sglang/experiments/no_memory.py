"""A backing for pools without KV. Imports numpy alone, through the core."""

from __future__ import annotations

from radix_pages.ledger import Frames


class NoMemory:
    """`radix_pages.backing.Backing` for pools without KV: frames are counted, a byte each."""

    frame_bytes = 1

    def commit(self, frames: Frames) -> None:
        pass

    def decommit(self, frames: Frames) -> None:
        pass

    def bytes_of(self, frames: Frames) -> int:
        return len(frames)

    def resident_bytes(self) -> int:
        return 0
