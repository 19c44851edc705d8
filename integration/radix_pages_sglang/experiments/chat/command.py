"""The command `radix-pages experiment chat`: its options, and what they plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from radix_pages_sglang.counts import COUNT_STOCK
from radix_pages_sglang.experiments.chat.compare import result
from radix_pages_sglang.experiments.chat.load import Chats, Load, Replay, bench
from radix_pages_sglang.experiments.chat.plan import Plan, run
from radix_pages_sglang.experiments.chat.sides import TINY, Servers, Side, check_ports, model_of, running
from radix_pages_sglang.experiments.provenance import provenance
from radix_pages_sglang.experiments.report import finish
from radix_pages_sglang.knobs import MODES
from radix_pages_sglang.serve import CommandError, check_sglang

PAIRS, QUICK_PAIRS, PAIRS_A_START = 36, 3, 3
CONVERSATIONS = 64
PAGE_SIZE, POOL_TOKENS, TRACE_POOL_TOKENS, CONTEXT_TOKENS = 16, 6144, 24_576, 8192

LIMITS = (
    "CPU only, a tiny model by default: what a token costs there is mostly SGLang's own work and the cache's, so "
    "differences between caches weigh more than with a model that fills a GPU. Nothing here measures a GPU.",
    "Load generator and servers share the same cores. Both servers of a start stay up; the one that is not loaded "
    "sleeps (--sleep-on-idle). The tiny model runs on one thread.",
)


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


Out = Annotated[Path | None, _option("--out", help="Write the report into this directory.")]
Json = Annotated[Path | None, _option("--json", help="Write the numbers to this file.")]
Quick = Annotated[bool, _option("--quick", help="Two minutes: 3 pairs, servers started once.")]
Seed = Annotated[int, _option("--seed", min=0, help="Chooses prompts; pair p has seed + p on both sides.")]
Pairs = Annotated[int | None, _option("--pairs", min=1, help="Pairs of bursts, in turns.  [default: 36]")]
PairsAStart = Annotated[
    int | None, _option("--pairs-per-start", min=1, help="Pairs after which both servers start anew.  [default: 3]")
]
Conversations = Annotated[
    int | None, _option("--conversations", min=1, help="Conversations (or trace requests) a burst.  [default: 64]")
]
Turns = Annotated[int, _option("--turns", min=1, help="Turns of a conversation.")]
SystemPrompts = Annotated[int, _option("--system-prompts", min=1, help="System prompts; conversations share them.")]
SystemTokens = Annotated[int, _option("--system-tokens", min=1, help="Longest system prompt; the shortest is half.")]
QuestionTokens = Annotated[int, _option("--question-tokens", min=1, help="Longest question; the shortest is half.")]
AnswerTokens = Annotated[int, _option("--answer-tokens", min=1, help="Longest answer; the shortest is half.")]
Concurrency = Annotated[int, _option("--concurrency", min=1, help="Conversations (or requests) at a time.")]
Rate = Annotated[
    float | None, _option("--rate", min=0.001, help="Conversations (or requests) a second at most; else no bound.")
]
TraceFile = Annotated[Path | None, _option("--trace", help="Replay this Mooncake trace instead of conversations.")]
SkipBad = Annotated[
    bool, _option("--skip-bad", help="Pass over lines of the trace that do not parse, and count them.")
]
StallMs = Annotated[float, _option("--stall-ms", min=1, help="Waits between tokens longer than this are counted.")]
Url = Annotated[str | None, _option("--url", help="Load the server at this address; none is started.")]
StockUrl = Annotated[str | None, _option("--stock-url", help="With --url: the stock server to compare it with.")]
Model = Annotated[str | None, _option("--model", help="tiny, smollm2, or a folder with weights.  [default: tiny]")]
PoolTokens = Annotated[
    int | None, _option("--pool-tokens", min=1, help="KV pool, tokens.  [default: 6144, with --trace 24576]")
]
PageSize = Annotated[int | None, _option("--page-size", min=1, help="Tokens a page.  [default: 16]")]
Policy = Annotated[str | None, _option("--policy", help="SGLang's --radix-eviction-policy, both sides.")]
Mode = Annotated[str | None, _option("--mode", help=f"Ours: {', '.join(MODES)}.  [default: observe]")]
FrameTokens = Annotated[int | None, _option("--frame-tokens", min=1, help="Ours: tokens a frame.")]
Cap = Annotated[int | None, _option("--cap", min=0, help="Ours: most unused tokens that stay cached.")]
IdleTrim = Annotated[float | None, _option("--idle-trim", min=0, help="Ours: seconds idle before memory goes back.")]
Port = Annotated[
    int | None, _option("--port", min=1, max=65534, help="Ours; stock gets the next.  [default: free ones]")
]


def chat(
    out: Out = None,
    json_file: Json = None,
    quick: Quick = False,
    seed: Seed = 0,
    pairs: Pairs = None,
    pairs_per_start: PairsAStart = None,
    conversations: Conversations = None,
    turns: Turns = 3,
    system_prompts: SystemPrompts = 8,
    system_tokens: SystemTokens = 256,
    question_tokens: QuestionTokens = 64,
    answer_tokens: AnswerTokens = 32,
    concurrency: Concurrency = 16,
    rate: Rate = None,
    trace: TraceFile = None,
    skip_bad: SkipBad = False,
    stall_ms: StallMs = 100.0,
    url: Url = None,
    stock_url: StockUrl = None,
    model: Model = None,
    pool_tokens: PoolTokens = None,
    page_size: PageSize = None,
    policy: Policy = None,
    mode: Mode = None,
    frame_tokens: FrameTokens = None,
    cap: Cap = None,
    idle_trim: IdleTrim = None,
    port: Port = None,
) -> None:
    """Load this cache and stock SGLang with the same chats, in turns, and compare.

    SGLang's bench_serving holds conversations of several turns that share system prompts, on a pool too small for
    them. Each pair of bursts has the same prompts on both sides, one side after the other, the first one taking
    turns; each burst begins with an empty cache (a server at --url loses its own). Both servers are started anew
    every few pairs, because two processes of the same program differ; the intervals are over these starts. By default
    ours is what `--radix-cache-backend radix_pages` alone gives: mode observe.

    JSON keys: pairs, starts, failed_requests, answers_equal and prompt_lengths_equal {equal, total}; hit_rate,
    ttft_p50_ms, ttft_p90_ms, ttft_p99_ms, itl_p50_ms, itl_p99_ms (between tokens), throughput (output tokens a
    second), longest_gap_ms, stalls (long waits of 1,000 tokens), each {ours, stock, ours_range, stock_range,
    difference_percent, low, high}, of stock's and positive where ours is better; evictions, asked_tokens,
    asked_page_rounded, evicted_tokens, over_eviction (evicted / asked in whole pages), eviction_ms (all), eviction_us
    (one), reclaimed_pages, reclaimed_bytes, emptied_frames, returned_frames, returned_bytes, capped_tokens (evicted
    for the cap), moved_pages, each {ours, stock}, null where not counted; resident_bytes {side: {mean, most, kv_mean,
    kv_most}}; bursts, a row each.

    Example: radix-pages experiment chat --mode return --cap 2000 --out REPORT
    """
    options = {key: value for key, value in locals().items() if value is not None}
    planned = plan(options)
    from rich.console import Console

    Console().print(f"seed {seed}: {planned.pairs} pairs of bursts, servers started {planned.starts} times")
    with bench() as generator:
        found = run(planned, generator)
    parameters = {key: value for key, value in options.items() if key not in ("out", "json_file")}
    finish(result(found, provenance(seed), parameters | _made(planned), limits(planned)), out, json_file)


def plan(options: Mapping[str, Any]) -> Plan:
    """What the options ask for; those left out are not in it. Raises CommandError."""
    check_sglang()
    quick = options["quick"]
    pairs = options.get("pairs", QUICK_PAIRS if quick else PAIRS)
    servers = _servers(options)
    is_started = isinstance(servers, Servers)
    each = options.get("pairs_per_start", pairs if quick else PAIRS_A_START)
    return Plan(
        load=_load(options, pairs, _room(options, servers)),
        pairs=pairs,
        starts=-(-pairs // each) if is_started else 1,
        seed=options["seed"],
        stall_ms=options["stall_ms"],
        servers=servers,
    )


def _room(options: Mapping[str, Any], servers: Servers | dict[str, Side]) -> int:
    """Tokens that a request may have: the pool's, and no more than the model's context."""
    context = CONTEXT_TOKENS
    if isinstance(servers, Servers):
        config = json.loads((servers.model / "config.json").read_text())
        context = config.get("max_position_embeddings", CONTEXT_TOKENS)
    return min(_pool_tokens(options), context)


def _load(options: Mapping[str, Any], pairs: int, room_tokens: int) -> Load:
    number = options.get("conversations", CONVERSATIONS)
    if "trace" in options:
        return Replay(
            options["trace"],
            number,
            pairs,
            answer_tokens=options["answer_tokens"],
            room_tokens=room_tokens,
            concurrency=options["concurrency"],
            rate=options.get("rate"),
            skip_bad=options["skip_bad"],
        )
    names = ("system_prompts", "turns", "system_tokens", "question_tokens", "answer_tokens", "concurrency")
    return Chats(conversations=number, rate=options.get("rate"), **{name: options[name] for name in names})


def _pool_tokens(options: Mapping[str, Any]) -> int:
    tokens: int = options.get("pool_tokens", TRACE_POOL_TOKENS if "trace" in options else POOL_TOKENS)
    return tokens


OF_SERVERS = ("model", "pool_tokens", "page_size", "policy", "mode", "frame_tokens", "cap", "idle_trim", "port")


def _servers(options: Mapping[str, Any]) -> Servers | dict[str, Side]:
    """The servers at the addresses given, or how to start some."""
    if "url" in options:
        given = [f"--{name.replace('_', '-')}" for name in (*OF_SERVERS, "pairs_per_start") if name in options]
        if given:
            raise CommandError(f"{given[0]} is for servers this starts, and --url names one that runs: leave one out")
        return running(options["url"], options.get("stock_url"))
    if "stock_url" in options:
        raise CommandError("--stock-url compares with a server at --url: give its address, too")
    page_size = options.get("page_size", PAGE_SIZE)
    settings = _settings(options, page_size)
    if "port" in options:
        check_ports(options["port"])
    name = options.get("model", TINY)
    folder, needed = model_of(name)
    arguments = (
        *(*needed, "--page-size", str(page_size), "--max-total-tokens", str(_pool_tokens(options))),
        *("--enable-cache-report", "--sleep-on-idle"),
        *(("--radix-eviction-policy", options["policy"]) if "policy" in options else ()),
    )
    # A second thread finds nothing to do in the tiny model and keeps the load generator from its core.
    threads = {} if name != TINY else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return Servers(folder, arguments, {**threads, **settings}, options.get("port", 0))


def _settings(options: Mapping[str, Any], page_size: int) -> dict[str, str]:
    """Our server's environment. Raises CommandError for settings that it would refuse."""
    from radix_pages_sglang.config import SettingError, Settings

    names = {
        "mode": "RADIX_PAGES_MODE",
        "frame_tokens": "RADIX_PAGES_FRAME_TOKENS",
        "cap": "RADIX_PAGES_MAX_CACHED_TOKENS",
        "idle_trim": "RADIX_PAGES_IDLE_TRIM_SECONDS",
    }
    settings = {variable: str(options[name]) for name, variable in names.items() if name in options}
    try:
        found = Settings.from_environment({**os.environ, **settings})
    except SettingError as error:
        raise CommandError(f"ours cannot start: {error}") from error
    if found.frame_tokens is not None and found.frame_tokens % page_size:
        raise CommandError(f"--frame-tokens {found.frame_tokens} is not a multiple of --page-size {page_size}")
    return settings


def _made(planned: Plan) -> dict[str, Any]:
    """What the options came to, for the report."""
    made: dict[str, Any] = {"pairs": planned.pairs, "starts": planned.starts}
    if isinstance(planned.load, Chats):
        made |= asdict(planned.load)
    else:
        made |= {"trace_requests_left_out": planned.load.left_out, "trace_lines_skipped": planned.load.skipped}
    if isinstance(planned.servers, Servers):
        variables = {key: value for key, value in os.environ.items() if key.startswith("RADIX_PAGES_")}
        settings = {**variables, **planned.servers.settings}
        settings.pop(COUNT_STOCK, None)  # for both sides, whatever it is outside
        made |= {"model": planned.servers.model.name, "arguments": " ".join(planned.servers.arguments)}
        made |= {"settings": " ".join(f"{key}={value}" for key, value in settings.items()) or "none"}
    return made


def limits(planned: Plan) -> list[str]:
    """What the numbers do not say."""
    said = list(LIMITS)
    if planned.starts > 1:
        said.append(f"Intervals: Student's t over the means of {planned.starts} starts of both servers.")
    else:
        said.append("Intervals are over the pairs of one start of the servers: another start may come out otherwise.")
    if isinstance(planned.load, Chats):
        said.append(
            "Prompts are random words. Answers go back into the prompts of later turns, so prompts are the same on "
            "both sides as long as answers are, which is counted."
        )
    else:
        said.append(
            "bench_serving writes about 130 tokens for a block of 512 of the trace, which keeps what is shared and "
            f"not the lengths. Answers end after {planned.load.answer_tokens} tokens. Of the requests read, "
            f"{planned.load.left_out} were too long for the pool and left out."
        )
    return said
