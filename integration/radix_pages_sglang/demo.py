"""The demo: one multi-turn chat load under memory pressure, first on this cache, then on SGLang's own, one table.

Requests go one at a time in a fixed order at temperature 0, and the model runs in float32, so that both servers
must give the same answers although they keep different parts of the cache.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from radix_pages_sglang.counts import COUNT_STOCK, STATE_KEY, EvictionCounts
from radix_pages_sglang.cpu_engine import checkpoints
from radix_pages_sglang.experiments.pairs import spread
from radix_pages_sglang.experiments.provenance import in_words, provenance
from radix_pages_sglang.local_server import Server, serving, start

PAGE_SIZE = 16
POOL_TOKENS = 4096
MAX_ANSWER_TOKENS = 24
SERVER_ARGUMENTS = (
    *("--dtype", "float32", "--page-size", str(PAGE_SIZE), "--max-total-tokens", str(POOL_TOKENS)),
    *("--max-running-requests", "8", "--enable-cache-report"),
)
AT_A_TIME = 6
"""Conversations that take turns; when one ends, the next begins."""

SYSTEM_PROMPTS = (
    "You are the travel desk of a small agency. You know trains, ferries and footpaths better than airports. Answer "
    "in one or two short sentences, name places exactly, and never promise a price. When a question is unclear, "
    "say which part you would need to know. Prefer the slower way when it is the more beautiful one, and always "
    "say how long a journey takes. You speak kindly, without exclamation marks and without lists.",
    "You help people in their kitchen. You give temperatures in degrees Celsius and weights in grams, and you warn "
    "when something can burn, boil over or spoil. Answer in one or two short sentences. If an ingredient is missing, "
    "offer one replacement that most people have at home. Do not praise the cook, do not repeat the question, and "
    "do not give a whole recipe unless somebody asks for one in so many words.",
    "You explain science to curious children of about ten years. You use everyday words and one picture from daily "
    "life in every answer. Answer in one or two short sentences. When nobody knows the answer yet, say so plainly. "
    "Never talk down to the child, never use a formula, and if a question is dangerous to try at home, say what "
    "could happen and suggest watching somebody who knows how to do it.",
)
SUBJECTS = (
    ("a weekend in Lisbon", "the night train to Vienna", "the islands off Croatia", "walking in the Lake District"),
    ("a sourdough loaf", "lentil soup for six people", "an apple tart", "roast vegetables with feta"),
    ("rainbows", "why the sea is salty", "how bats find their way", "what the moon is made of"),
)
QUESTIONS = (
    "Please tell me something about {subject}. I have never heard of it before and I have little time, so begin with "
    "the one thing that matters most.",
    "Thank you. What is the most common mistake that people make about {subject}, and how could I have noticed it "
    "by myself before it was too late?",
    "My sister says the opposite of what you just told me. How could we both find out who is right, without asking "
    "anybody else and without spending any money?",
    "Now imagine that it rains all day and we have only one hour. What would you leave out, and what would you do "
    "first about {subject}?",
    "Give me one sentence about {subject} that I can write on a postcard to my grandmother, who likes short words.",
)


@dataclass(slots=True)
class Talk:
    """One conversation: its system prompt and the user's turns; `answers` grows as the load runs."""

    system: str
    questions: list[str]
    answers: list[str] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """What the next request sends: everything said so far and the next question."""
        said = [{"role": "system", "content": self.system}]
        for question, answer in zip(self.questions, self.answers, strict=False):
            said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*said, {"role": "user", "content": self.questions[len(self.answers)]}]


@dataclass(slots=True)
class Side:
    """What one server did with the load. Times in seconds; `counts` are EvictionCounts of its only rank."""

    name: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    ttft_seconds: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def talks(seed: int, number: int = 24) -> list[Talk]:
    """`number` conversations of 3 to 5 turns that share three system prompts; the same ones for the same seed."""
    rng = random.Random(seed)
    result = []
    for index in range(number):
        topic = index % len(SYSTEM_PROMPTS)
        subject = SUBJECTS[topic][index // len(SYSTEM_PROMPTS) % len(SUBJECTS[topic])]
        turns = 3 + index % 3
        asked = [question.format(subject=subject) for question in rng.sample(QUESTIONS, turns)]
        asked[0] = f"I am visitor number {rng.randrange(1000, 10_000)}. {asked[0]}"
        result.append(Talk(SYSTEM_PROMPTS[topic], asked))
    return result


def turn_order(all_talks: list[Talk]) -> Iterator[Talk]:
    """Whose turn it is: AT_A_TIME conversations go round, each until it has no more questions."""
    waiting = list(all_talks)
    active = [waiting.pop(0) for _ in range(min(AT_A_TIME, len(waiting)))]
    while active:
        talk = active.pop(0)
        yield talk
        if len(talk.answers) < len(talk.questions):
            active.append(talk)
        elif waiting:
            active.append(waiting.pop(0))


def hold_conversations(server: Server, side: Side, seed: int, on_answer: Callable[[], None]) -> None:
    """Run the whole load against `server`, one request at a time, and record it in `side`."""
    server.chat("Hello", max_tokens=4)  # the first request pays for what torch prepares once
    server.request("/flush_cache", {})
    before = state(server)
    for talk in turn_order(talks(seed)):
        start = time.perf_counter()
        first, answer, usage = server.stream_chat(talk.messages(), MAX_ANSWER_TOKENS)
        side.seconds += time.perf_counter() - start
        side.ttft_seconds.append(first)
        talk.answers.append(answer)
        side.answers.append(answer)
        side.requests += 1
        side.prompt_tokens += usage["prompt_tokens"]
        side.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        side.output_tokens += usage["completion_tokens"]
        on_answer()
    side.counts = {key: value - before[key] for key, value in state(server).items()}


COUNTED = (*(field.name for field in fields(EvictionCounts)), "frames_emptied")
"""Running totals in our state of `/server_info`; a stock server knows no frames."""


def state(server: Server) -> dict[str, float]:
    """The totals of the server's first rank."""
    found = json.loads(server.request("/server_info"))["internal_states"][0][STATE_KEY]
    return {key: found[key] for key in COUNTED if key in found}


def summary(ours: list[Side], stock: list[Side], seed: int) -> dict[str, Any]:
    """What `--json` writes. Counts and answers are those of the first run of each side; every run gave the same."""
    first, other = ours[0], stock[0]
    equal = [a == b for side in [*ours[1:], *stock] for a, b in zip(first.answers, side.answers, strict=True)]
    total = len(first.answers)
    return {
        "answers_equal": sum(equal[i::total].count(False) == 0 for i in range(total)),
        "answers_total": total,
        "evictions": first.counts["evictions"],
        "asked_tokens": first.counts["asked_tokens"],
        "asked_page_rounded": first.counts["asked_page_rounded"],
        "evicted_tokens": first.counts["evicted_tokens"],
        "pages_reclaimed": first.counts["pages_reclaimed"],
        "frames_emptied": first.counts["frames_emptied"],
        "hit_rate": round(first.hit_rate, 4),
        "stock_hit_rate": round(other.hit_rate, 4),
        "stock_evicted_tokens": other.counts["evicted_tokens"],
        "stock_asked_page_rounded": other.counts["asked_page_rounded"],
        "ttft_ms": [round(statistics.median(side.ttft_seconds) * 1e3, 1) for side in ours],
        "stock_ttft_ms": [round(statistics.median(side.ttft_seconds) * 1e3, 1) for side in stock],
        "output_tokens_per_s": [round(side.output_tokens / side.seconds, 2) for side in ours],
        "stock_output_tokens_per_s": [round(side.output_tokens / side.seconds, 2) for side in stock],
        "provenance": provenance(seed),
        "runs": [asdict(side) for side in [*ours, *stock]],
    }


def table(ours: list[Side], stock: list[Side], equal: int, total: int) -> Table:
    """The two sides as rows of one table: counts of the first run of each, times of all runs."""
    result = Table(title=f"{total} chat turns, pool of {POOL_TOKENS} tokens in pages of {PAGE_SIZE}")
    result.add_column("")
    result.add_column("radix_pages", justify="right")
    result.add_column("stock SGLang", justify="right")

    def row(label: str, value: Callable[[Side], Any]) -> None:
        result.add_row(label, str(value(ours[0])), str(value(stock[0])))

    def timed(label: str, value: Callable[[Side], float], digits: int) -> None:
        if len(ours) == 1:
            row(label, lambda side: f"{value(side):.{digits}f}")
        else:
            result.add_row(label, *(spread([value(side) for side in runs], digits) for runs in (ours, stock)))

    row("requests", lambda side: side.requests)
    row("prompt tokens", lambda side: side.prompt_tokens)
    row("cached tokens", lambda side: side.cached_tokens)
    row("hit rate", lambda side: f"{side.hit_rate:.1%}")
    row("evictions", lambda side: side.counts["evictions"])
    row("tokens the allocator asked for", lambda side: side.counts["asked_tokens"])
    row("  the same in whole pages", lambda side: side.counts["asked_page_rounded"])
    row("tokens evicted", lambda side: side.counts["evicted_tokens"])
    row(
        "  evicted / asked",
        lambda side: f"{side.counts['evicted_tokens'] / (side.counts['asked_page_rounded'] or 1):.2f}",
    )
    row("pages reclaimed", lambda side: side.counts["pages_reclaimed"])
    row("frames emptied", lambda side: side.counts.get("frames_emptied", "not counted"))
    timed("eviction time, ms", lambda side: side.counts["eviction_seconds"] * 1e3, 1)
    timed("median time to first token, ms", lambda side: statistics.median(side.ttft_seconds) * 1e3, 0)
    timed("output tokens a second", lambda side: side.output_tokens / side.seconds, 1)
    result.add_row("answers equal", f"{equal} of {total}", "")
    return result


def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    keep: Annotated[bool, typer.Option(help="Leave this cache's server running at the end.")] = False,
    seed: Annotated[int, typer.Option(help="Chooses the conversations.")] = 0,
    pairs: Annotated[int, typer.Option(min=1, help="Run both sides this often, alternating, to see the spread.")] = 1,
    port: Annotated[int, typer.Option(help="Port of this host for the servers; 0 finds a free one.")] = 0,
) -> None:
    """Hold the same conversations with this cache and with stock SGLang, and compare.

    Uses SmolLM2-135M-Instruct in float32 and a pool too small for the load. Exit status 0 when all answers agree,
    1 when one differs.
    """
    console = Console()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    runs: dict[str, list[Side]] = {"radix_pages": [], "stock": []}
    with Progress(*columns, console=console) as progress:
        preparing = progress.add_task("making the model (20 s the first time)", total=1)
        model = checkpoints.smollm2_checkpoint()
        progress.advance(preparing)
        requests = sum(len(talk.questions) for talk in talks(seed))
        for pair in range(pairs):
            for name in ("radix_pages", "stock") if pair % 2 == 0 else ("stock", "radix_pages"):
                side = Side(name)
                bar = progress.add_task(f"{name}: starting the server", total=requests)
                with serving(model, *SERVER_ARGUMENTS, **server_options(name, port)) as server:
                    progress.update(bar, description=f"{name}: chatting")
                    hold_conversations(server, side, seed, lambda bar=bar: progress.advance(bar))
                runs[name].append(side)
    result = summary(runs["radix_pages"], runs["stock"], seed)
    equal, total = result["answers_equal"], result["answers_total"]
    console.print(f"# {in_words(result['provenance'])}", soft_wrap=True)
    console.print(table(runs["radix_pages"], runs["stock"], equal, total))
    runs_told = (
        "One run of each side" if pairs == 1 else f"{pairs} runs of each side, in turns; times: mean (least to most)"
    )
    console.print(f"{runs_told}. Requests go one after the other.", soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written to {json_file}")
    if equal < total:
        print_differences(console, runs)
    if keep:
        keep_serving(console, model, port)
    raise typer.Exit(0 if equal == total else 1)


def server_options(name: str, port: int) -> dict[str, Any]:
    """How the server of one side is started; both count their evictions."""
    return {"env": {COUNT_STOCK: "1"}, "backend": "radix_pages" if name == "radix_pages" else None, "port": port}


def print_differences(console: Console, runs: dict[str, list[Side]]) -> None:
    for index, (ours, stock) in enumerate(zip(runs["radix_pages"][0].answers, runs["stock"][0].answers, strict=True)):
        if ours != stock:
            console.print(f"answer {index} differs:\n  radix_pages: {ours!r}\n  stock:       {stock!r}", markup=False)


def keep_serving(console: Console, model: Path, port: int) -> None:
    """Start this cache's server once more, leave it running, and say how to talk to it and how to stop it."""
    log = checkpoints.default_cache_dir() / "demo-server.log"
    with console.status("starting the server that stays"):
        server = start(model, *SERVER_ARGUMENTS, log=log, **server_options("radix_pages", port))
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": "default", "messages": [question], "temperature": 0})
    curl = f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"\nThe server runs on; its log is {log}. Talk to it:", soft_wrap=True)
    console.print(curl, markup=False, soft_wrap=True, highlight=False)
    console.print(f"Stop it: kill {server.pid}")
