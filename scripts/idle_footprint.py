#!/usr/bin/env python
"""What an idle server occupies: frames that the operating system counts, beside the packed floor.

The published workload, scaled to two cores: hot prefixes 16 x 128 tokens with suffixes of 64, cold prompts of 192 to
1,024 tokens, 30% of requests hot, answers of 16 to 256 tokens, 96 requests at a time, frames of 64 pages of 16
tokens, at most 1,000 pages cached. Measured in up to three places:

server  a tiny Llama serves it (random weights, real server, real memory), a server of its own for each rule, sent
        the same requests. Frames are those that the operating system counts
replay  no server and no memory: it is recorded once how many of the same requests start in each step
        (scripts/stream.py), and every rule serves that record with the real tree, queue, ledger, placement, planner,
        moves and residency. Frames are those that are committed
trace   the same with a real trace's requests (--trace, a Mooncake one): prompts made from the hashes, equal tokens
        for equal blocks of 512, cut to the first 2,048 tokens; answers of random tokens, as long as the trace says
        but 256 at most. Only the order of arrivals is the trace's: a request starts as soon as there is room

Rules, all with the same cap, kept by age unless stated otherwise; all return empty frames in a trim at idle:

stock order + LRU     SGLang's order of free pages
whole frames          SGLang's order. kvcached's rule, as scripts/under_load.py has it: a trim first evicts whole
                      frames until no more are held than the packed floor of what was held, or none is left. It takes
                      the frame that costs the fewest pages, among equals the one whose youngest page is oldest; a
                      page takes with it what is below it in the tree. Without a server only, as the next two
whole frames, placed  pages are placed; the rest is the same
whole frames, always  pages are placed; the cap is kept by whole frames, too, where one is small enough
placement only        pages are placed
ours                  pages are placed; a trim first moves what is cached into the fewest frames and evicts nothing

`before` are the frames held when the load was over, `floor` the packed floor of the pages that were held then, the
padding page included, `kept` the pages still held after the trim. `again` is the hit rate (prompt tokens found in the
cache over prompt tokens) of the last 80 requests of the load, backwards and one by one, right after the trim. Then a
fixed series of 80 others one by one, a trim, and the series backwards: `hit rate` is that of this second round. Ours
must have those of plain LRU at the same cap, because moving keeps every page. `copied/returned` is bytes copied over
bytes returned by the trim after the load; `copied/emptied` leaves out frames that were empty anyway.

Not measured without a server: time, and what the operating system counts.

Writes scripts/results/idle_footprint.txt, .json and .png; with --json the last line is one object. --replay-only
keeps what idle_footprint.json says of servers, with the first line of the run that measured it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import under_load
from radix_pages.frame_planner import CachedPages
from radix_pages_sglang.client import TRIM, Client
from radix_pages_sglang.cpu_engine.checkpoints import tiny_llama
from radix_pages_sglang.experiments.provenance import RESULTS, first_line
from radix_pages_sglang.experiments.traces import open_trace
from radix_pages_sglang.local_server import Server, serving
from radix_pages_sglang.resident import resident_bytes
from stream import PAGE_SIZE, Recorder, Request

FRAME_PAGES, CAP_PAGES, POOL_TOKENS = 64, 1_000, 65_536
CONCURRENCY, REQUESTS, SERIES = 96, 600, 80
HOT_PREFIXES, HOT_TOKENS, SUFFIX_TOKENS, HOT_RATIO = 16, 128, 64, 0.3
COLD_TOKENS, ANSWER_TOKENS = (192, 1_024), (16, 256)
TOKEN_IDS = (1_000, 40_000)
TRACE_BLOCK, TRACE_BLOCKS, TRACE_REQUESTS = 512, 4, 3_000
MOVES_A_SLICE = 32

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
        return [rng.randrange(*TOKEN_IDS) for _ in range(count)]

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
            "kept_pages": now["held_pages"],
            "hit_rate": cached / asked,
            "seconds_to_floor": to_the_floor,
            "copied_per_returned": moved / (returned * FRAME_PAGES) if returned else 0.0,
            "load_seconds": seconds,
        }


# -- without a server --


@dataclass(frozen=True, slots=True)
class Rule:
    """How a rule places pages, keeps the cap (the server's class), and makes frames empty when all is idle."""

    placement: str
    server: type[under_load.Server]
    empty_frames: Callable[[under_load.Server], None]


def by_nothing(server: under_load.Server) -> None:
    """What is empty is returned, and nothing else."""


def by_whole_frames(server: under_load.Server) -> None:
    """Evict whole frames until the packed floor is reached or none is left."""
    under_load.evict_frames(server, max_frames=server.ledger.num_held_frames - packed_floor(server))


def by_moves(server: under_load.Server) -> None:
    """Move what is cached into the fewest frames."""
    moves = under_load.Moving(server, 0, 0, moves_a_step=MOVES_A_SLICE).begin(CachedPages(CAP_PAGES))
    while not moves.is_done:
        moves.step(MOVES_A_SLICE)
    if moves.is_stale:
        raise RuntimeError("a plan was void although nothing runs")


RULES = {
    "stock order + LRU": Rule("stock", under_load.Server, by_nothing),
    "whole frames": Rule("stock", under_load.Server, by_whole_frames),
    "whole frames, placed": Rule("pack", under_load.Server, by_whole_frames),
    "whole frames, always": Rule("pack", under_load.WholeFrameServer, by_whole_frames),
    "placement only": Rule("pack", under_load.Server, by_nothing),
    "ours": Rule("pack", under_load.Server, by_moves),
}


def packed_floor(server: under_load.Server) -> int:
    """The least frames with room for the held pages and the padding page."""
    return server.geometry.frames_to_hold(server.ledger.num_held + 1)


def published(seed: int, count: int) -> list[Request]:
    """The served workload. The last token of an answer never gets KV, so it is left out."""
    rng = random.Random(f"answers {seed}")
    return [Request(prompt, tokens_of(rng, num_answer - 1)) for prompt, num_answer in workload(seed, count)]


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(*TOKEN_IDS), k=count)


def traced(path: Path, first: int, count: int) -> list[Request]:
    """`count` requests of a trace from request `first` on, cut as the top of this file says."""
    block = cache(lambda hash_id: tokens_of(random.Random(f"block {hash_id}"), TRACE_BLOCK))
    requests = []
    for number, one in enumerate(islice(open_trace(path), first, first + count), first):
        prompt = [token for hash_id in one.blocks[:TRACE_BLOCKS] for token in block(hash_id)]
        num_answer = min(max(one.output_tokens, 1), ANSWER_TOKENS[1])
        answer = tokens_of(random.Random(f"answer {number}"), num_answer - 1)
        requests.append(Request(prompt[: one.input_tokens], answer))
    return requests


def fresh(requests: list[Request]) -> list[Request]:
    """The same requests, not served yet."""
    return [Request(request.prompt, request.output) for request in requests]


def one_by_one(server: under_load.Server, requests: list[Request]) -> float:
    """Serve prompts, each with an answer of one token; the hit rate."""
    hits, tokens = server.hit_tokens, server.prompt_tokens
    for request in requests:
        server.start(Request(request.prompt, []))
        server.decode()
    return (server.hit_tokens - hits) / (server.prompt_tokens - tokens)


def replay(name: str, where: str, load: list[Request], starts: list[int], series: list[Request]) -> dict[str, Any]:
    """One rule: the recorded load, the footprint at idle, and the hit rates of the second rounds."""
    rule = RULES[name]
    server = rule.server(rule.placement, POOL_TOKENS // PAGE_SIZE, FRAME_PAGES, CAP_PAGES)

    def trim() -> None:
        rule.empty_frames(server)
        server.residency.trim()
        server.check()

    waiting = iter(fresh(load))
    for num_starts in starts:
        for request in islice(waiting, num_starts):
            server.start(request)
        if not num_starts:
            server.decode()
    if server.running or next(waiting, None):
        raise RuntimeError("the record is not of this load")
    before, floor, committed = server.ledger.num_held_frames, packed_floor(server), server.residency.committed_frames
    trim()
    frames, kept, copied = server.residency.committed_frames, server.ledger.num_held, server.moved
    returned_pages = (committed - frames) * FRAME_PAGES
    again = one_by_one(server, load[: -SERIES - 1 : -1])
    one_by_one(server, series)
    trim()
    return {
        "rule": name,
        "where": where,
        "frames": frames,
        "packed_floor": floor,
        "frames_before": before,
        "busiest_frames": committed,
        "kept_pages": kept,
        "hit_rate_again": again,
        "hit_rate": one_by_one(server, series[::-1]),
        "copied_per_returned": copied / returned_pages if returned_pages else 0.0,
    }


def replays(
    where: str, load: list[Request], series: list[Request], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Record the load once, and serve the record by every rule."""
    recorder = Recorder(fresh(load), CONCURRENCY, POOL_TOKENS // PAGE_SIZE, CAP_PAGES)
    recorder.record()
    rows = []
    for name in RULES:
        rows.append(replay(name, where, load, recorder.starts, series))
        say(line_of(rows[-1]))
    return rows


# -- the report --

HEAD = (
    f"{'rule':22} {'where':7} {'frames':>7} {'floor':>6} {'before':>7} {'kept':>6} {'again':>7} "
    f"{'hit rate':>9} {'copied/returned':>16} {'copied/emptied':>15} {'s to it':>8}"
)


def line_of(row: dict[str, Any]) -> str:
    emptied = row["frames_before"] - row["frames"]
    returned = row["busiest_frames"] - row["frames"]
    per_emptied = row["copied_per_returned"] * returned / emptied if emptied else 0.0
    seconds = f"{row['seconds_to_floor']:8.3f}" if "seconds_to_floor" in row else f"{'-':>8}"
    again = f"{row['hit_rate_again']:7.4f}" if "hit_rate_again" in row else f"{'-':>7}"
    return (
        f"{row['rule']:22} {row['where']:7} {row['frames']:7} {row['packed_floor']:6} {row['frames_before']:7} "
        f"{row.get('kept_pages', '-'):>6} {again} {row['hit_rate']:9.4f} {row['copied_per_returned']:16.3f} "
        f"{per_emptied:15.3f} {seconds}"
    )


def hit_rate_delta(rows: list[dict[str, Any]], what: str = "hit_rate") -> float:
    """Points of hit rate that `ours` has more than plain LRU."""
    rates = {row["rule"]: row[what] for row in rows}
    return round(100 * (rates["ours"] - rates["stock order + LRU"]), 4)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Frames by rule and place, hit rates on top, the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    palette = ("tab:gray", "tab:orange", "tab:red", "tab:purple", "tab:green", "tab:blue")
    colours = dict(zip(RULES, palette, strict=True))
    figure, panel = pyplot.subplots(figsize=(11, 5), layout="constrained")
    place = 0
    for where in dict.fromkeys(row["where"] for row in rows):
        chosen = [row for row in rows if row["where"] == where]
        places = range(place, place + len(chosen))
        for at, row in zip(places, chosen, strict=True):
            panel.bar(at, row["frames"], 0.8, color=colours[row["rule"]], label=row["rule"])
            rates = [f"{row[what]:.1%}" for what in ("hit_rate", "hit_rate_again") if what in row]
            panel.text(at, row["frames"] + 0.5, "\n".join([str(row["frames"]), *rates]), ha="center", fontsize=8)
        ends = (place - 0.5, places[-1] + 0.5)
        panel.hlines(chosen[0]["packed_floor"], *ends, color="black", linestyle="--", label="packed floor")
        panel.text(sum(ends) / 2, -4.5, where, ha="center")
        place = places[-1] + 2
    panel.set_xticks([])
    panel.set_ylim(0, max(row["frames"] for row in rows) + 9)
    panel.set_ylabel("frames at idle; on the bars: frames, hit rate, `again`")
    handles, labels = panel.get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))
    panel.legend(legend.values(), legend.keys(), fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.06))
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trace = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
    parser.add_argument("--seed", type=int, default=0, help="chooses prompts and lengths")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests of the load")
    parser.add_argument("--trace", type=Path, default=trace, help="a Mooncake trace (default: %(default)s)")
    parser.add_argument("--replay-only", action="store_true", help="start no server; keep the served rows there are")
    parser.add_argument("--json", action="store_true", help="end with one line holding the numbers as JSON")
    args = parser.parse_args()
    result = RESULTS / "idle_footprint.json"
    lines = [first_line(args.seed)]
    print(lines[0], flush=True)

    def say(line: str = "") -> None:
        print(line, flush=True)
        lines.append(line)

    say(f"{args.requests} requests, {CONCURRENCY} at a time; frames of {FRAME_PAGES} pages, {CAP_PAGES} pages cached")
    say(HEAD)
    served_by, rows = lines[0], []
    if args.replay_only:
        if not result.is_file():
            raise SystemExit("no idle_footprint.json whose served rows could be kept: run without --replay-only")
        kept = json.loads(result.read_text())
        served_by, rows = kept["served_by"], [row for row in kept["rows"] if row["where"] == "server"]
        say(f"the next {len(rows)} rows were measured before, by {served_by.removeprefix('# ')}")
        for row in rows:
            say(line_of(row))
    else:
        for name in SIDES:
            rows.append(serve(name, args.seed, args.requests))
            say(line_of(rows[-1]))
    ours = next(row for row in rows if row["rule"] == "ours")
    numbers = {
        "frames": ours["frames"],
        "packed_floor": ours["packed_floor"],
        "hit_rate_delta": hit_rate_delta(rows),
        "copied_per_returned": round(ours["copied_per_returned"], 4),
        "served_by": served_by,
    }
    series = published(args.seed + 1, SERIES)
    places = {"server": rows, "replay": replays("replay", published(args.seed, args.requests), series, say)}
    if args.trace.is_file():
        say(f"the first {TRACE_REQUESTS} requests of {args.trace.name}, prompts of {TRACE_BLOCKS} blocks at most:")
        series = traced(args.trace, TRACE_REQUESTS, SERIES)
        places["trace"] = replays("trace", traced(args.trace, 0, TRACE_REQUESTS), series, say)
    else:
        say(f"no trace at {args.trace.name}: its rows are left out; --trace names one")
    numbers["rows"] = [row for found in places.values() for row in found]
    for where, found in places.items():
        deltas = [hit_rate_delta(found, what) for what in ("hit_rate", "hit_rate_again") if what in found[0]]
        say(f"{where}: hit rates of ours less those of plain LRU, points: {', '.join(f'{d:+.3f}' for d in deltas)}")
    draw(numbers["rows"], RESULTS / "idle_footprint.png")
    (RESULTS / "idle_footprint.txt").write_text("\n".join(lines) + "\n")
    result.write_text(json.dumps(numbers, indent=1) + "\n")
    if args.json:
        print(json.dumps(numbers))


if __name__ == "__main__":
    main()
