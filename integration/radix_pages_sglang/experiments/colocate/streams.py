"""Two request streams with opposed bursts: while one model is busy the other is quiet, and the reverse.

A stream is made of talks. A talk begins with one of a few system prompts and a document, and every turn adds to its
prompt; the next turn comes after some seconds of thought. Some documents are new, the others from a pool that comes
again and again, so that what a model keeps through its quiet time is worth something. What the model answers is not
part of the next prompt (as where reasoning is left out), so a prompt never depends on how it was served.

Everything is in pages of PAGE_TOKENS tokens: a prompt is a run of page ids, and equal ids are equal tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from pathlib import Path

from radix_pages_sglang.experiments.traces import TraceRequest, open_trace
from radix_pages_sglang.serve import CommandError

PAGE_TOKENS = 16
TOKEN_IDS = (1_000, 40_000)
"""From which ids the tokens of a page are drawn, half-open."""

MOST_TRACED = 50_000
"""So many requests of a trace are read."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of whole pages that arrives `seconds` after the start and is answered with so many tokens."""

    seconds: float
    pages: tuple[int, ...]
    answer_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return len(self.pages) * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Shape:
    """What one model is asked. Rates are talks that begin in a second; pairs are ranges, both ends included."""

    busy_rate: float
    quiet_rate: float
    document_pages: tuple[int, int]
    turn_pages: tuple[int, int]
    answer_tokens: tuple[int, int]
    turns: float = 4.0
    """Turns of a talk, on average (geometric, cut at `most_turns`)."""
    most_turns: int = 12
    thinking_seconds: float = 6.0
    """Between two turns, on average (exponential)."""
    pool_documents: int = 60
    pool_share: float = 0.4
    """The part of the talks whose document is one of the pool's."""
    system_prompts: int = 4
    system_pages: int = 8


@dataclass(frozen=True, slots=True)
class Phases:
    """Who is busy when: the first model in the first half of every period, the second in the other half."""

    half_seconds: float
    periods: int

    @property
    def seconds(self) -> float:
        return 2 * self.half_seconds * self.periods

    def is_busy(self, model: int, seconds: float) -> bool:
        return int(seconds // self.half_seconds) % 2 == model


def stream(shape: Shape, phases: Phases, model: int, seed: int) -> list[Request]:
    """The requests of one model (0 or 1) in the order of their arrival; the same ones for the same seed."""
    rng = random.Random(f"model {model}, seed {seed}")
    ids = count(1)
    systems = [_new(ids, shape.system_pages) for _ in range(shape.system_prompts)]
    pool = [_new(ids, rng.randint(*shape.document_pages)) for _ in range(shape.pool_documents)]
    found = []
    for start in _arrivals(shape, phases, model, rng):
        from_pool = pool and rng.random() < shape.pool_share
        document = rng.choice(pool) if from_pool else _new(ids, rng.randint(*shape.document_pages))
        found += _talk(start, rng.choice(systems) + document, shape, ids, rng)
    return sorted((one for one in found if one.seconds < phases.seconds), key=lambda one: one.seconds)


def traced(path: Path, shape: Shape, phases: Phases, model: int, seed: int, most_pages: int) -> list[Request]:
    """A trace's requests in its order, as many a second as `shape` has turns.

    Prompts are cut to their first `most_pages` pages; every seed begins elsewhere in the trace. Raises CommandError
    for a trace that cannot be read.
    """
    rng = random.Random(f"model {model}, seed {seed}")
    faster = replace(shape, busy_rate=shape.busy_rate * shape.turns, quiet_rate=shape.quiet_rate * shape.turns)
    arrivals = list(_arrivals(faster, phases, model, rng))
    trace = open_trace(path)
    requests = list(islice(trace, MOST_TRACED))
    if len(requests) < 2:
        raise CommandError(f"{path} has one request: a stream needs at least two")
    first = rng.randrange(len(requests))
    return [
        _from_trace(requests[(first + place) % len(requests)], seconds, trace.block_tokens, shape, most_pages)
        for place, seconds in enumerate(arrivals)
    ]


def tokens(page: int) -> list[int]:
    """The tokens that page id `page` stands for."""
    return random.Random(page).choices(range(*TOKEN_IDS), k=PAGE_TOKENS)


def _arrivals(shape: Shape, phases: Phases, model: int, rng: random.Random) -> Iterator[float]:
    """When talks begin: a Poisson process whose rate changes with the phase. A wait that would end in another phase
    is drawn anew there, which leaves the process what it is."""
    edges = [phases.half_seconds * place for place in range(2 * phases.periods + 1)]
    for start, stop in pairwise(edges):
        rate = shape.busy_rate if phases.is_busy(model, start) else shape.quiet_rate
        now = start
        while rate > 0 and (now := now + rng.expovariate(rate)) < stop:
            yield now


def _talk(
    start: float, prompt: tuple[int, ...], shape: Shape, ids: Iterator[int], rng: random.Random
) -> list[Request]:
    found = []
    for _ in range(shape.most_turns):
        prompt = prompt + _new(ids, rng.randint(*shape.turn_pages))
        found.append(Request(start, prompt, rng.randint(*shape.answer_tokens)))
        if rng.random() * shape.turns < 1.0:
            break
        start += rng.expovariate(1.0 / shape.thinking_seconds)
    return found


def _new(ids: Iterator[int], num_pages: int) -> tuple[int, ...]:
    return tuple(next(ids) for _ in range(num_pages))


def _from_trace(request: TraceRequest, seconds: float, block_tokens: int, shape: Shape, most_pages: int) -> Request:
    per_block = max(block_tokens // PAGE_TOKENS, 1)
    pages = tuple((block * per_block + place) % 2**63 for block in request.blocks for place in range(per_block))
    whole = max(request.input_tokens // PAGE_TOKENS, 1)
    answer = min(max(request.output_tokens, 1), shape.answer_tokens[1])
    return Request(seconds, pages[: min(whole, most_pages)], answer)
