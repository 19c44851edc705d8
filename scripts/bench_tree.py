#!/usr/bin/env python
"""Our tree core against SGLang's Rust core, both behind SGLang's UnifiedRadixCache, in one process, alternating.

Prints one row per operation with the medians and their ratio, and what a cached token costs in bookkeeping memory.
Not measured here: a device (everything is on the CPU), concurrency, attention.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_pages_sglang.experiments.cores import CLASSES, make_cache, prepare
from radix_pages_sglang.experiments.provenance import first_line

CONVERSATIONS, TURNS = 2000, 5


def conversations(seed: int) -> list[list[array]]:
    """Prompts of 2,000 conversations at each of 5 turns: 20 shared system prompts of 128 tokens, 64 more a turn."""
    rng = random.Random(seed)

    def tokens(n: int) -> array:
        return array("q", [rng.randrange(32_000) for _ in range(n)])

    systems = [tokens(128) for _ in range(20)]
    result = []
    for i in range(CONVERSATIONS):
        prompt, turns = systems[i % 20], []
        for _ in range(TURNS):
            prompt = prompt + tokens(64)
            turns.append(prompt)
        result.append(turns)
    return result


def timed(call) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def bench_access(page_size: int, talks: list[list[array]]) -> dict[str, dict[str, float]]:
    """Median seconds of match, lock + unlock and insert while the conversations grow turn by turn."""
    caches = {name: make_cache(name, page_size, 4_000_000) for name in ("rust", "ours")}
    times: dict[str, dict[str, list[float]]] = {}
    for turn in range(TURNS):
        for index, talk in enumerate(talks):
            names = ("rust", "ours") if index % 2 else ("ours", "rust")
            for name in names:
                cache, prompt = caches[name], talk[turn]
                key = RadixKey(prompt, limit=len(prompt) - 1)
                seconds, match = timed(lambda c=cache, k=key: c.match_prefix(MatchPrefixParams(key=k)))
                times.setdefault("match", {}).setdefault(name, []).append(seconds)
                node = match.last_device_node
                if turn == TURNS - 1:  # by now the path has six nodes
                    seconds, _ = timed(lambda c=cache, n=node: c.unlock(c.lock(n)))
                    times.setdefault("lock", {}).setdefault(name, []).append(seconds)
                key = RadixKey(prompt).page_aligned(page_size)
                value = torch.arange(len(key))
                params = InsertParams(key=key, value=value, prev_prefix_len=match.device_prefix_len)
                seconds, _ = timed(lambda c=cache, p=params: c.insert(p))
                times.setdefault("insert", {}).setdefault(name, []).append(seconds)
    return {op: {name: statistics.median(values) for name, values in by.items()} for op, by in times.items()}


class FullPool:
    """A cache whose pool is full with one-page leaves; each step evicts 64 tokens and inserts 64."""

    def __init__(self, name: str, leaves: int, page_size: int = 64) -> None:
        self.cache = make_cache(name, page_size, leaves * page_size)
        self.page_size = page_size
        self.next = 0
        for _ in range(leaves):
            self._insert()

    def _insert(self) -> None:
        value = self.cache.token_to_kv_pool_allocator.alloc(self.page_size)
        self.next += 1
        key = RadixKey(array("q", [self.next] + [7] * (self.page_size - 1)))
        self.cache.insert(InsertParams(key=key, value=value))

    def step(self) -> None:
        self.cache.evict_for_alloc(EvictParams(num_tokens=self.page_size))
        self._insert()


def bench_evict(steps: int) -> dict[str, float]:
    """Median seconds of one evict + insert step, by cache and number of leaves."""
    pools = {
        "rust 50K": FullPool("rust", 50_000),
        "ours 1K": FullPool("ours", 1_000),
        "ours 50K": FullPool("ours", 50_000),
        "ours 100K": FullPool("ours", 100_000),
    }
    times: dict[str, list[float]] = {name: [] for name in pools}
    gc.collect()
    gc.freeze()
    for index in range(steps):
        names = list(pools) if index % 2 else list(pools)[::-1]
        for name in names:
            times[name].append(timed(pools[name].step)[0])
    gc.unfreeze()
    return {name: statistics.median(values) for name, values in times.items()}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_memory(name: str, seed: int) -> None:
    """Print resident bytes a cached token costs at page size 16. Runs in a process of its own."""
    talks = conversations(seed)
    cache = make_cache(name, 16, 4_000_000)
    cached = 0
    torch.arange(10).clone()
    gc.collect()
    before = resident_bytes()
    for turn in range(TURNS):
        for talk in talks:
            key = RadixKey(talk[turn]).page_aligned(16)
            matched = cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
            result = cache.insert(InsertParams(key=key, value=torch.arange(len(key)), prev_prefix_len=matched))
            cached += len(key) - result.prefix_len
    gc.collect()
    print(f"\n{(resident_bytes() - before) / cached:.2f}")


def bytes_per_token(name: str, seed: int) -> float:
    command = [sys.executable, __file__, "--seed", str(seed), "--memory-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the conversations")
    parser.add_argument("--steps", type=int, default=300, help="evict + insert steps for each pool")
    parser.add_argument("--json", action="store_true", help="end with one line holding the ratios as a JSON object")
    parser.add_argument("--memory-of", choices=CLASSES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    prepare()
    if args.memory_of:
        measure_memory(args.memory_of, args.seed)
        return

    print(first_line(args.seed))
    print(f"{'operation':44} {'Rust us':>9} {'ours us':>9} {'ratio':>7}")
    talks = conversations(args.seed)
    ratios: dict[str, list[float]] = {"match": [], "insert": [], "lock": []}

    def row(label: str, rust: float, ours: float) -> float:
        print(f"{label:44} {rust * 1e6:9.1f} {ours * 1e6:9.1f} {ours / rust:7.3f}")
        return ours / rust

    for page_size in (16, 1):
        medians = bench_access(page_size, talks)
        for op, label in (("match", "match"), ("insert", "insert the next turn"), ("lock", "lock + unlock, 6 nodes")):
            ratio = row(f"{label}, page size {page_size}", medians[op]["rust"], medians[op]["ours"])
            ratios[op].append(ratio)
    gc.collect()
    evict = bench_evict(args.steps)
    evict_ratio = row("evict 64 + insert 64, 50,000 leaves", evict["rust 50K"], evict["ours 50K"])
    growth = evict["ours 100K"] / evict["ours 1K"]
    before, after = evict["ours 1K"], evict["ours 100K"]
    print(f"{'the same, ours: 1K leaves -> 100K leaves':44} {before * 1e6:9.1f} {after * 1e6:9.1f} {growth:7.3f}")
    memory = {name: bytes_per_token(name, args.seed) for name in ("ours", "legacy", "rust", "python")}
    print("resident bytes a cached token, page size 16: " + ", ".join(f"{n} {v:.1f}" for n, v in memory.items()))
    if args.json:
        summary = {f"{op}_ratio": round(max(values), 3) for op, values in ratios.items()}
        summary |= {
            "evict_ratio_50k": round(evict_ratio, 4),
            "evict_growth": round(growth, 3),
            "bytes_per_token": memory["ours"],
            "legacy_bytes_per_token": memory["legacy"],
        }
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
