"""What a picture of one rank's memory needs: who holds the pages of every frame, and which prefixes are shared.

Made anew each time `/server_info` asks, from what is there: the rows of running requests and sessions say which pages
they use, and whatever else is held is cached. Nothing is counted while requests run, and no page of the tree is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radix_pages.prefixes import shared_prefixes
from radix_pages_sglang import convert

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    from radix_pages.ledger import FrameCounts, Ledger, Pages
    from radix_pages.tree import RadixTree
    from radix_pages.units import Geometry

MOST_CELLS = 4096
"""Frames that a map tells one by one; of more, several neighbours together."""

MOST_PREFIXES = 10


@dataclass(frozen=True, slots=True)
class Requests:
    """The rows of the requests that run now, and how many requests wait."""

    rows: tuple[ReqKvInfo, ...] = ()
    waiting: int = 0


def requests_of(scheduler) -> Requests:
    """Who runs and waits: also those of the last batch, which have not joined the running one yet."""
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    requests = [request for batch in batches for request in batch.reqs]
    if scheduler.chunked_req is not None:
        requests.append(scheduler.chunked_req)
    rows = {request.kv.req_pool_idx: request.kv for request in requests if request.kv.holds_kv}
    return Requests(tuple(rows.values()), len(scheduler.waiting_queue))


def pages_in_rows(rows: Iterable[ReqKvInfo], req_to_token: torch.Tensor, geometry: Geometry) -> Pages:
    """The pages that requests and sessions use, their shared prefixes included; one may be named several times.

    Waits for a device.
    """
    firsts = [req_to_token[kv.req_pool_idx, : kv.kv_allocated_len : geometry.page_size] for kv in rows if kv.holds_kv]
    slots = convert.host_array(convert.concatenated(firsts, req_to_token.device))
    return geometry.page_of(slots.astype(np.int64))


def frame_holders(ledger: Ledger, used: Pages, most_cells: int = MOST_CELLS) -> dict[str, object]:
    """How many pages of each frame are `used` by running requests and sessions, how many only the cache holds, and
    which frames are returned; as `runs`, one number a cell of `frames_per_cell` neighbours.

    SGLang's padding page is nobody's.
    """
    geometry, num_frames = ledger.geometry, ledger.num_frames
    is_used = np.zeros(ledger.num_pages + 1, dtype=np.bool_)
    is_used[used] = True
    is_used &= ledger.is_held
    is_used[0] = False
    of_requests = np.bincount(geometry.frame_of(np.flatnonzero(is_used)), minlength=num_frames)
    cached = ledger.occupancy - of_requests
    cached[0] -= 1
    per_cell = -(-num_frames // most_cells)
    starts = np.arange(0, num_frames, per_cell)
    numbers = {"requests": of_requests, "cache": cached, "returned": ledger.is_returned.astype(np.int64)}
    cells = {name: runs(np.add.reduceat(per_frame, starts)) for name, per_frame in numbers.items()}
    return {"frames_per_cell": per_cell, **cells}


def runs(numbers: FrameCounts | Pages) -> str:
    """Numbers as text, repeated ones once: "0*3 16 7*2" is 0 0 0 16 7 7."""
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
    lengths = np.diff(np.append(starts, len(numbers)))
    pairs = zip(numbers[starts], lengths, strict=True)
    return " ".join(f"{number}*{length}" if length > 1 else f"{number}" for number, length in pairs)


def largest_prefixes(tree: RadixTree, geometry: Geometry) -> dict[str, object]:
    """The shared prefixes that spare most, in tokens."""
    found = shared_prefixes(tree.root, MOST_PREFIXES)
    return {
        "is_complete": found.is_complete,
        "largest": [
            {
                "tokens": geometry.slots(prefix.num_pages),
                "own_tokens": geometry.slots(prefix.own_pages),
                "spared_tokens": geometry.slots(prefix.spared_pages),
                "children": prefix.children,
                "leaves": prefix.leaves,
                "locks": prefix.locks,
                "hits": prefix.hits,
            }
            for prefix in found.largest
        ],
    }
