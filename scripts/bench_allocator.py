#!/usr/bin/env python
"""Our paged allocator, ledger and placement included, against SGLang's own, in one process, alternating.

65,536 pages of 16 tokens, half of them churned. One row per frame size and operation, with medians and their ratio.
This is the CPU path: SGLang's Triton kernels, which a GPU server uses, are not run and nothing is said about them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from radix_pages.units import Geometry
from radix_pages_sglang.allocator import RadixPagesPagedAllocator
from radix_pages_sglang.config import Settings
from radix_pages_sglang.experiments.provenance import first_line

NUM_PAGES, PAGE_SIZE, BATCH, PROMPT = 65_536, 16, 64, 512
FRAME_PAGES = (1, 4, 64, 128)


class Pool:
    """An allocator with half of its pages held, at random, and a batch of 64 requests that decode."""

    def __init__(self, ours: bool, frame_pages: int, seed: int) -> None:
        stock = PagedTokenToKVPoolAllocator(NUM_PAGES * PAGE_SIZE, PAGE_SIZE, torch.float16, "cpu", None, False)
        geometry = Geometry(PAGE_SIZE, pages_per_frame=frame_pages)
        self.allocator = RadixPagesPagedAllocator(stock, geometry, Settings(placement="pack")) if ours else stock
        pages = self.allocator.alloc(NUM_PAGES * PAGE_SIZE)[::PAGE_SIZE] // PAGE_SIZE
        churned = random.Random(seed).sample(range(NUM_PAGES), NUM_PAGES // 2)
        self.allocator.free_page_ids(pages[torch.tensor(churned)])
        self.lengths = torch.arange(BATCH) * 7 + 30
        starts = torch.zeros(BATCH, dtype=torch.int64)
        slots = self._extend(starts, self.lengths, torch.full((BATCH,), -1))
        self.last_slots = slots[self.lengths.cumsum(0) - 1]
        self.prompt = torch.empty(0)

    def _extend(self, prefixes: torch.Tensor, lengths: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        total = int((lengths - prefixes).sum())
        return self.allocator.alloc_extend(prefixes, prefixes, lengths, lengths, last, total)

    def extend(self) -> None:
        self.prompt = self._extend(torch.tensor([0]), torch.tensor([PROMPT]), torch.tensor([-1]))

    def free(self) -> None:
        self.allocator.free_segment(self.prompt, start_pos=0)

    def decode(self) -> None:
        self.lengths = self.lengths + 1
        self.last_slots = self.allocator.alloc_decode(self.lengths, self.lengths, self.last_slots)


def bench(frame_pages: int, rounds: int, seed: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each operation, stock and ours."""
    pools = {"stock": Pool(False, frame_pages, seed), "ours": Pool(True, frame_pages, seed)}
    times: dict[str, dict[str, list[float]]] = {
        op: {name: [] for name in pools} for op in ("extend", "decode", "free")
    }
    for index in range(rounds):
        for name in ("stock", "ours") if index % 2 else ("ours", "stock"):
            for op in times:
                call = getattr(pools[name], op)
                start = time.perf_counter()
                call()
                times[op][name].append(time.perf_counter() - start)
    return {op: (statistics.median(by["stock"]), statistics.median(by["ours"])) for op, by in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="chooses the churned pages")
    parser.add_argument("--rounds", type=int, default=500, help="rounds of each operation")
    parser.add_argument("--json", action="store_true", help="end with one line holding the worst ratios as JSON")
    args = parser.parse_args()
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    torch.set_num_threads(1)
    print(first_line(args.seed))
    print("CPU path only; nothing is said about the Triton kernels of a GPU server")
    print(f"{'operation':44} {'stock us':>9} {'ours us':>9} {'ratio':>7}")
    labels = {
        "extend": f"alloc_extend, a prompt of {PROMPT}",
        "decode": f"alloc_decode, batch {BATCH}",
        "free": f"free_segment, {PROMPT} tokens",
    }
    worst = dict.fromkeys(labels, 0.0)
    for frame_pages in FRAME_PAGES:
        for op, (stock, ours) in bench(frame_pages, args.rounds, args.seed).items():
            label = f"{labels[op]}, frames of {frame_pages} pages"
            print(f"{label:44} {stock * 1e6:9.1f} {ours * 1e6:9.1f} {ours / stock:7.3f}")
            worst[op] = max(worst[op], ours / stock)
    if args.json:
        print(json.dumps({f"{op}_ratio": round(ratio, 3) for op, ratio in worst.items()}))


if __name__ == "__main__":
    main()
