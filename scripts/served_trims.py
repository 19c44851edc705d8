#!/usr/bin/env python
"""What trims and moves under load cost the requests: gaps between tokens, with them and without, on real servers.

Two servers of SmolLM2-135M-Instruct: one in mode move that keeps a quarter of its frames free for a neighbour and is
told every second to cut its cache and to pack what is left, and one that observes and is set as often, which changes
nothing there. The same requests go to both, in turns, 8 at a time, streamed; a burst's gaps between tokens give its
median and its 99th percentile. Reported: the ratio of the 99th percentiles over the pairs with its 95% interval, and
the longest time that one step of planning or moving kept the scheduler.

Writes scripts/results/served_trims.txt and .json, which under_load.py --served takes; --json prints the object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from urllib.request import Request, urlopen

from radix_pages_sglang.client import CACHED, FREE, NO_BOUND, Client
from radix_pages_sglang.cpu_engine.checkpoints import smollm2_checkpoint
from radix_pages_sglang.experiments.provenance import RESULTS, first_line
from radix_pages_sglang.local_server import Server, serving
from resident import interval

MOVE = {"RADIX_PAGES_MODE": "move", "RADIX_PAGES_IDLE_TRIM_SECONDS": "0", "RADIX_PAGES_FRAME_TOKENS": "256"}
OBSERVE = {"RADIX_PAGES_MODE": "observe", "RADIX_PAGES_FRAME_TOKENS": "256"}
POOL_TOKENS, FRAME_TOKENS, REQUESTS, ANSWER_TOKENS = 8_192, 256, 24, 32
CUTS = {"move": 3_000, "observe": POOL_TOKENS}
"""To how many tokens the cache is cut every second."""


def gaps(server: Server, prompt: list[int]) -> list[float]:
    """Seconds between the tokens of one streamed answer."""
    sampling = {"max_new_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    request = Request(f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    times = []
    with urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def burst(server: Server, seed: int) -> tuple[float, float]:
    """Median and 99th percentile of the gaps between tokens in one load."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1_000, 40_000) for _ in range(128)] for _ in range(4)]
    prompts = [
        [*rng.choice(prefixes), *(rng.randrange(1_000, 40_000) for _ in range(rng.randint(32, 256)))]
        for _ in range(REQUESTS)
    ]
    with ThreadPoolExecutor(8) as pool:
        found = sorted(gap for one in pool.map(lambda prompt: gaps(server, prompt), prompts) for gap in one)
    return statistics.median(found), found[int(0.99 * len(found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="chooses prompts")
    parser.add_argument("--pairs", type=int, default=10, help="alternated pairs of bursts")
    parser.add_argument("--json", action="store_true", help="end with one line holding the numbers as JSON")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("--pairs needs at least 2")
    arguments = (
        *("--dtype", "float32", "--page-size", "16", "--sleep-on-idle"),
        *("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "8"),
    )
    lines = [first_line(args.seed)]
    results: dict[str, list[tuple[float, float]]] = {"move": [], "observe": []}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(smollm2_checkpoint(), *arguments, env=env))
            for name, env in (("move", MOVE), ("observe", OBSERVE))
        }
        control = Client(servers["move"].url)
        control.set(FREE, POOL_TOKENS // FRAME_TOKENS // 4)
        over = threading.Event()
        loaded: list[str] = []

        def cut_every_second() -> None:
            while not over.wait(1.0):
                for name in loaded:
                    for bound in (CUTS[name], NO_BOUND):
                        servers[name].request("/set_internal_state", {"server_args": {CACHED: bound}})

        thread = threading.Thread(target=cut_every_second)
        thread.start()
        try:
            for index in range(args.pairs + 1):
                for name in ("move", "observe") if index % 2 else ("observe", "move"):
                    loaded[:] = [name]
                    measured = burst(servers[name], args.seed + index)
                    if index:  # the first pair warms up
                        results[name].append(measured)
        finally:
            over.set()
            thread.join()
        memory = control.states()[0]["memory"]
    numbers: dict[str, object] = {}
    for place, (key, what) in enumerate((("median_itl_ratio", "median"), ("p99_itl_ratio", "99th percentile"))):
        ratios = [
            ours[place] / theirs[place] for ours, theirs in zip(results["move"], results["observe"], strict=True)
        ]
        low, high = interval(ratios)
        mean = statistics.mean(ratios)
        lines.append(
            f"{what} of the gaps between tokens, move / observe: {mean:.4f}, 95% interval {low:.4f} to {high:.4f} "
            f"over {len(ratios)} pairs; observe {1000 * statistics.mean(p[place] for p in results['observe']):.2f} ms"
        )
        numbers |= {key: round(mean, 4), f"{key}_interval": [round(low, 4), round(high, 4)]}
    numbers["longest_stall_ms"] = round(1000 * memory["longest_step_seconds"], 3)
    lines.append(
        f"{memory['trims']} trims, {memory['plans']} plans ({memory['void_plans']} void), {memory['moved_pages']} "
        f"pages moved, {memory['moves_per_slice']} at most a slice; longest step {numbers['longest_stall_ms']} ms"
    )
    numbers |= {name: memory[name] for name in ("plans", "void_plans", "moved_pages", "moves_per_slice", "trims")}
    print("\n".join(lines))
    (RESULTS / "served_trims.txt").write_text("\n".join(lines) + "\n")
    (RESULTS / "served_trims.json").write_text(json.dumps(numbers, indent=1) + "\n")
    if args.json:
        print(json.dumps(numbers))


if __name__ == "__main__":
    main()
