#!/usr/bin/env python
"""Does memory that the ledger calls empty leave the process? Asked of real servers, from outside, in /proc.

Three parts, each alone with --only:

returned   SmolLM2-135M-Instruct with 1 GiB of KV, nearly all of it written. At idle the cache is capped at 0; what
           the KV mapping occupies is read before and after from /proc/PID/smaps. Then the price of regrowing: the
           time to the first token of equal requests on this server, trimmed before each, and on one that never
           gives memory back, in turns.
baselines  one recorded stream of chats on every side: do nothing and flush_cache on stock SGLang, the rule of
           release_memory_occupation (idle only, the cache is lost) and ours with a cap at half of the cache and at a
           quarter. Bytes returned, and the hit rate of the second round of the same chats.
steady     mode return against mode observe under the same chats: output tokens a second and median time to the
           first token. Two servers of the same set-up differ by a few percent however long one measures, so both
           are started anew several times; each time they are loaded in turns. The interval of the ratio is that of
           the starts' means.
turns      the same load on one server that is told to return and to observe in turns: what the mode itself costs.
           What differs from process to process is out of it, and so is what the backing costs.

Writes scripts/results/resident.txt and .json, with --only a file of that part's name; --json ends with one object.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from radix_pages_sglang.client import MODE, Client
from radix_pages_sglang.counts import STATE_KEY
from radix_pages_sglang.cpu_engine.checkpoints import smollm2_checkpoint, tiny_llama
from radix_pages_sglang.experiments.pairs import interval
from radix_pages_sglang.experiments.provenance import RESULTS, first_line
from radix_pages_sglang.knobs import MAX_CACHED_TOKENS, MODES, NO_BOUND, TRIM
from radix_pages_sglang.local_server import Server, serving
from radix_pages_sglang.resident import process_resident_bytes, resident_bytes

PARTS = ("returned", "baselines", "steady", "turns")
PAGE_SIZE = 16
KV_TOKENS = 23_296
"""1 GiB of KV: 30 layers x (K + V) x 3 heads x 64 x 4 bytes are 46,080 bytes a token."""

PROMPT_TOKENS = 1_440
RETURN = {"RADIX_PAGES_MODE": "return", "RADIX_PAGES_IDLE_TRIM_SECONDS": "0"}
NEVER = {"RADIX_PAGES_MODE": "place", "RADIX_PAGES_BACKING": "mmap"}
OBSERVE = {"RADIX_PAGES_MODE": "observe"}
STEADY = (
    *("--load-format", "dummy", "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "8192"),
    *("--max-running-requests", "8", "--sleep-on-idle"),
)
"""The tiny model's server for the steady load."""


class Report:
    """Lines that are shown as they come and kept for the results file, and numbers for --json."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.numbers: dict[str, Any] = {}

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)


@contextmanager
def smollm2_server(kv_tokens: int, env: dict[str, str], backend: str | None = "radix_pages") -> Iterator[Server]:
    arguments = (
        *("--dtype", "float32", "--page-size", str(PAGE_SIZE), "--max-total-tokens", str(kv_tokens)),
        *("--max-running-requests", "8", "--chunked-prefill-size", "2048", "--enable-cache-report"),
        *("--sleep-on-idle",),
    )
    with serving(smollm2_checkpoint(), *arguments, env=env, backend=backend) as server:
        server.generate("warm up " * 40, 4)
        yield server


def memory(server: Server) -> dict[str, Any]:
    return Client(server.url).states()[0]["memory"]


def kv_resident(server: Server) -> int:
    """Bytes of the KV mapping in memory, read by this process."""
    state = memory(server)
    return resident_bytes(*state["region"], pid=state["pid"])


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1_000, 40_000) for _ in range(num_tokens)]


def first_token_seconds(server: Server, tokens: list[int]) -> float:
    """Of a request that wants one token, which is the whole request."""
    start = time.perf_counter()
    server.generate(tokens, 1)
    return time.perf_counter() - start


def fill(server: Server, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(KV_TOKENS // PROMPT_TOKENS):
        server.generate(prompt(rng, PROMPT_TOKENS), 1)
    left = KV_TOKENS % PROMPT_TOKENS - 2 * PAGE_SIZE
    if left > PAGE_SIZE:
        server.generate(prompt(rng, left), 1)


def returned_part(report: Report, seed: int, probes: int) -> None:
    with ExitStack() as servers:
        ours = servers.enter_context(smollm2_server(KV_TOKENS, RETURN))
        never = servers.enter_context(smollm2_server(KV_TOKENS, NEVER))
        question = "The capital of France is"
        answers = [ours.generate(question, 8)["text"], never.generate(question, 8)["text"]]
        for server in (ours, never):
            fill(server, seed)
        total, process = memory(ours)["total_bytes"], memory(ours)["pid"]
        before, process_before = kv_resident(ours), process_resident_bytes(process)
        start = time.perf_counter()
        Client(ours.url).set(MAX_CACHED_TOKENS, 0)
        seconds = time.perf_counter() - start
        after, process_after = kv_resident(ours), process_resident_bytes(process)
        state = memory(ours)
        Client(never.url).set(MAX_CACHED_TOKENS, 0)  # as empty as the other, but nothing goes back
        answers += [ours.generate(question, 8)["text"], never.generate(question, 8)["text"]]
        report.say(f"KV buffers                         {total:>14,} bytes, {state['frame_bytes']:,} a frame")
        report.say(f"in memory before the cap           {before:>14,} bytes, {before / total:.4f} of them")
        report.say(f"in memory after it                 {after:>14,} bytes")
        report.say(f"left the KV mapping                {before - after:>14,} bytes, {(before - after) / total:.4f}")
        report.say(f"left the process (RssAnon)         {process_before - process_after:>14,} bytes")
        report.say(f"cap, evictions, trim and accounts  {seconds:14.3f} s, as the caller sees it")
        report.say(f"the same answer before and after   {'yes' if len(set(answers)) == 1 else answers}")
        rng = random.Random(seed + 1)
        times: dict[str, list[float]] = {"ours": [], "never": []}
        for index in range(probes + 1):
            tokens = prompt(rng, PROMPT_TOKENS)
            Client(ours.url).set(TRIM, 1)
            for name in ("ours", "never") if index % 2 else ("never", "ours"):
                taken = first_token_seconds(ours if name == "ours" else never, tokens)
                if index:  # the first pair warms up
                    times[name].append(taken)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        ratio = medians["ours"] / medians["never"]
        grown = math.ceil(PROMPT_TOKENS / PAGE_SIZE) * PAGE_SIZE * 46_080
        report.say(
            f"first token of {PROMPT_TOKENS} tokens         {medians['ours']:.3f} s after a trim ({grown:,} bytes "
            f"regrown), {medians['never']:.3f} s never trimmed: ratio {ratio:.3f} (medians of {probes})"
        )
        report.numbers |= {
            "kv_bytes": total,
            "touched_fraction": round(before / total, 5),
            "returned_fraction": round((before - after) / total, 5),
            "regrow_ttft_ratio": round(ratio, 4),
            "request_after_ok": len(set(answers)) == 1,
        }


CHATS, SYSTEMS, AT_LAST = 40, 4, 24


def chats(seed: int) -> list[list[int]]:
    """The recorded stream: chats that share four system prompts of 192 tokens, 128 tokens of their own each."""
    rng = random.Random(seed)
    systems = [prompt(rng, 192) for _ in range(SYSTEMS)]
    return [[*systems[rng.randrange(SYSTEMS)], *prompt(rng, 128)] for _ in range(CHATS)]


def first_round(server: Server, stream: list[list[int]]) -> None:
    for tokens in stream:
        server.generate(tokens, 4)


def second_round(server: Server, stream: list[list[int]], seed: int) -> float:
    """The hit rate of the last chats' next turns: each old prompt and 32 tokens more."""
    rng = random.Random(seed + 7)
    cached = asked = 0
    for tokens in stream[-AT_LAST:]:
        meta = server.generate([*tokens, *prompt(rng, 32)], 4)["meta_info"]
        cached += meta["cached_tokens"]
        asked += meta["prompt_tokens"]
    return cached / asked


def baselines_part(report: Report, seed: int) -> None:
    stream = chats(seed)
    kv_tokens = 8_192
    rows: list[dict[str, Any]] = []

    def row(rule: str, bytes_returned: int, hit_rate: float) -> None:
        rows.append({"rule": rule, "bytes_returned": bytes_returned, "hit_rate": round(hit_rate, 4)})
        report.say(f"{rule:44} {bytes_returned:>14,} {hit_rate:>9.3f}")

    report.say()
    report.say(f"{'after ' + str(CHATS) + ' chats, at idle':44} {'bytes returned':>14} {'hit rate':>9}")
    with smollm2_server(kv_tokens, {}, backend=None) as stock:
        for rule in ("nothing (stock)", "flush_cache (stock)"):
            stock.request("/flush_cache?timeout=60", {})
            first_round(stock, stream)
            pid = stock.scheduler_pid
            before = process_resident_bytes(pid)
            if rule.startswith("flush"):
                stock.request("/flush_cache?timeout=60", {})
            after = process_resident_bytes(pid)
            row(rule, max(before - after, 0), second_round(stock, stream, seed))
    with smollm2_server(kv_tokens, RETURN) as ours:
        control = Client(ours.url)
        for rule, share in (
            ("release_memory_occupation's rule", 0.0),
            ("ours, cap at 1/2", 0.5),
            ("ours, cap at 1/4", 0.25),
        ):
            control.set(MAX_CACHED_TOKENS, NO_BOUND)
            ours.request("/flush_cache?timeout=60", {})
            first_round(ours, stream)
            before = kv_resident(ours)
            if share:
                cached = json.loads(ours.request("/server_info"))["internal_states"][0][STATE_KEY]["cached_tokens"]
                control.set(MAX_CACHED_TOKENS, int(cached * share))
            else:
                ours.request("/release_memory_occupation", {})
                ours.request("/resume_memory_occupation", {})
            after = kv_resident(ours)
            control.set(MAX_CACHED_TOKENS, NO_BOUND)
            row(rule, before - after, second_round(ours, stream, seed))
    report.numbers["baselines"] = rows


def steady_part(report: Report, seed: int, starts: int, pairs: int) -> None:
    ratios: list[list[tuple[float, float]]] = []
    for start in range(starts):
        ratios.append(
            steady_start(seed + 100 * start, pairs, ("return", "observe") if start % 2 else ("observe", "return"))
        )
        report.say(
            f"start {start + 1}: return / observe, throughput and first token, of each pair: "
            + ", ".join(f"{throughput:.3f} {first:.3f}" for throughput, first in ratios[-1])
        )
    mean = statistics.geometric_mean
    means = [(mean(throughput for throughput, _ in one), mean(first for _, first in one)) for one in ratios]
    say_ratios(report, "steady", means, f"{starts} starts of both servers, {pairs} alternated pairs of loads each")


def turns_part(report: Report, seed: int, pairs: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {"return": [], "observe": []}
    with serving(tiny_llama(), *STEADY, env={**RETURN, "RADIX_PAGES_IDLE_TRIM_SECONDS": "30"}) as server:
        control = Client(server.url)
        for index in range(pairs + 1):
            for name in ("return", "observe") if index % 2 else ("observe", "return"):
                control.set(MODE, MODES.index(name))
                found[name].append(burst(server, seed + index))
    both = list(zip(found["return"], found["observe"], strict=True))[1:]  # the first pair warms up
    ratios = [(ours[0] / theirs[0], ours[1] / theirs[1]) for ours, theirs in both]
    report.numbers["turns_pairs"] = [(round(throughput, 4), round(first, 4)) for throughput, first in ratios]
    say_ratios(report, "turns", ratios, f"{pairs} alternated pairs of loads in one process")


def say_ratios(report: Report, part: str, ratios: list[tuple[float, float]], over: str) -> None:
    """Report return / observe of throughput and of the time to the first token, and keep them for --json.

    The mean is the geometric one, so that a pair and its mirror image cancel out.
    """
    for name, what, values in zip(
        ("throughput", "ttft"),
        ("output tokens a second", "median seconds to the first token"),
        zip(*ratios, strict=True),
        strict=True,
    ):
        logs = [math.log(value) for value in values]
        mean, low, high = (math.exp(value) for value in (statistics.mean(logs), *interval(logs)))
        report.say(f"{what}: return / observe {mean:.4f}, 95% interval {low:.4f} to {high:.4f} over {over}")
        report.numbers[f"{part}_{name}_ratio"] = [round(value, 4) for value in (mean, low, high)]


def steady_start(seed: int, pairs: int, names: tuple[str, str]) -> list[tuple[float, float]]:
    """Start both servers, in the order of `names`, and load them in turns: return / observe of each pair."""
    modes = {"return": {**RETURN, "RADIX_PAGES_IDLE_TRIM_SECONDS": "30"}, "observe": OBSERVE}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(tiny_llama(), *STEADY, env=modes[name])) for name in names}
        for index in range(pairs + 1):
            for name in names if index % 2 else names[::-1]:
                found[name].append(burst(servers[name], seed + index))
    both = list(zip(found["return"], found["observe"], strict=True))[1:]  # the first pair warms up
    return [(ours[0] / theirs[0], ours[1] / theirs[1]) for ours, theirs in both]


def burst(server: Server, seed: int, requests: int = 160, answer: int = 24) -> tuple[float, float]:
    """One load, 8 at a time: output tokens a second, and the median time to the first token."""
    rng = random.Random(seed)
    systems = [" ".join(str(rng.randrange(10_000)) for _ in range(40)) for _ in range(4)]
    talks = [
        [
            {"role": "system", "content": rng.choice(systems)},
            {"role": "user", "content": " ".join(str(rng.randrange(10_000)) for _ in range(30))},
        ]
        for _ in range(requests)
    ]
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda messages: server.stream_chat(messages, answer), talks))
    seconds = time.perf_counter() - start
    tokens = sum(usage["completion_tokens"] for _, _, usage in answers)
    return tokens / seconds, statistics.median(first for first, _, _ in answers if first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="chooses prompts and chats")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part; may be given again")
    parser.add_argument("--probes", type=int, default=10, help="pairs of requests that time regrowing")
    parser.add_argument("--starts", type=int, default=6, help="how often both servers of the steady load start")
    parser.add_argument("--pairs", type=int, default=4, help="alternated pairs of the steady load for each start")
    parser.add_argument("--turns", type=int, default=120, help="alternated pairs of the steady load on one server")
    parser.add_argument("--json", action="store_true", help="end with one line holding the numbers as JSON")
    args = parser.parse_args()
    if args.probes < 1 or args.pairs < 1 or args.starts < 2 or args.turns < 2:
        parser.error("--probes and --pairs need at least 1, --starts and --turns at least 2")
    report, parts = Report(), args.only or PARTS
    report.say(first_line(args.seed))
    if "returned" in parts:
        returned_part(report, args.seed, args.probes)
    if "baselines" in parts:
        baselines_part(report, args.seed)
    if "steady" in parts:
        steady_part(report, args.seed, args.starts, args.pairs)
    if "turns" in parts:
        turns_part(report, args.seed, args.turns)
    name = "-".join(["resident", *(args.only or ())])
    (RESULTS / f"{name}.txt").write_text("\n".join(report.lines) + "\n")
    (RESULTS / f"{name}.json").write_text(json.dumps(report.numbers, indent=1) + "\n")
    if args.json:
        print(json.dumps(report.numbers))


if __name__ == "__main__":
    main()
