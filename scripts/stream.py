"""A stream of staggered requests, and what serving it asks of an allocator.

A simulated scheduler runs the real tree, queue and planner in virtual time (a step is one forward pass). `Recorder`
writes down what it asks for, with tickets in the place of pages: scripts/placement.py replays that through rules for
choosing pages. It also notes how many requests start in each step: scripts/under_load.py replays those with caches
that differ in what they evict and move.

Requests share 16 hot prefixes of 128 tokens (3 in 10, suffix 64) or are cold (192 to 1,024 tokens), and decode 16 to
256 tokens; a new one starts when one ends. A cold prompt is new, or one of a given number that come again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radix_pages.order import LeafQueue, make_order
from radix_pages.planner import Plan, plan_pages
from radix_pages.reclaim import reclaim
from radix_pages.results import Removal
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry

PAGE_SIZE = 16
PREFILL_TOKENS = 2048
"""At most so many new tokens of prompts in one step."""

Ticket = int
"""Stands for a page in a record; the replay gives it one."""


@dataclass(frozen=True, slots=True)
class Extend:
    """One request takes pages for its prompt; `near` is the last page of its cached prefix."""

    tickets: list[Ticket]
    near: Ticket | None


@dataclass(frozen=True, slots=True)
class Decode:
    """Several requests take a page each; `near` has the last page of each."""

    tickets: list[Ticket]
    near: list[Ticket]


@dataclass(frozen=True, slots=True)
class Give:
    """Nobody needs these pages any more."""

    tickets: list[Ticket]
    is_eviction: bool


@dataclass(frozen=True, slots=True)
class Lock:
    """Cached pages that a running request begins to use, or, with `is_over`, that none uses any more."""

    tickets: list[Ticket]
    is_over: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """A step of the load is over, or a phase is."""

    phase: str


@dataclass(eq=False)
class Request:
    """`pages` holds its KV; the first `shared` of them are the tree's, under the lock of `node`."""

    prompt: list[int]
    output: list[int]
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    node: int = 0
    num_output: int = 0

    @property
    def kv(self) -> list[int]:
        """Tokens with KV: the newest output token has none yet."""
        return self.prompt + self.output[: max(self.num_output - 1, 0)]


def make_requests(num_requests: int, seed: int, num_cold: int | None = None) -> list[Request]:
    """Cold prompts are drawn from `num_cold` that come again and again; all are new without it."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(32_000) for _ in range(count)]

    hot = [tokens(128) for _ in range(16)]
    cold = [tokens(rng.randrange(192, 1025)) for _ in range(num_cold or 0)]
    requests = []
    for _ in range(num_requests):
        if rng.random() < 0.3:
            prompt = rng.choice(hot) + tokens(64)
        else:
            prompt = rng.choice(cold) if cold else tokens(rng.randrange(192, 1025))
        requests.append(Request(prompt, tokens(rng.randrange(16, 257))))
    return requests


class Serving:
    """Runs requests over a prefix cache. Where pages come from, and what is evicted, is a subclass's.

    At most `cached_pages` pages are cached and not in use, as RADIX_PAGES_MAX_CACHED_TOKENS has it.
    """

    def __init__(self, geometry: Geometry, cached_pages: int | None) -> None:
        self.geometry = geometry
        self.leaves = LeafQueue(make_order("lru", page_size=PAGE_SIZE))
        self.tree = RadixTree(geometry, np.copy, self.leaves)
        self.running: list[Request] = []
        self.cached_pages = cached_pages
        self.prompt_tokens = 0
        self.hit_tokens = 0

    def extend(self, num_pages: int, near: int | None) -> list[int]:
        """Pages for a prompt; `near` is the last page of its cached prefix."""
        raise NotImplementedError

    def grow(self, near: list[int]) -> list[int]:
        """A page for each request whose last page is in `near`."""
        raise NotImplementedError

    def give(self, pages: list[int], is_eviction: bool = False) -> None:
        """Nobody needs `pages` any more."""
        raise NotImplementedError

    def lock(self, pages: list[int]) -> None:
        """A running request begins to use these pages of the tree."""

    def unlock(self, pages: list[int]) -> None:
        """A running request uses these pages no more."""

    def start(self, request: Request) -> int:
        """Prefill `request`; how many tokens that computes."""
        length = len(request.prompt)
        match = self.tree.match(key(request.prompt[: length - 1]))
        request.node = self.tree.lock(match.node.id).id
        request.pages = self.path(request.node)
        request.shared = len(request.pages)
        self.lock(request.pages)
        near = request.pages[-1] if request.pages else None
        request.pages = request.pages + self.extend(self.geometry.pages_to_hold(length) - request.shared, near)
        hit = self.geometry.slots(request.shared)
        self.prompt_tokens += length
        self.hit_tokens += hit
        request.num_output = 1
        self.insert(request)
        self.running.append(request)
        return length - hit

    def decode(self) -> None:
        """One token for everybody; who has all of them ends."""
        growing = [r for r in self.running if self.geometry.pages_to_hold(len(r.kv) + 1) > len(r.pages)]
        if growing:
            new = self.grow([request.pages[-1] for request in growing])
            for request, page in zip(growing, new, strict=True):
                request.pages = [*request.pages, page]
        for request in self.running:
            request.num_output += 1
        for request in [r for r in self.running if r.num_output > len(r.output)]:
            self.running.remove(request)
            self.insert(request)
            self.tree.unlock(request.node)
            self.unlock(request.pages)
            self.give(request.pages[request.shared :])
            self.keep_cap()

    def insert(self, request: Request) -> None:
        """The request's whole pages go into the tree; where the tree has them already, it uses the tree's."""
        num_whole = self.geometry.whole_pages(len(request.kv))
        before, tail = request.pages[:num_whole], request.pages[num_whole:]
        done = self.tree.insert(key(request.kv), np.repeat(before, PAGE_SIZE), owned_pages=request.shared)
        self.tree.lock(done.node.id)
        self.tree.unlock(request.node)
        after = self.path(done.node.id)
        kept = set(before) & set(after)
        self.lock([page for page in after if page not in kept])
        gone = [page for page in before if page not in kept]
        self.unlock(gone)
        self.give(gone)
        request.node, request.shared, request.pages = done.node.id, num_whole, after + tail

    def path(self, node_id: int) -> list[int]:
        nodes = self.tree.path(self.tree.node(node_id))
        return [page for node in nodes for page in node.payload[::PAGE_SIZE].tolist()]

    def keep_cap(self) -> None:
        """Evict what is cached beyond the cap."""
        if self.cached_pages is not None:
            self.evict(self.tree.evictable_pages - self.cached_pages)

    def evict(self, num_pages: int) -> None:
        """Evict exactly so many pages, or all there are, in the order of the queue."""
        self.carry_out(plan_pages(self.leaves, num_pages))

    def carry_out(self, plan: Plan) -> None:
        self.give(pages_in(reclaim(self.tree, plan)), is_eviction=True)


class Recorder(Serving):
    """The scheduler. Pages are tickets here; how many are free never depends on which page a ticket will be.

    `ops` is what it asks of an allocator; `starts` has for each step the number of requests that start, in the order
    in which they were given, and 0 for a step of decodes.
    """

    def __init__(self, requests: list[Request], concurrency: int, num_pages: int, cached_pages: int | None) -> None:
        super().__init__(Geometry(PAGE_SIZE), cached_pages)
        self.waiting = requests[::-1]
        self.concurrency = concurrency
        self.num_free = num_pages
        self.num_tickets = 0
        self.evicted = 0
        self.locks: dict[Ticket, int] = {}
        self.ops: list[Any] = []
        self.starts: list[int] = []

    def record(self) -> list[Any]:
        while self.waiting or self.running:
            before = len(self.waiting)
            if not self.admit():
                self.decode()
            self.starts.append(before - len(self.waiting))
            self.ops.append(Mark("load"))
        self.ops.append(Mark("idle"))
        self.evict(self.tree.evictable_pages // 2)
        self.ops.append(Mark("trimmed"))
        return self.ops

    def admit(self) -> bool:
        """One prefill step; False when nobody can start."""
        budget = PREFILL_TOKENS
        while self.waiting and len(self.running) < self.concurrency and budget > 0:
            request = self.waiting[-1]
            length = len(request.prompt)
            match = self.tree.match(key(request.prompt[: length - 1]))
            own = self.geometry.pages_to_hold(length + len(request.output))
            outstanding = sum(
                self.geometry.pages_to_hold(len(other.prompt) + len(other.output)) - len(other.pages)
                for other in self.running
            )
            if outstanding + own + match.num_pages > self.num_free + self.tree.evictable_pages:
                break
            self.waiting.pop()
            budget -= self.start(request)
        return budget < PREFILL_TOKENS

    def extend(self, num_pages: int, near: Ticket | None) -> list[Ticket]:
        tickets = self.take(num_pages)
        self.ops.append(Extend(tickets, near))
        return tickets

    def grow(self, near: list[Ticket]) -> list[Ticket]:
        tickets = self.take(len(near))
        self.ops.append(Decode(tickets, near))
        return tickets

    def take(self, num_pages: int) -> list[Ticket]:
        self.evict(num_pages - self.num_free)
        self.num_free -= num_pages
        assert self.num_free >= 0, "admission promised more pages than there are"
        first, self.num_tickets = self.num_tickets, self.num_tickets + num_pages
        tickets = list(range(first, self.num_tickets))
        self.locks.update(dict.fromkeys(tickets, 1))
        return tickets

    def give(self, pages: list[Ticket], is_eviction: bool = False) -> None:
        if pages:
            locks = [self.locks.pop(ticket) for ticket in pages]
            assert not any(locks), "a page that a running request uses came back"
            self.num_free += len(pages)
            self.evicted += len(pages) * is_eviction
            self.ops.append(Give(pages, is_eviction))

    def lock(self, pages: list[Ticket]) -> None:
        begun = [ticket for ticket in pages if not self.locks[ticket]]
        for ticket in pages:
            self.locks[ticket] += 1
        self.ops.append(Lock(begun, is_over=False))

    def unlock(self, pages: list[Ticket]) -> None:
        for ticket in pages:
            self.locks[ticket] -= 1
        self.ops.append(Lock([ticket for ticket in pages if not self.locks[ticket]], is_over=True))


def key(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int64).tobytes()


def pages_in(removals: list[Removal]) -> list[int]:
    """The pages that left the tree."""
    return [page for removal in removals for page in removal.payload[::PAGE_SIZE].tolist()]
