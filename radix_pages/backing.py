"""Backing: the physical memory of a pool's frames, which can be had and given back frame by frame."""

from __future__ import annotations

from typing import Protocol

from radix_pages.ledger import Frames


class CommitError(RuntimeError):
    """Physical memory for some frames could not be had. The frames that were asked for have none."""


class Backing(Protocol):
    """Physical memory behind the frames of one pool.

    A frame's memory is `frame_bytes` over all buffers that the slots of the frame index (the pool's last frame may
    take less). What a frame held is lost with its memory; committed anew it reads as zeros. Calls name each frame
    once, in ascending order, so that neighbours can be treated together.
    """

    frame_bytes: int
    """Bytes of a whole frame, a multiple of the granule in every buffer."""

    def commit(self, frames: Frames) -> None:
        """Give `frames` memory: all of them, or none and a CommitError. May take long: the kernel clears pages."""

    def decommit(self, frames: Frames) -> None:
        """Give the memory of `frames` back to the operating system or driver. Nothing may use them any more.

        Raises OSError where the system refuses; some of them may then keep their memory.
        """

    def bytes_of(self, frames: Frames) -> int:
        """Bytes that `frames` take when they are committed."""

    def resident_bytes(self) -> int:
        """What the operating system says these buffers occupy now. For reports and checks: may take milliseconds."""


def runs(frames: Frames) -> list[tuple[int, int]]:
    """Neighbours taken together: ascending `frames` as half-open runs (first, stop)."""
    found: list[tuple[int, int]] = []
    for frame in frames.tolist():
        if found and found[-1][1] == frame:
            found[-1] = (found[-1][0], frame + 1)
        else:
            found.append((frame, frame + 1))
    return found
