"""Our core beside SGLang's Python and Rust cores: the same calls, the same answers.

The cores differ on purpose in two ways, and the sequences here are built around both. Stock evicts whole leaves, so
evictions are compared where leaves are as large as what is asked. Stock counts a split as an access to the suffix
(case C3), so a path that was split is accessed to its end before anything is evicted.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix_pages.order import ORDER_NAMES
from tests.adapter.caches import BACKENDS, OURS, PLAIN, STOCK, Cache, Namespace, Request, Sizes, build, run

pytestmark = pytest.mark.usefixtures("published_config")

NAMESPACES = (PLAIN, Namespace("k"), Namespace(None, "s"), Namespace("k", "s"))
PAGE_SIZES = (1, 4, 16)
PARAMETERS = {"tlru": {"threshold": 96, "next_prompt_estimate": 32}, "slru": {"protected_threshold": 3}}


class SideBySide:
    """One cache a backend. Every call goes to all of them, and all must answer alike."""

    def __init__(self, backends=BACKENDS, **options) -> None:
        self.caches = {backend: build(backend, **options) for backend in backends}
        self.ours = self.caches[OURS]

    def all(self, call):
        """`call(cache)` on every cache; returns the answer they agree on."""
        answers = {backend: call(cache) for backend, cache in self.caches.items()}
        assert len(set(answers.values())) == 1, answers
        return answers[OURS]

    def sizes(self) -> Sizes:
        return self.all(lambda cache: cache.sizes)


# The same survivors, wherever stock evicts exactly what was asked


class Conversations:
    """Conversations cut into units of `2 * page_size` positions; every node of every tree is one unit.

    A turn is a letter, its unit is the same in every conversation, and a path is a string of turns. Where positions
    are pairs of tokens, every turn begins with the same token, so that a turn's last pair never tells what follows.
    """

    def __init__(self, policy: str, page_size: int, pool_units: int = 12, is_eagle: bool = False) -> None:
        self.unit = 2 * page_size
        self.is_eagle = is_eagle
        self.pool_tokens = pool_units * self.unit
        self.side = SideBySide(
            page_size=page_size,
            pool_tokens=self.pool_tokens,
            policy=policy,
            parameters=PARAMETERS.get(policy),
            is_eagle=is_eagle,
        )
        self.locks: list[dict] = []
        self.seen: set[tuple[str, Namespace]] = set()

    def tokens(self, path: str) -> list[int]:
        if not self.is_eagle:
            return [token for turn in path for token in run(1000 * ord(turn), self.unit)]
        return [token for turn in path for token in (7, *run(1000 * ord(turn), self.unit - 1))] + [7]

    def room(self) -> int:
        """Units that a new conversation may take."""
        sizes = self.side.sizes()
        return (sizes.available + sizes.evictable) // self.unit

    def grow(self, path: str, namespace: Namespace, priority: int) -> None:
        """A chunked request: it publishes turn by turn and counts once."""
        for length in range(1, len(path) + 1):
            self.side.all(
                lambda cache, length=length: (
                    cache.publish(
                        self.tokens(path[:length]),
                        namespace,
                        priority=priority,
                        counted_tokens=(length - 1) * self.unit,
                    ).prefix_len
                )
            )
        self.seen.add((path, namespace))

    def grow_at_once(self, path: str, namespace: Namespace, priority: int) -> None:
        """A request that publishes once; later ones cut it into its turns and go on to its end."""
        self.side.all(lambda cache: cache.publish(self.tokens(path), namespace, priority=priority).prefix_len)
        self.seen.add((path, namespace))
        for length in range(1, len(path) + 1):
            self.match(path[:length], namespace)

    def match(self, path: str, namespace: Namespace, beyond: int = 0) -> None:
        """`beyond` tokens that nobody knows follow the path."""
        self.side.all(lambda cache: cache.matched([*self.tokens(path), *run(5, beyond)], namespace))

    def lock(self, path: str, namespace: Namespace) -> None:
        self.locks.append(
            {
                backend: cache.tree.lock(cache.match(self.tokens(path), namespace).last_device_node)
                for backend, cache in self.side.caches.items()
            }
        )

    def unlock(self, index: int) -> None:
        for backend, lock in self.locks.pop(index).items():
            self.side.caches[backend].tree.unlock(lock)

    def evict(self, num_units: int) -> None:
        asked = num_units * self.unit
        evictable = self.side.sizes().evictable
        assert self.side.all(lambda cache: cache.evict(asked)) == min(asked, evictable)

    def compare(self) -> None:
        """Sizes, their sum, and how much of everything ever seen is cached; touches nothing."""
        assert self.side.sizes().total == self.pool_tokens
        for path, namespace in sorted(self.seen, key=str):
            self.side.all(lambda cache, p=path, n=namespace: cache.cached(self.tokens(p), n))


paths = st.text(alphabet="abc", min_size=1, max_size=4)
namespaces = st.sampled_from(NAMESPACES[:3])
conversation_steps = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), paths, namespaces, st.integers(0, 2)),
        st.tuples(st.just("grow_at_once"), paths, namespaces, st.integers(0, 2)),
        st.tuples(st.just("match"), paths, namespaces, st.sampled_from([0, 1, 9])),
        st.tuples(st.just("lock"), paths, namespaces),
        st.tuples(st.just("unlock"), st.integers(0, 3)),
        st.tuples(st.just("evict"), st.integers(1, 4)),
    ),
    min_size=5,
    max_size=40,
)


def hold(conversations: Conversations, steps) -> None:
    for name, *arguments in steps:
        if name.startswith("grow") and conversations.room() < len(arguments[0]) + 1:
            continue
        if name == "unlock" and arguments[0] >= len(conversations.locks):
            continue
        if name == "lock" and len(conversations.locks) == 3:
            continue
        getattr(conversations, name)(*arguments)
        conversations.compare()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", ORDER_NAMES)
def test_the_same_conversations_survive_evictions(policy, page_size):
    @settings(max_examples=8, database=None, derandomize=True)
    @given(conversation_steps)
    def check(steps):
        hold(Conversations(policy, page_size), steps)

    check()


def random_steps(seed: int, length: int) -> list[tuple]:
    """A long mixed load with more pressure than a generated list reaches."""
    rng = random.Random(seed)
    steps = []
    for _ in range(length):
        path = "".join(rng.choices("abcd", k=rng.randint(1, 5)))
        namespace = rng.choice(NAMESPACES[:2])
        steps.append(
            rng.choice(
                [
                    ("grow", path, namespace, rng.randint(0, 2)),
                    ("grow_at_once", path, namespace, rng.randint(0, 2)),
                    ("match", path, namespace, rng.choice([0, 0, 3])),
                    ("lock", path, namespace),
                    ("unlock", rng.randint(0, 2)),
                    ("evict", rng.randint(1, 3)),
                ]
            )
        )
    return steps


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", ORDER_NAMES)
def test_the_same_conversations_survive_a_long_load(policy, seed):
    hold(Conversations(policy, page_size=4, pool_units=16), random_steps(seed, length=250))


# The same lengths and sizes, whatever requests do


class Requests(RuleBasedStateMachine):
    """Real requests: admitted, prefilled in chunks, published, decoded, finished or aborted, in any order.

    Nodes are split anywhere here, so the only eviction is of everything that is evictable.
    """

    pool_tokens = 320
    is_eagle = False

    @initialize(page_size=st.sampled_from(PAGE_SIZES), policy=st.sampled_from(ORDER_NAMES))
    def start(self, page_size, policy):
        self.page_size = page_size
        self.side = SideBySide(
            page_size=page_size, pool_tokens=self.pool_tokens, policy=policy, is_eagle=self.is_eagle
        )
        self.running: list[dict[str, Request]] = []
        self.histories: list[tuple[list[int], Namespace]] = [([1], PLAIN)]

    def has_room(self, num_tokens: int) -> bool:
        """Whether an allocation finds its slots free, after an eviction of everything if need be."""
        num_tokens += 2 * self.page_size
        if self.side.sizes().available < num_tokens:
            self.side.all(lambda cache: cache.evict(self.pool_tokens))
        return self.side.sizes().available >= num_tokens

    @precondition(lambda self: len(self.running) < 4)
    @rule(
        history=st.integers(0, 30),
        cut=st.integers(0, 60),
        fresh=st.lists(st.integers(1, 3), min_size=2, max_size=40),
        namespace=st.sampled_from(NAMESPACES),
        priority=st.integers(0, 2),
        chunk=st.integers(1, 30),
    )
    def admit(self, history, cut, fresh, namespace, priority, chunk):
        """A prompt that goes on from some earlier history, cut anywhere."""
        past, _ = self.histories[history % len(self.histories)]
        prompt = [*past[:cut], *fresh]
        if not self.has_room(len(prompt)):
            return
        requests = {b: Request(c, prompt, namespace, priority=priority).admit() for b, c in self.side.caches.items()}
        assert len({request.req.prefix_len for request in requests.values()}) == 1
        for request in requests.values():
            request.prefill(chunk)
        self.running.append(requests)
        self.histories.append((prompt, namespace))

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 3), chunk=st.integers(1, 30))
    def go_on(self, index, chunk):
        """Publish, then prefill the next chunk or decode a few tokens."""
        requests = self.running[index % len(self.running)]
        if self.has_room(chunk):
            for request in requests.values():
                self.advance(request, chunk)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 3), num_outputs=st.integers(0, 20))
    def finish(self, index, num_outputs):
        requests = self.running.pop(index % len(self.running))
        fits = self.has_room(requests[OURS].num_left_to_prefill + num_outputs)
        for request in requests.values():
            if not fits:
                request.abort()
                continue
            while request.num_left_to_prefill:
                self.advance(request, 64)
            request.decode(run(2, num_outputs))
            request.finish()
        self.histories.append((requests[OURS].tokens, requests[OURS].namespace))

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 3))
    def abort(self, index):
        for request in self.running.pop(index % len(self.running)).values():
            request.abort()

    @staticmethod
    def advance(request, num_tokens):
        if not request.req.output_ids:
            request.publish()
        if request.num_left_to_prefill:
            request.prefill(num_tokens)
        else:
            request.decode(run(2, min(num_tokens, 5)))

    @rule(history=st.integers(0, 30), cut=st.integers(1, 60), namespace=st.sampled_from(NAMESPACES))
    def match(self, history, cut, namespace):
        tokens, own = self.histories[history % len(self.histories)]
        self.side.all(lambda cache: cache.matched(tokens[:cut], namespace))
        self.side.all(lambda cache: cache.matched(tokens[:cut], own))

    @precondition(lambda self: self.side.ours.sizes.evictable > 100)
    @rule()
    def evict_everything(self):
        evictable = self.side.sizes().evictable
        assert self.side.all(lambda cache: cache.evict(self.pool_tokens)) == evictable

    @precondition(lambda self: not self.running and self.side.ours.sizes.evictable > 100)
    @rule()
    def flush(self):
        for cache in self.side.caches.values():
            cache.reset()
        assert self.side.sizes() == (self.pool_tokens, 0, 0)

    @invariant()
    def sizes_agree_and_no_slot_is_lost(self):
        if hasattr(self, "side"):
            held = self.side.all(lambda cache: sum(r.held_tokens for r in self.requests_of(cache)))
            assert self.side.sizes().total + held == self.pool_tokens

    @invariant()
    def every_row_agrees_with_the_tree(self):
        """What the tree holds for a history is KV that was computed for exactly that history."""
        if hasattr(self, "side"):
            for tokens, namespace in self.histories[-3:]:
                self.side.all(lambda cache, t=tokens, n=namespace: cache.cached(t, n))
                assert self.side.ours.holds_computed_kv(tokens, namespace)

    def requests_of(self, cache):
        return [r for requests in self.running for r in requests.values() if r.cache is cache]

    def teardown(self):
        if hasattr(self, "side"):
            for requests in self.running:
                for request in requests.values():
                    request.abort()
            self.running = []
            self.side.ours.tree.sanity_check()
            self.side.all(lambda cache: cache.evict(self.pool_tokens))
            assert self.side.sizes() == (self.pool_tokens, 0, 0)
            assert self.side.ours.free_pages() == list(range(1, self.pool_tokens // self.page_size + 1))


TestRequests = Requests.TestCase
TestRequests.settings = settings(derandomize=True, database=None)


# Ours alone: to the page


@settings(max_examples=30, derandomize=True, database=None)
@given(
    page_size=st.sampled_from(PAGE_SIZES),
    policy=st.sampled_from(ORDER_NAMES),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["insert", "match", "lock", "evict"]),
            st.lists(st.integers(1, 2), min_size=1, max_size=70),
        ),
        max_size=25,
    ),
)
def test_an_eviction_takes_exactly_the_pages_asked_for(page_size, policy, steps):
    """Rounded up to a page, and less only when no more is evictable."""
    cache = build(OURS, page_size=page_size, pool_tokens=4096, policy=policy)
    for name, tokens in steps:
        if name == "insert":
            cache.insert(tokens)
        elif name == "match":
            cache.match(tokens)
        elif name == "lock":
            cache.tree.lock(cache.match(tokens).last_device_node)
        else:
            before = cache.sizes
            evicted = cache.evict(len(tokens))
            assert evicted == min(cache.room_for(len(tokens)), before.evictable)
            assert cache.sizes == (before.available + evicted, before.evictable - evicted, before.protected)
        cache.tree.sanity_check()
    assert cache.sizes.total == 4096


def serve_under_pressure(cache: Cache, num_requests: int = 60) -> None:
    """A pool for about two requests serves many: every allocation evicts, mostly the tails of leaves.

    No slot may be lost or handed out twice, and nobody may read KV of another prefix.
    """
    rng = random.Random(cache.page_size)
    running: list[Request] = []
    histories = [([1], PLAIN)]
    reserve = 3 * cache.page_size + 8
    for _ in range(num_requests):
        past, namespace = rng.choice(histories)
        prompt = past[: rng.randint(0, 48)] + rng.choices([1, 2], k=rng.randint(2, 24))
        while cache.sizes.available + cache.sizes.evictable < len(prompt) + reserve:
            running.pop(0).abort()
        running.append(Request(cache, prompt, namespace).admit().prefill(rng.randint(1, 24)))
        for request in list(running):
            room = cache.sizes.available + cache.sizes.evictable
            if room < request.num_left_to_prefill + reserve or rng.random() < 0.3:
                continue
            if not request.req.output_ids:
                request.publish()
            if request.num_left_to_prefill:
                request.prefill(rng.randint(1, 24))
            elif rng.random() < 0.5:
                request.decode(rng.choices([1, 2], k=4))
            else:
                running.remove(request.finish())
                histories.append((request.tokens, rng.choice(NAMESPACES)))
        assert cache.sizes.total + sum(request.held_tokens for request in running) == cache.pool_tokens
        assert all(cache.holds_computed_kv(request.tokens, request.namespace) for request in running)
        assert all(cache.holds_computed_kv(*history) for history in histories)
        cache.tree.sanity_check()
    for request in running:
        request.abort()
    cache.evict(cache.pool_tokens)
    assert cache.sizes == (cache.pool_tokens, 0, 0)
    assert cache.free_pages() == list(range(1, cache.pool_tokens // cache.page_size + 1))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", ["lru", "mru", "tlru"])
def test_requests_under_pressure_lose_no_slot_and_never_read_another_prefix(policy, page_size):
    parameters = PARAMETERS.get(policy)
    serve_under_pressure(build(OURS, page_size=page_size, pool_tokens=192, policy=policy, parameters=parameters))


# Reports about a tree that both cores hold


def tokens_of(path: str) -> list[int]:
    return [token for turn in path for token in run(1000 * ord(turn), 8)]


def grown(backend):
    cache = build(backend, page_size=4, pool_tokens=1024)
    for path in ("ab", "abcc", "abd", "e", "efg", "efh"):
        cache.insert(tokens_of(path))
    cache.insert(tokens_of("a")[:6], Namespace("k"))
    return cache


def handles(cache, *paths):
    return [cache.match(tokens_of(path)).last_device_node for path in paths]


@pytest.mark.parametrize("backend", STOCK)
def test_waiting_requests_are_ordered_as_stock_orders_them(backend):
    """Depth first, the child with more waiting requests below it first; no two subtrees weigh the same here."""
    waiting = ("efg", "ab", "abd", "e", "abd", "efh", "efh", "abcc", "abd", "zz")
    orders = [cache.tree.dfs_weight_order(handles(cache, *waiting)) for cache in (grown(OURS), grown(backend))]
    assert orders[0] == orders[1] == [2, 4, 8, 7, 1, 5, 6, 0, 3, 9]


def test_waiting_requests_of_equal_weight_are_ordered_by_who_asked_first():
    """Stock takes the older subtree; either is the same on every rank."""
    cache = grown(OURS)
    assert cache.tree.dfs_weight_order(handles(cache, "efg", "abd", "abcc", "efh")) == [0, 3, 1, 2]
    assert cache.tree.dfs_weight_order(handles(cache, "abd", "efg", "abcc", "efh")) == [0, 2, 1, 3]


@pytest.mark.parametrize("backend", STOCK)
def test_path_reports_agree_with_stock(backend):
    """All fields but the ids, which are each core's own; a parent is the step before."""
    reports = []
    for cache in (grown(OURS), grown(backend)):
        report = []
        for path in cache.core.collect_path_info(handles(cache, "abd", "efg", "ab", "zz")):
            ids = [cache.core.root_node_handle(), *(step.node_id for step in path)]
            assert [step.parent_id for step in path] == ids[:-1]
            report.append([msgspec.structs.replace(step, node_id=0, parent_id=0) for step in path])
        reports.append(report)
    assert reports[0] == reports[1]
    assert [len(path) for path in reports[0]] == [2, 3, 1, 0]


@pytest.mark.parametrize("backend", STOCK)
def test_a_match_without_access_agrees_with_stock(backend):
    """Length, and the length of everything that a lock on its node would pin."""
    reports = []
    for cache in (grown(OURS), grown(backend)):
        lengths = []
        for path, cut in (("abcc", 99), ("abcc", 21), ("abd", 17), ("efz", 99), ("zz", 9), ("a", 3)):
            length, _, pinned = cache.core.match_full_device_prefix(cache.key(tokens_of(path)[:cut]))
            lengths.append((length, pinned))
        reports.append(lengths)
    assert reports[0] == reports[1] == [(32, 32), (20, 32), (16, 16), (16, 16), (0, 0), (0, 0)]


@pytest.mark.parametrize("backend", STOCK)
@pytest.mark.parametrize("unlocked_only", [False, True])
def test_the_canary_walk_reports_the_same_kv_as_stock(backend, unlocked_only):
    """Slots are each allocator's own; what was computed into them, its position and its predecessor are not."""
    walks = []
    for cache in (grown(OURS), grown(backend)):
        cache.tree.lock(*handles(cache, "abd"))
        walk = cache.core.walk_for_kv_canary(unlocked_only=unlocked_only, swa_resident_only=False)
        own, before = cache.marks_of(walk.slot_indices), cache.marks_of(walk.prev_slot_indices)
        walks.append(sorted(zip(own, walk.positions.tolist(), before, strict=True)))
    assert walks[0] == walks[1]
    assert len(walks[0]) == (76 - 24 if unlocked_only else 76)


@pytest.mark.parametrize("backend", STOCK)
def test_totals_agree_with_stock(backend):
    totals = []
    for cache in (grown(OURS), grown(backend)):
        cache.tree.lock(*handles(cache, "abd"))
        tree = cache.tree
        kv = sorted(cache.marks_of(tree.all_values_flatten()))
        totals.append((tree.total_size(), tree.full_evictable_size(), tree.full_protected_size(), kv))
    assert totals[0] == totals[1]
    assert totals[0][:3] == ((76, 0), 52, 24)


@pytest.mark.parametrize("policy", ["lru", "mru"])
def test_touching_a_prefix_is_an_access_like_stocks(policy):
    """The scheduler touches the prefixes of waiting requests so that they are not evicted under them."""
    side = SideBySide(page_size=4, policy=policy)
    for tokens in (run(1000, 8), run(2000, 8), run(3000, 8)):
        side.all(lambda cache, t=tokens: cache.insert(t).prefix_len)
    for cache in side.caches.values():
        cache.tree.touch_prefix(cache.key(run(1000, 8)))
    side.all(lambda cache: cache.evict(8))
    survivors = tuple(
        side.all(lambda cache, first=first: cache.cached(run(first, 8))) for first in (1000, 2000, 3000)
    )
    assert survivors == ((8, 0, 8) if policy == "lru" else (0, 8, 8))
