"""Truth of content: every slot holds the KV of exactly the prefix that anybody reads it for, wherever pages move.

A request leaves in each slot that it computes the hash of the whole token prefix up to there, as numbers in every KV
buffer: three layers, keys and values, no two alike, over memory of the operating system. Moves, decommits and
everything else are the real thing. What the tree and running requests would read is compared after every rule.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radix_pages.backing import CommitError
from radix_pages.results import UnknownNodeError
from radix_pages_sglang.config import MODES
from radix_pages_sglang.knobs import (
    FREE_FRAMES,
    MAX_CACHED_TOKENS,
    MAX_RESIDENT_BYTES,
    MODE,
    NO_BOUND,
    RESERVE_FRAMES,
    TRIM,
)
from tests.adapter import caches
from tests.adapter.caches import Namespace, Request, prefix_marks

pytestmark = pytest.mark.usefixtures("published_config")

MOVE = MODES.index("move")
ROWS = 5
SHAPES = {1: (4, 47), 4: (4, 47), 16: (2, 31)}
"""By page size: pages of a frame, and pages of the pool without the padding page. The last frame of some is short."""
NAMESPACES = (Namespace(), Namespace("tenant"))
SEEDS = st.integers(0, 2**16)


def prompt(family: int, num_shared: int, variant: int, length: int) -> list[int]:
    """Prompts of a family share their first tokens, those of a variant all."""
    shared = [100 * family + i for i in range(min(num_shared, length))]
    return shared + [10_000 + 1_000 * variant + i for i in range(length - len(shared))]


class Served:
    """Requests that a pool in mode move serves, and what each slot must hold.

    `waiting` have matched, not locked; `readers` are locks with the slots that were read off their paths and the
    marks these must keep. `per_slice` pages move, or frames go back, in one step.
    """

    def __init__(self, page_size: int, placement: str | None, per_slice: int) -> None:
        self.page_size = page_size
        frame_pages, self.num_pages = SHAPES[page_size]
        self.cache = caches.returning(
            page_size=page_size,
            frame_pages=frame_pages,
            pool_tokens=self.num_pages * page_size,
            rows=ROWS,
            mode="move",
            layers=3,
            placement=placement,
        )
        self.control = self.cache.tree.control
        self.residency = self.cache.allocator.residency
        self.control._reclaimer.moves_per_slice = self.control.returns_per_slice = per_slice
        self.live: list[Request] = []
        self.waiting: list[Request] = []
        self.readers: list[tuple[object, torch.Tensor, list[int]]] = []
        self.failing_next = 0
        self._commit, self.residency.backing.commit = self.residency.backing.commit, self.commit

    def commit(self, frames) -> None:
        if self.failing_next:
            self.failing_next -= 1
            raise CommitError("pretended")
        self._commit(frames)

    @property
    def counts(self):
        return self.control._reclaimer.counts

    # -- what requests do --

    def has_room_for(self, num_pages: int) -> bool:
        """Whether so many pages can be had for sure, by committing and by evicting."""
        allocator = self.cache.allocator
        free = allocator.available_size() - allocator.withheld_size()
        if self.failing_next or self.residency._skip:
            free = allocator.committed_size()
        return num_pages * self.page_size <= free + self.cache.sizes.evictable

    def pages_between(self, start: int, stop: int) -> int:
        return -(-stop // self.page_size) - -(-start // self.page_size)

    def prefill(self, request: Request, chunk: int) -> bool:
        start = request.req.prefix_len
        stop = start + min(chunk, request.num_left_to_prefill)
        if not self.has_room_for(self.pages_between(start, stop)):
            return False
        request.prefill(chunk)
        return True

    def wait(self, tokens: list[int], namespace: Namespace) -> None:
        """A request looks what is cached for it, and does not get in yet."""
        request = Request(self.cache, tokens, namespace)
        request.req.init_next_round_input(self.cache.tree)
        self.waiting.append(request)

    def let_in(self, request: Request, chunk: int) -> None:
        """Lock what was matched, if it is still there, and compute the first chunk."""
        if len(self.live) == ROWS:
            return
        self.waiting.remove(request)
        try:
            request.req.lock = self.cache.tree.lock(request.req.last_node)
        except UnknownNodeError:
            request.admit()
        if self.prefill(request, chunk):
            self.live.append(request)
        else:
            self.cache.tree.unlock(request.req.lock)

    def begin(self, tokens: list[int], namespace: Namespace, chunk: int) -> None:
        self.wait(tokens, namespace)
        self.let_in(self.waiting[-1], chunk)

    def is_decoding(self, request: Request) -> bool:
        return not request.num_left_to_prefill or bool(request.req.output_ids)

    def go_on(self, request: Request, num_tokens: int, publish: bool) -> None:
        """The next chunk of the prompt, or some more tokens of the answer."""
        req = request.req
        if not req.output_ids and (publish or req.extend_end < len(req.origin_input_ids)):
            if publish:
                request.publish()
            else:
                req.prefix_len = req.extend_end
            if request.num_left_to_prefill:
                self.prefill(request, num_tokens)
                return
        if req.extend_end < len(req.origin_input_ids):
            return
        for i in range(num_tokens):
            length = req.kv.kv_allocated_len
            if req.output_ids and not self.has_room_for(self.pages_between(length, length + 1)):
                return
            request.decode([90_000 + i])

    def finish(self, request: Request) -> None:
        self.live.remove(request)
        if request.req.output_ids:
            request.finish()
        else:
            request.abort()

    def retract(self, request: Request) -> None:
        """It loses what it computed and comes back with all its tokens as the prompt."""
        self.live.remove(request)
        request.abort()
        self.wait(request.tokens, request.namespace)

    def look_up(self, tokens: list[int], namespace: Namespace) -> None:
        """Match, which may split a node, and read."""
        match = self.cache.match(tokens, namespace)
        root = self.cache.core.root_node_handle()
        slots = self.cache.core.collect_full_device_indices(match.last_device_node, root)
        assert len(slots) == match.device_prefix_len
        assert self.cache.marks_of(slots) == prefix_marks(tokens, namespace)[: len(slots)]

    def start_reading(self, tokens: list[int], namespace: Namespace) -> None:
        """Lock what is cached and take down its slots, as a request does before it allocates."""
        match = self.cache.match(tokens, namespace)
        lock = self.cache.tree.lock(match.last_device_node)
        slots = self.cache.tree.path_device_indices(match.last_device_node)
        self.readers.append((lock, slots, prefix_marks(tokens, namespace)[: len(slots)]))

    def stop_reading(self, place: int) -> None:
        self.cache.tree.unlock(self.readers.pop(place)[0])

    # -- what others do --

    def step(self) -> None:
        self.control.step()
        assert self.control.degraded == ""

    def set(self, name: str, value: float) -> None:
        knob = self.control.knobs()[name]
        if knob.complaint(name, value) == "":
            self.control.set(name, value)
        assert self.control.degraded == ""

    def set_ceiling(self, num_frames: int | None) -> None:
        frame_bytes = self.residency.backing.frame_bytes
        self.set(MAX_RESIDENT_BYTES, NO_BOUND if num_frames is None else num_frames * frame_bytes)

    def evict(self, num_pages: int) -> None:
        self.cache.evict(num_pages * self.page_size)

    def flush(self) -> None:
        if not self.live and not self.readers:
            self.cache.reset()

    def scatter(self, numbers: random.Random) -> None:
        """Fill the pool with short prompts, use every other one again and evict about half: holes everywhere."""
        length = 3 * self.page_size
        prompts = [prompt(0, 0, variant, length) for variant in range(self.num_pages // 3)]
        numbers.shuffle(prompts)
        for tokens in prompts:
            if len(self.live) < ROWS:
                self.begin(tokens, NAMESPACES[0], length)
                if self.live and self.live[-1].tokens == tokens:
                    self.go_on(self.live[-1], 1, publish=True)
                    self.finish(self.live[-1])
        for tokens in prompts[::2]:
            self.look_up(tokens, NAMESPACES[0])
        self.cache.evict(self.cache.sizes.evictable // 2)

    def overtake(self, numbers: random.Random, most_tokens: int) -> None:
        """Somebody asks for what is about to move, or for its beginning."""
        moves = self.control._reclaimer._moves
        tree = self.cache.core.tree
        node = moves._nodes[numbers.randrange(moves.num_moved, len(moves._nodes))]
        if node.parent is None:  # it was evicted
            return
        path = tree.path(node)
        tokens = [token for each in path for token in memoryview(each.tokens).cast("q")]
        if numbers.random() < 0.5:
            tokens = tokens[: numbers.randint(1, len(tokens))]
        namespace = Namespace(*(node.namespace or ()))
        match numbers.randint(0, 3):
            case 0 if len(self.live) < ROWS:
                self.begin([*tokens, 1], namespace, most_tokens)
            case 1:
                self.look_up(tokens, namespace)
            case _:
                self.start_reading(tokens, namespace)

    # -- whatever comes --

    def drawn_prompt(self, numbers: random.Random) -> tuple[list[int], Namespace]:
        most = self.num_pages * self.page_size // 4
        shared = numbers.randint(0, most)
        tokens = prompt(numbers.randint(1, 5), shared, numbers.randint(0, 9), numbers.randint(1, most))
        return tokens, NAMESPACES[numbers.random() < 0.2]

    def act(self, numbers: random.Random) -> None:
        """One thing that may happen, drawn so that a pool is busy and its plans are overtaken."""
        tokens = numbers.randint(1, 2 * self.page_size + 3)
        kinds = {"step": 10, "begin": 5, "wait": 1, "look up": 2, "evict": 0.5, "scatter": 0.5, "flush": 0.02}
        if self.control._reclaimer._moves is not None:
            kinds |= {"overtake": 4}
        kinds |= {"bound": 0.5, "unbound": 0.5}
        kinds |= {"go on": 6, "finish": 4, "retract": 0.4} if self.live else {}
        kinds |= {"let in": 2} if self.waiting else {}
        kinds |= {"stop reading": 3} if self.readers else {}
        kinds |= {} if self.control._reclaimer.is_working else {"trim": 3}
        kind = numbers.choices(list(kinds), list(kinds.values()))[0]
        match kind:
            case "step":
                self.step()
            case "begin":
                self.begin(*self.drawn_prompt(numbers), numbers.choice([tokens, 10_000]))
            case "wait":
                self.wait(*self.drawn_prompt(numbers))
            case "look up":
                self.look_up(*self.drawn_prompt(numbers))
            case "evict":
                self.evict(numbers.randint(1, self.num_pages // 4))
            case "flush":
                self.flush()
            case "go on":
                self.go_on(numbers.choice(self.live), tokens, numbers.random() < 0.5)
            case "finish":
                self.finish(numbers.choice(self.live))
            case "retract":
                self.retract(numbers.choice(self.live))
            case "let in":
                self.let_in(numbers.choice(self.waiting), tokens)
            case "trim":
                self.set(TRIM, 1)
            case "stop reading":
                self.stop_reading(numbers.randrange(len(self.readers)))
            case "overtake":
                self.overtake(numbers, tokens)
            case "scatter":
                self.scatter(numbers)
                self.set(TRIM, 1)
            case "bound":
                self.set_some_bound(numbers)
            case "unbound":
                self.lift_bounds()

    def set_some_bound(self, numbers: random.Random) -> None:
        num_frames = self.residency.ledger.num_frames
        match numbers.randint(0, 5):
            case 0:
                self.set(MAX_CACHED_TOKENS, numbers.randint(0, self.cache.pool_tokens))
            case 1:
                self.set_ceiling(numbers.randint(2, num_frames))
            case 2:
                self.set(FREE_FRAMES, numbers.randint(0, num_frames - 2))
            case 3:
                self.set(RESERVE_FRAMES, numbers.randint(0, 2))
            case 4:
                self.set(MODE, numbers.randint(0, MOVE))
            case 5:
                self.failing_next = numbers.choice([1, 2])

    def lift_bounds(self) -> None:
        self.failing_next = 0
        self.set(MODE, MOVE)
        for name, value in ((MAX_CACHED_TOKENS, NO_BOUND), (FREE_FRAMES, 0), (RESERVE_FRAMES, 0)):
            self.set(name, value)
        self.set_ceiling(None)

    # -- what must hold --

    def row(self, request: Request) -> torch.Tensor:
        kv = request.req.kv
        return self.cache.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len].long()

    def assert_true(self) -> None:
        """Everybody who may read a slot finds there what was computed for this very prefix."""
        marks = {self.cache.core.root_node.id: 0}
        expected: list[int] = []
        for node in self.cache.core.tree.nodes():
            mark = marks[node.parent.id]
            if node.parent.parent is None:
                namespace = Namespace(*(node.namespace or ()))
                mark = zlib.crc32(repr(namespace).encode())
            if node.is_overwritten:
                raise AssertionError("no request here rewrites what it has published")
            for start in range(0, len(node.tokens), 8):
                mark = zlib.crc32(node.tokens[start : start + 8], mark)
                expected.append(mark)
            marks[node.id] = mark
        slots = [self.cache.core.all_values_flatten()]
        for request in self.live:
            row = self.row(request)
            slots.append(row)
            expected += prefix_marks(request.tokens[: len(row)], request.namespace)
        for _, read, marks in self.readers:
            slots.append(read)
            expected += marks
        assert self.cache.marks_of(torch.cat(slots)) == expected

    def assert_sound(self) -> None:
        """Nobody owns a page twice, and nothing is counted wrong."""
        sizes = self.cache.sizes
        uncached = sum(request.held_tokens for request in self.live)
        assert sizes.total + uncached == self.cache.pool_tokens
        assert self.residency.disagreements() == []
        free = self.cache.allocator.get_all_free_pages().tolist()
        tree = self.cache.core.all_values_flatten()[:: self.page_size] // self.page_size
        own = set()
        shared = {page for _, read, _ in self.readers for page in (read // self.page_size).tolist()}
        for request in self.live:
            pages = self.row(request) // self.page_size
            shared.update(pages[: request.req.kv.cache_protected_len].tolist())
            own.update(pages[request.req.kv.cache_protected_len :].tolist())
        assert sorted([*free, *tree.tolist(), *own]) == list(range(1, self.num_pages + 1))
        assert shared <= set(tree.tolist())
        if not self.live:
            assert self.cache.tree.recount() == []

    def assert_resident(self) -> None:
        """The operating system counts the committed frames and nothing else."""
        assert self.residency.backing.resident_bytes() == self.residency.committed_bytes


class Content(RuleBasedStateMachine):
    page_size = 4
    totals: Counter

    @initialize(placement=st.sampled_from([None, "stock"]), per_slice=st.integers(1, 3), seed=SEEDS)
    def start(self, placement, per_slice, seed) -> None:
        self.served = Served(self.page_size, placement, per_slice)
        self.scatter(seed)
        self.trim()

    def teardown(self) -> None:
        if not hasattr(self, "served"):
            return
        self.served.assert_resident()
        counts = self.served.counts
        self.totals["runs"] += 1
        self.totals["runs with moves"] += counts.moved_pages > 0
        self.totals["moved pages"] += counts.moved_pages
        self.totals["void plans"] += counts.void_plans

    PROMPTS = st.builds(
        prompt, st.integers(0, 3), st.integers(0, 40), st.integers(0, 9), st.sampled_from([1, 3, 4, 8, 9, 17, 30, 64])
    )

    def drawn(self, data, requests) -> Request:
        return data.draw(st.sampled_from(requests))

    @rule(seed=SEEDS, num_acts=st.integers(1, 16))
    def whatever_comes(self, seed, num_acts) -> None:
        numbers = random.Random(seed)
        for _ in range(num_acts):
            self.served.act(numbers)

    @precondition(lambda self: len(self.served.live) < ROWS)
    @rule(tokens=PROMPTS, namespace=st.sampled_from(NAMESPACES), chunk=st.sampled_from([3, 8, 1000]))
    def begin(self, tokens, namespace, chunk) -> None:
        self.served.begin(tokens, namespace, chunk)

    @rule(tokens=PROMPTS, namespace=st.sampled_from(NAMESPACES))
    def wait(self, tokens, namespace) -> None:
        self.served.wait(tokens, namespace)

    @precondition(lambda self: self.served.waiting)
    @rule(data=st.data(), chunk=st.sampled_from([3, 8, 1000]))
    def let_in(self, data, chunk) -> None:
        self.served.let_in(self.drawn(data, self.served.waiting), chunk)

    @precondition(lambda self: self.served.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 20), publish=st.booleans())
    def go_on(self, data, num_tokens, publish) -> None:
        self.served.go_on(self.drawn(data, self.served.live), num_tokens, publish)

    @precondition(lambda self: self.served.live)
    @rule(data=st.data(), is_retracted=st.booleans())
    def end(self, data, is_retracted) -> None:
        request = self.drawn(data, self.served.live)
        if is_retracted:
            self.served.retract(request)
        else:
            self.served.finish(request)

    @rule(tokens=PROMPTS, namespace=st.sampled_from(NAMESPACES))
    def look_up(self, tokens, namespace) -> None:
        self.served.look_up(tokens, namespace)

    @rule(tokens=PROMPTS, namespace=st.sampled_from(NAMESPACES))
    def start_reading(self, tokens, namespace) -> None:
        self.served.start_reading(tokens, namespace)

    @precondition(lambda self: self.served.readers)
    @rule(data=st.data())
    def stop_reading(self, data) -> None:
        self.served.stop_reading(data.draw(st.integers(0, len(self.served.readers) - 1)))

    @rule(num_pages=st.integers(1, 12))
    def evict(self, num_pages) -> None:
        self.served.evict(num_pages)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps) -> None:
        for _ in range(num_steps):
            self.served.step()

    @rule()
    def trim(self) -> None:
        if TRIM in self.served.control.knobs():
            self.served.set(TRIM, 1)
        self.served.step()

    @rule(seed=SEEDS)
    def set_some_bound(self, seed) -> None:
        self.served.set_some_bound(random.Random(seed))

    @precondition(lambda self: self.served.control._reclaimer._moves is not None)
    @rule(seed=SEEDS, num_tokens=st.sampled_from([3, 1000]))
    def overtake(self, seed, num_tokens) -> None:
        self.served.overtake(random.Random(seed), num_tokens)

    @rule()
    def lift_bounds(self) -> None:
        self.served.lift_bounds()

    @rule(seed=SEEDS)
    def scatter(self, seed) -> None:
        self.served.scatter(random.Random(seed))

    @rule()
    def flush(self) -> None:
        self.served.flush()

    @invariant()
    def every_slot_holds_what_it_is_read_for(self) -> None:
        if hasattr(self, "served"):
            self.served.assert_true()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if hasattr(self, "served"):
            self.served.assert_sound()


@pytest.mark.parametrize("page_size", SHAPES)
def test_every_match_returns_the_content_of_exactly_that_prefix(page_size):
    members = {"page_size": page_size, "totals": Counter()}
    machine = type("Content", (Content,), members)
    few = settings(max_examples=settings.default.max_examples // 4, stateful_step_count=20)
    run_state_machine_as_test(machine, settings=few)
    assert machine.totals["runs with moves"] > 0


@pytest.mark.parametrize(
    ("page_size", "placement", "per_slice"), [(1, "stock", 1), (4, None, 2), (4, "stock", 3), (16, "stock", 1)]
)
def test_content_is_true_in_a_long_stream_whose_plans_are_overtaken(page_size, placement, per_slice):
    served = Served(page_size, placement, per_slice)
    numbers = random.Random(page_size)
    for _ in range(1500):
        served.act(numbers)
        served.assert_true()
        served.assert_sound()
    while served.live:
        served.finish(served.live[0])
    while served.readers:
        served.stop_reading(0)
    served.assert_sound()
    served.assert_resident()
    assert served.counts.moved_pages >= 20
    assert served.counts.void_plans > 0
