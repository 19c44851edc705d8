#!/usr/bin/env python
"""What an idle server occupies: frames that the operating system counts, beside the packed floor.

The published workload, scaled to two cores: hot prefixes 16 x 128 tokens with suffixes of 64, cold prompts of 192 to
1,024 tokens, 30% of requests hot, answers of 16 to 256 tokens, 96 requests at a time, frames of 64 pages of 16
tokens, at most 1,000 pages cached. A tiny Llama serves it (random weights, real server, real memory). Sides, each a
server of its own that is sent the same requests:

stock order + LRU     SGLang's order of free pages; empty frames are given back
placement only        pages are placed; empty frames are given back
ours                  pages are placed and moved; empty frames are given back

and, on the stream that the recorder made of the same workload (scripts/stream.py), replayed without a server, the
same rules and kvcached's: whole frames are evicted and nothing moves. With --trace also on a real trace's requests.

Then, on each server, a fixed series of requests one by one, a trim, and the same series backwards: the hit rate of
that second round must be that of plain LRU at the same cap, because moving keeps every page.

Writes scripts/results/idle_footprint.txt, .json and .png; with --json the last line is one object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from provenance import RESULTS, first_line
from radix_pages_sglang.client import TRIM, Client
from radix_pages_sglang.cpu_engine.checkpoints import tiny_llama
from radix_pages_sglang.local_server import Server, serving
from radix_pages_sglang.resident import resident_bytes

PAGE_SIZE, FRAME_PAGES, CAP_PAGES, POOL_TOKENS = 16, 64, 1_000, 65_536
CONCURRENCY, REQUESTS, SERIES = 96, 600, 80
HOT_PREFIXES, HOT_TOKENS, SUFFIX_TOKENS, HOT_RATIO = 16, 128, 64, 0.3
COLD_TOKENS, ANSWER_TOKENS = (192, 1_024), (16, 256)

BASE = {
    "RADIX_PAGES_FRAME_TOKENS": str(FRAME_PAGES * PAGE_SIZE),
    "RADIX_PAGES_MAX_CACHED_TOKENS": str(CAP_PAGES * PAGE_SIZE),
    "RADIX_PAGES_IDLE_TRIM_SECONDS": "0",
}
SIDES = {
    "stock order + LRU": {"RADIX_PAGES_MODE": "return", "RADIX_PAGES_PLACEMENT": "stock"},
    "placement only": {"RADIX_PAGES_MODE": "return"},
    "ours": {"RADIX_PAGES_MODE": "move"},
}


def workload(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Prompts as token ids, and how many tokens each is to be answered with."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1_000, 40_000) for _ in range(count)]

    prefixes = [tokens(HOT_TOKENS) for _ in range(HOT_PREFIXES)]
    requests = []
    for _ in range(count):
        if rng.random() < HOT_RATIO:
            prompt = [*rng.choice(prefixes), *tokens(SUFFIX_TOKENS)]
        else:
            prompt = tokens(rng.randint(*COLD_TOKENS))
        requests.append((prompt, rng.randint(*ANSWER_TOKENS)))
    return requests


def state(server: Server) -> dict[str, Any]:
    return Client(server.url).states()[0]


def trimmed(server: Server) -> float:
    """Trim, wait until it is done, and say how many seconds that took."""
    before, start = state(server)["memory"]["trims"], time.perf_counter()
    Client(server.url).set(TRIM, 1)
    while state(server)["memory"]["trims"] == before:
        time.sleep(0.005)
    return time.perf_counter() - start


def resident_frames(server: Server) -> int:
    """Frames that the operating system counts, seen from here; frame 0, the padding page's, is one of them."""
    memory = state(server)["memory"]
    resident = resident_bytes(*memory["region"], pid=memory["pid"])
    return -(-resident // memory["frame_bytes"])


def serve(name: str, seed: int, count: int) -> dict[str, Any]:
    """One side: the load, the footprint at idle, and the hit rate of the second round."""
    arguments = (
        *("--load-format", "dummy", "--dtype", "float32", "--page-size", str(PAGE_SIZE)),
        *("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(CONCURRENCY), "--sleep-on-idle"),
    )
    with serving(tiny_llama(), *arguments, env={**BASE, **SIDES[name]}) as server:
        start = time.perf_counter()
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(lambda request: server.generate(*request, ignore_eos=True), workload(seed, count)))
        seconds = time.perf_counter() - start
        busiest = state(server)["memory"]["committed_frames"]
        before = state(server)
        to_the_floor = trimmed(server)
        now = state(server)
        frames, memory = resident_frames(server), now["memory"]
        moved = memory.get("moved_pages", 0) - before["memory"].get("moved_pages", 0)
        returned = memory["returned_frames_total"] - before["memory"]["returned_frames_total"]
        series = workload(seed + 1, SERIES)
        for prompt, _ in series:
            server.generate(prompt, 1)
        trimmed(server)
        cached = asked = 0
        for prompt, _ in reversed(series):
            meta = server.generate(prompt, 1)["meta_info"]
            cached, asked = cached + meta["cached_tokens"], asked + meta["prompt_tokens"]
        return {
            "rule": name,
            "where": "server",
            "frames": frames,
            # The padding page takes a place, too, and always in frame 0.
            "packed_floor": -(-(now["held_pages"] + 1) // FRAME_PAGES),
            "frames_before": before["held_frames"],
            "busiest_frames": busiest,
            "hit_rate": cached / asked,
            "seconds_to_floor": to_the_floor,
            "copied_per_returned": moved / (returned * FRAME_PAGES) if returned else 0.0,
            "load_seconds": seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="chooses prompts and lengths")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests of the load")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace whose requests are replayed without a server")
    parser.add_argument("--json", action="store_true", help="end with one line holding the numbers as JSON")
    args = parser.parse_args()
    lines = [first_line(args.seed)]
    print(lines[0], flush=True)

    def say(line: str = "") -> None:
        print(line, flush=True)
        lines.append(line)

    say(f"{args.requests} requests, {CONCURRENCY} at a time; frames of {FRAME_PAGES} pages, {CAP_PAGES} pages cached")
    say(
        f"{'side':32} {'frames':>7} {'floor':>6} {'before':>7} {'hit rate':>9} {'copied/returned':>16} {'s to it':>8}"
    )
    rows = []
    for name in SIDES:
        row = serve(name, args.seed, args.requests)
        rows.append(row)
        say(
            f"{name + ', server':32} {row['frames']:7} {row['packed_floor']:6} {row['frames_before']:7} "
            f"{row['hit_rate']:9.4f} {row['copied_per_returned']:16.3f} {row['seconds_to_floor']:8.3f}"
        )
    lru, ours = rows[0], rows[-1]
    numbers = {
        "frames": ours["frames"],
        "packed_floor": ours["packed_floor"],
        "hit_rate_delta": round(100 * (ours["hit_rate"] - lru["hit_rate"]), 4),
        "copied_per_returned": round(ours["copied_per_returned"], 4),
        "rows": rows,
    }
    say(f"hit rate of the second round, ours less plain LRU: {numbers['hit_rate_delta']:+.3f} points")
    (RESULTS / "idle_footprint.txt").write_text("\n".join(lines) + "\n")
    (RESULTS / "idle_footprint.json").write_text(json.dumps(numbers, indent=1) + "\n")
    if args.json:
        print(json.dumps(numbers))


if __name__ == "__main__":
    main()
