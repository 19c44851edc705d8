"""One of two models in virtual time: its cache serves a stream of requests.

A prefill computes what is not cached, a decode step gives every running request a token. What each takes, and what
memory costs to map, unmap and copy, is `Speeds` (modelled). Between two batches the model comes below its ceiling as
the adapter does (`radix_pages_sglang.control`), but moves all that a plan says at once: on a GPU a slice of 5 ms
holds thousands of pages.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from radix_pages_sglang.experiments.colocate.cache import Cache, Device, key
from radix_pages_sglang.experiments.colocate.outcome import Memory, Served, Speeds
from radix_pages_sglang.experiments.colocate.streams import PAGE_TOKENS, Request

PREFILL_TOKENS = 2048
"""At most so many new tokens of prompts in one batch, but at least one request."""

PATIENCE_SECONDS = 60.0
"""A request that could not start for so long has failed."""

REST_STEPS = 8
"""Decode steps between one try to come below a ceiling and the next, where requests hold what would have to go."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request in the queue; one that was retracted has had its first token."""

    request: Request
    is_retracted: bool = False


@dataclass(eq=False, slots=True)
class Running:
    """A request that is being answered. `pages` hold its KV; the first `shared` are the tree's, under the lock of
    `node`. `begun` is how many decode steps there had been when it started."""

    request: Request
    pages: list[int]
    shared: int
    node: int
    begun: int

    @property
    def kv_tokens(self) -> int:
        """Tokens of the answer that need KV: the last one never does."""
        return self.request.answer_tokens - 1

    @property
    def lacking_pages(self) -> int:
        """Pages that it will still ask for."""
        return -(-self.kv_tokens // PAGE_TOKENS) - (len(self.pages) - self.shared)

    def due(self) -> int:
        """The decode step at which it asks for a page or has ended."""
        own = len(self.pages) - self.shared
        return self.begun + min(own * PAGE_TOKENS, self.kv_tokens)


class Neighbour:
    """One model with its stream, as a broker sees it (`broker.Model`).

    A request is retracted when there is no page for its next token, and starts anew when there is room; it is lost
    when that takes too long. With `gives_all` empty frames go back between batches, for whoever takes them first.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        device: Device,
        memory: Memory,
        speeds: Speeds,
        *,
        shrink: str = "evict",
        cached_pages: int | None = None,
        gives_all: bool = False,
    ) -> None:
        self.cache = Cache(device, memory.pages_per_frame, shrink, cached_pages)
        self.clock = 0.0
        self.served: list[Served] = []
        self.computed_tokens = self.retracted = self.lost = 0
        self._speeds = speeds
        self._gives_all = gives_all
        self._coming = deque(requests)
        self._waiting: deque[Job] = deque()
        self._running: list[tuple[int, int, Running]] = []
        self._num_decodes = self._num_filed = 0
        self._own_ids = -1
        self._rests_until = 0
        self._settled_at = 0.0
        self._charged = (0, 0, 0)

    # -- what a broker sees and does --

    @property
    def committed_frames(self) -> int:
        return self.cache.residency.committed_frames

    @property
    def ceiling_frames(self) -> int:
        return self.cache.ceiling_frames

    @property
    def reserved_frames(self) -> int:
        asked = sum(one.lacking_pages for _, _, one in self._running)
        if self._waiting:
            asked += most_pages(self._waiting[0].request)
        return self.cache.geometry.frames_to_hold(self.cache.used_pages + asked + 1)  # and the padding page

    @property
    def demand_tokens(self) -> int:
        return self.computed_tokens

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def settled_at(self, now: float) -> float:
        return self._settled_at

    def set_ceiling(self, num_frames: int) -> None:
        self.cache.residency.max_frames = num_frames
        self._rests_until = 0
        if self.is_idle:
            self._keep_ceiling()

    def flush(self) -> None:
        self.cache.evict(self.cache.tree.evictable_pages)

    # -- time --

    @property
    def is_done(self) -> bool:
        return self.is_idle and not self._coming

    def run_until(self, seconds: float) -> None:
        """Serve until the clock has reached `seconds`; the last batch may end later."""
        while self.clock < seconds:
            if self.cache.residency.over_ceiling_frames and self._num_decodes >= self._rests_until:
                self._keep_ceiling()
            if self._gives_all:
                self.cache.residency.trim()
            self._pay()
            self._arrive()
            if self._prefill():
                continue
            if self._running:
                self._decode(seconds)
            else:
                self.clock = min(self._coming[0].seconds if self._coming else math.inf, seconds)

    def check(self) -> None:
        """Raises RuntimeError when tree, requests and ledger disagree about who holds what."""
        self.cache.check([page for _, _, one in self._running for page in one.pages[one.shared :]])

    def _keep_ceiling(self) -> None:
        self.cache.keep_ceiling()
        self._pay()
        if self.cache.residency.over_ceiling_frames:
            self._rests_until = self._num_decodes + REST_STEPS
        else:
            self._settled_at = self.clock

    def _pay(self) -> None:
        """Let the time pass that memory took since the last call."""
        now = (self.cache.share.mapped, self.cache.share.unmapped, self.cache.moved_pages)
        mapped, unmapped, moved = (new - old for new, old in zip(now, self._charged, strict=True))
        self._charged = now
        speeds = self._speeds
        self.clock += mapped * speeds.map_frame_seconds + unmapped * speeds.unmap_frame_seconds
        self.clock += moved * speeds.copy_page_seconds

    def _arrive(self) -> None:
        while self._coming and self._coming[0].seconds <= self.clock:
            self._waiting.append(Job(self._coming.popleft()))
        while self._waiting and self.clock - self._waiting[0].request.seconds > PATIENCE_SECONDS:
            job = self._waiting.popleft()
            if job.is_retracted:
                self.lost += 1
            else:
                self.served.append(Served(job.request.seconds, job.request.prompt_tokens))

    # -- batches --

    def _prefill(self) -> bool:
        """One batch of prompts; False when nobody can start."""
        computed = 0
        started: list[tuple[Job, int]] = []
        while self._waiting and computed < PREFILL_TOKENS and self._fits(self._waiting[0].request):
            job = self._waiting.popleft()
            hit = self._start(job.request)
            computed += job.request.prompt_tokens - hit
            started.append((job, hit))
        if not started:
            return False
        self._pay()
        self.clock += computed / self._speeds.prefill_tokens_per_second + self._speeds.decode_step_seconds
        self.computed_tokens += computed
        for job, hit in started:
            request, after = job.request, self.clock - job.request.seconds
            if not job.is_retracted:
                self.served.append(Served(request.seconds, request.prompt_tokens, hit, after))
        return True

    def _fits(self, request: Request) -> bool:
        """Whether it can be served to its end beside all that run, evicting what is cached."""
        asked = sum(one.lacking_pages for _, _, one in self._running)
        return most_pages(request) + asked <= self.cache.most_free_pages

    def _start(self, request: Request) -> int:
        """Prefill `request`; how many of its tokens were cached. Its last page is computed always, as in SGLang."""
        cache, tree = self.cache, self.cache.tree
        match = tree.match(key(request.pages[:-1]))
        tree.lock(match.node.id)
        cached = cache.path(match.node)
        lacking = len(request.pages) - len(cached)
        cache.make_room(lacking)
        pages = cached + cache.placement.take(lacking, cached[-1] if cached else None).tolist()
        done = tree.insert(key(request.pages), np.array(pages), owned_pages=len(cached))
        tree.lock(done.node.id)
        tree.unlock(match.node.id)
        if done.matched_pages > len(cached):  # its last page was there already
            cache.give(pages[len(cached) : done.matched_pages])
            pages = cache.path(done.node)
        self._file(Running(request, pages, len(pages), done.node.id, self._num_decodes))
        return len(cached) * PAGE_TOKENS

    def _file(self, running: Running) -> None:
        self._num_filed += 1
        heapq.heappush(self._running, (running.due(), self._num_filed, running))

    def _decode(self, until: float) -> None:
        """Tokens for all that run, up to the step at which one asks for a page or ends, or until something comes."""
        while self._running and self._running[0][0] <= self._num_decodes:
            _, _, running = heapq.heappop(self._running)
            if self._num_decodes - running.begun >= running.kv_tokens:
                self._finish(running)
            elif self.cache.make_room(1):
                running.pages.append(self.cache.placement.take_one(running.pages[-1]))
                self._file(running)
            else:
                self._retract(running)
        self._pay()
        if not self._running:
            return
        if self._coming and not self._waiting:  # who waits already, waits for memory
            until = min(until, self._coming[0].seconds)
        most = math.ceil((until - self.clock) / self._speeds.decode_step_seconds)
        steps = max(min(self._running[0][0] - self._num_decodes, most), 1)
        self._num_decodes += steps
        self.clock += steps * self._speeds.decode_step_seconds

    def _finish(self, running: Running) -> None:
        """The whole pages of the answer are cached, too; nobody asks for them again."""
        whole = running.kv_tokens // PAGE_TOKENS
        answer = tuple(range(self._own_ids, self._own_ids - whole, -1))
        self._own_ids -= whole
        kept = running.shared + whole
        self.cache.tree.insert(
            key(running.request.pages + answer), np.array(running.pages[:kept]), owned_pages=running.shared
        )
        self.cache.tree.unlock(running.node)
        self.cache.give(running.pages[kept:])
        self.cache.keep_cap()

    def _retract(self, running: Running) -> None:
        """There is no page for its next token: it begins anew when there is, and is still owed the rest."""
        self.cache.tree.unlock(running.node)
        self.cache.give(running.pages[running.shared :])
        owed = running.request.answer_tokens - (self._num_decodes - running.begun)
        self.retracted += 1
        self._waiting.appendleft(Job(replace(running.request, answer_tokens=owed), is_retracted=True))


def most_pages(request: Request) -> int:
    """Pages that it needs at its end, if none of them is shared."""
    return len(request.pages) + -(-(request.answer_tokens - 1) // PAGE_TOKENS)
