#!/usr/bin/env python
"""What trims and moves under load cost the requests: gaps between tokens, with them and without, on a real server.

One server of SmolLM2-135M-Instruct, in turns in mode move, where it keeps a quarter of its frames free for a
neighbour, four committed ahead, and packs what is cached every second, and in mode observe, where all frames are
committed and nothing is given back or moved. One process, because two differ by more than what is asked for here;
resident.py compares processes.
In either mode the cache is cut every second to as many tokens, so that both compute as many prompts anew. The same
requests in both, 8 at a time, streamed. Reported: the ratio of the 99th percentiles (and of the medians) of the gaps
between tokens, over all bursts of a side, with the 95% interval that resampling the pairs gives; and the longest that
one step of trims (a plan, a slice of moves or of returns) between two batches took, while requests ran: by the clock,
and in the processor time of the scheduler's thread, for the load shares its two cores. A frame that the reserve
commits ahead is a step of its own, as long as the kernel takes to clear a whole frame; the longest is reported apart.

Writes scripts/results/served_trims.txt, .json (under_load.py --served takes it) and .png; --json prints the object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from radix_pages_sglang.client import CACHED, FREE, MODE, NO_BOUND, RESERVE, Client
from radix_pages_sglang.cpu_engine.checkpoints import smollm2_checkpoint
from radix_pages_sglang.experiments.provenance import RESULTS, first_line
from radix_pages_sglang.knobs import MODES
from radix_pages_sglang.local_server import Server, repeating, serving

SIDES = ("move", "observe")
POOL_TOKENS, FRAME_TOKENS, CACHED_TOKENS, ANSWER_TOKENS = 8_192, 256, 3_000, 32
NUM_FRAMES = POOL_TOKENS // FRAME_TOKENS
RESERVED = 4
PERCENTILES = {"median": 50, "p99": 99}
RESAMPLES = 2_000

Gaps = NDArray[np.float64]


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


def burst(server: Server, seed: int, num_requests: int) -> Gaps:
    """The gaps between tokens in one load."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1_000, 40_000) for _ in range(128)] for _ in range(4)]
    prompts = [
        [*rng.choice(prefixes), *(rng.randrange(1_000, 40_000) for _ in range(rng.randint(32, 256)))]
        for _ in range(num_requests)
    ]
    with ThreadPoolExecutor(8) as pool:
        return np.array([gap for one in pool.map(lambda prompt: gaps(server, prompt), prompts) for gap in one])


def cut(server: Server) -> None:
    """Cut the cache, which in mode move also packs what is left."""
    for bound in (CACHED_TOKENS, NO_BOUND):
        server.request("/set_internal_state", {"server_args": {CACHED: bound}})


def begin(control: Client, side: str) -> None:
    """Bring the server into the mode; when it only observes, no frame must have to come back during a burst."""
    control.set(MODE, MODES.index("move"))
    control.set(FREE, NUM_FRAMES // 4 if side == "move" else 0)
    control.set(RESERVE, RESERVED if side == "move" else int(control.states()[0]["knobs"][RESERVE]["maximum"]))
    while side == "observe" and control.states()[0]["memory"]["returned_frames"] > 1:  # one is not the reserve's
        time.sleep(0.05)
    control.set(MODE, MODES.index(side))


def measure(server: Server, seed: int, pairs: int, num_requests: int) -> dict[str, list[Gaps]]:
    """The gaps of each side's bursts; the first pair warms up."""
    control = Client(server.url)
    found: dict[str, list[Gaps]] = {side: [] for side in SIDES}
    for index in range(pairs + 1):
        for side in SIDES if index % 2 else SIDES[::-1]:
            begin(control, side)
            with repeating(partial(cut, server), every_seconds=1.0):
                found[side].append(burst(server, seed + index, num_requests))
    return {side: bursts[1:] for side, bursts in found.items()}


def ratio(found: dict[str, list[Gaps]], percentile: float, seed: int) -> tuple[float, float, float]:
    """Move / observe of a percentile over all gaps, and the 95% interval from pairs drawn again and again."""
    pairs = len(found["move"])
    draws = np.random.default_rng(seed).integers(pairs, size=(RESAMPLES, pairs))

    def of(drawn: Any) -> float:
        move, observe = (np.percentile(np.concatenate([found[side][i] for i in drawn]), percentile) for side in SIDES)
        return float(move / observe)

    low, high = np.percentile([of(drawn) for drawn in draws], (2.5, 97.5))
    return of(range(pairs)), float(low), float(high)


def draw(found: dict[str, list[Gaps]]) -> None:
    """The share of gaps that are longer than so many milliseconds, on both sides."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for side, style in zip(SIDES, ("-", "--"), strict=True):
        longest_first = 1000 * np.sort(np.concatenate(found[side]))[::-1]
        axes.step(longest_first, np.arange(1, len(longest_first) + 1) / len(longest_first), style, label=side)
    axes.axhline(0.01, color="grey", linewidth=0.7)
    axes.set(
        yscale="log",
        xlabel="gap between two tokens of an answer (ms)",
        ylabel="share of gaps that are longer",
        title="Packing every second and a quarter of the frames kept free, beside neither",
    )
    axes.legend()
    figure.savefig(RESULTS / "served_trims.png", dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="chooses prompts")
    parser.add_argument("--pairs", type=int, default=10, help="alternated pairs of bursts")
    parser.add_argument("--requests", type=int, default=24, help="requests of a burst")
    parser.add_argument("--json", action="store_true", help="end with one line holding the numbers as JSON")
    args = parser.parse_args()
    if args.pairs < 2 or args.requests < 8:
        parser.error("--pairs needs at least 2, --requests at least 8")
    arguments = (
        *("--dtype", "float32", "--page-size", "16", "--sleep-on-idle"),
        *("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "8"),
    )
    env = {
        "RADIX_PAGES_MODE": "move",
        "RADIX_PAGES_IDLE_TRIM_SECONDS": "0",
        "RADIX_PAGES_FRAME_TOKENS": str(FRAME_TOKENS),
    }
    with serving(smollm2_checkpoint(), *arguments, env=env) as server:
        found = measure(server, args.seed, args.pairs, args.requests)
        memory = Client(server.url).states()[0]["memory"]
    lines = [first_line(args.seed)]
    numbers: dict[str, Any] = {}
    for name, percentile in PERCENTILES.items():
        middle, low, high = ratio(found, percentile, args.seed)
        observed = np.concatenate(found["observe"])
        lines.append(
            f"{name} of the gaps between tokens, move / observe: {middle:.4f}, 95% interval {low:.4f} to {high:.4f}, "
            f"{args.pairs} pairs of bursts, {len(observed)} gaps a side; observe "
            f"{1000 * np.percentile(observed, percentile):.2f} ms"
        )
        numbers[f"{name}_itl_ratio"] = round(middle, 4)
        numbers[f"{name}_itl_ratio_interval"] = [round(low, 4), round(high, 4)]
    numbers["longest_stall_ms"] = round(1000 * memory["longest_step_seconds"], 3)
    numbers["longest_stall_cpu_ms"] = round(1000 * memory["longest_step_cpu_seconds"], 3)
    numbers["longest_commit_ms"] = round(1000 * memory["longest_commit_seconds"], 3)
    lines.append(
        f"{memory['trims']} trims, {memory['plans']} plans ({memory['void_plans']} void), {memory['moved_pages']} "
        f"pages moved; a slice is {memory['moves_per_slice']} moves or {memory['returns_per_slice']} returns; "
        f"longest step of a trim {numbers['longest_stall_ms']} ms by the clock, "
        f"{numbers['longest_stall_cpu_ms']} ms in processor time; "
        f"longest commit of a frame ahead {numbers['longest_commit_ms']} ms"
    )
    numbers |= {
        name: memory[name]
        for name in ("plans", "void_plans", "moved_pages", "moves_per_slice", "returns_per_slice", "trims")
    }
    draw(found)
    print("\n".join(lines))
    (RESULTS / "served_trims.txt").write_text("\n".join(lines) + "\n")
    (RESULTS / "served_trims.json").write_text(json.dumps(numbers, indent=1) + "\n")
    if args.json:
        print(json.dumps(numbers))


if __name__ == "__main__":
    main()
