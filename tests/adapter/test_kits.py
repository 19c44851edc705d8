"""SGLang's own cache kit on our core.

The kit (`sglang/test/kits/unified_radix_cache`) ships what its tests stand on: cache configurations, builders, steps
and fuzzers that demand an inspector of the core. The test bodies stay in SGLang's repository, so the claims here are
ours and the steps are the kit's. Every test runs under SGLang's controller, which walks our core step by step, and
under ours.

What the kit brings and these tests leave out, because our start-up refuses what it needs:
  CONFIGS with SWA or MAMBA                                  one component, full attention
  UnifiedRadixAllocationEvictionRealComponentsFixtures       evicts SWA and Mamba state
  ResumableInsertWalkSWAFixtures                             a walk that stops to recover SWA slots
  SegmentLockProtocolFixtures                                lock segments of a sliding window
  UnifiedMambaLRUMatchRefreshFixtures, MambaCheckpointGridFixtures, MambaFinishedOvershootCheckpointFixtures,
    UnifiedRadixCacheInt8MambaCheckpointFixtures             recurrent state
  SWADraftHistoryFixtures, SWAWindowUnderBigramKeyFixtures,
    UnifiedRadixCacheDecoderSwaBoundedReplayHoldBackFixtures a second, windowed pool
  PagedFullComponent                                         a custom component
  session_radix_cache_test_values() == True                  --enable-session-radix-cache
  hicache.py, load_back.py, storage.py                       host and storage tiers
and because it tests a part of SGLang's Python core that ours does not have:
  UnifiedLRUListBoundedRefreshFixtures                       its linked LRU list
Nothing that ran had to be left out because we answer better on purpose (C3, C6): no step of the kit evicts less than
a leaf or splits a node before an eviction.
"""

from __future__ import annotations

import dataclasses
from array import array
from unittest import TestCase

import pytest
from sglang.srt.disaggregation.kv_events import AllBlocksCleared
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import _TREE_CORE_REGISTRY
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.kits.unified_radix_cache import core, fixtures, insert_walk, kv_events, mixins
from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang.test.mem_cache_utils import finish_req

from radix_pages_sglang.cache import RadixPagesCache
from tests.adapter.caches import OURS
from tests.adapter.inspector import RadixPagesInspector

pytestmark = pytest.mark.usefixtures("published_config")

FULL = ComponentType.FULL
FULL_CONFIGS = [dataclasses.replace(cfg, num_layers=1) for cfg in CONFIGS if cfg.components == (FULL,)]
WITH_EAGLE = [dataclasses.replace(cfg, is_eagle=True) for cfg in FULL_CONFIGS[:2]]


@pytest.fixture(params=[UnifiedRadixCache, RadixPagesCache], autouse=True)
def controller(request, monkeypatch):
    """Point the kit's builder at a CPU, our core with an inspector, and one of the two controllers."""
    monkeypatch.setattr(fixtures, "get_device", lambda: "cpu")
    monkeypatch.setattr(fixtures, "TREE_CORE_TEST_BACKEND", OURS)
    monkeypatch.setattr(fixtures, "UnifiedRadixCache", request.param)
    monkeypatch.setitem(_TREE_CORE_REGISTRY, OURS, lambda params, components: RadixPagesInspector(params))
    return request.param


class Steps(TestCase, mixins.UnifiedRadixCacheFixtures):
    """The kit's steps for one configuration; `c`, `allocator` and `rows` are what its builder made."""

    __test__ = False

    def __init__(self, cfg, **options):
        super().__init__("run")
        self.cfg = cfg
        self.c, self.allocator, self.rows = fixtures.build_fixture(cfg, **options)

    def insert(self, tokens, **options):
        return self._insert(self.c, self.allocator, self.rows, tokens, **options)

    def match(self, tokens):
        return fixtures.match_prefix(self.c, tokens)

    def evict(self, num_tokens):
        return self.c.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    @property
    def total(self):
        return self.allocator.available_size() + self.c.evictable_size() + self.c.protected_size()


@pytest.fixture(params=FULL_CONFIGS, ids=lambda cfg: cfg.label)
def kit(request):
    return Steps(request.param)


# core.py and mixins.py: match, insert, split, lock, evict


def test_what_was_inserted_matches_and_a_longer_key_matches_as_far(kit):
    tokens = kit._make_seq(1, 2)
    assert kit.insert(tokens).prefix_len == 0
    assert kit.match(tokens).device_prefix_len == len(tokens)
    assert kit.match(tokens + kit._make_seq(9000, 1)).device_prefix_len == len(tokens)
    assert kit.match(kit._make_seq(9000, 1)).device_prefix_len == 0
    kit.c.sanity_check()


def test_a_second_insert_keeps_the_first_ones_slots_and_frees_its_own(kit):
    tokens = kit._make_seq(1, 2)
    first = kit.insert(tokens)
    slots = fixtures.node_device_value(kit.c, first.last_device_node, FULL).tolist()
    second = kit.insert(tokens)
    assert (second.prefix_len, second.last_device_node) == (len(tokens), first.last_device_node)
    assert fixtures.node_device_value(kit.c, first.last_device_node, FULL).tolist() == slots
    assert kit.total == kit.cfg.kv_size


def test_a_chain_grows_by_one_node_a_page_and_goes_leaf_first(kit):
    chain = kit._build_chain_pages(kit.c, kit.allocator, kit.rows, 4)
    page_size = kit.cfg.page_size
    assert [fixtures.node_key_length(kit.c, node) for node in chain] == [page_size] * 4
    assert [fixtures.node_parent(kit.c, node) for node in chain] == [kit.c.root_node_handle(), *chain[:-1]]
    assert kit._match_tokens_for_chain(kit.c, chain) == kit._swa_anchor_chain_tokens(4)
    for left in (3, 2, 1, 0):
        assert kit.c.tree_core.is_device_evictable_leaf(chain[left])
        assert kit.evict(page_size) == page_size
        assert not kit.c.tree_core.contains_node(chain[left])
        assert [kit.c.tree_core.contains_node(node) for node in chain[:left]] == [True] * left
    assert kit.allocator.available_size() == kit.cfg.kv_size


def test_two_branches_share_the_node_of_their_common_pages(kit):
    shared = kit._make_seq(1, 1)
    left, right = shared + kit._make_seq(5000, 1), shared + kit._make_seq(7000, 1)
    kit.insert(left)
    kit.insert(right)
    (top,) = fixtures.node_children(kit.c, kit.c.root_node_handle())
    assert fixtures.node_token_ids(kit.c, top) == shared
    assert len(fixtures.node_children(kit.c, top)) == 2
    assert kit.total == kit.cfg.kv_size
    kit.c.sanity_check()


def test_a_lock_protects_its_whole_path_and_nothing_beside_it(kit):
    shared = kit._make_seq(1, 1)
    left, right = shared + kit._make_seq(5000, 1), shared + kit._make_seq(7000, 1)
    kit.insert(left)
    kit.insert(right)
    leaf = kit.match(left).last_device_node
    lock = kit.c.lock(leaf)
    assert [fixtures.node_device_lock_ref(kit.c, node, FULL) for node in kit._path_chain(kit.c, leaf)] == [1, 1]
    assert kit.evict(kit.cfg.kv_size) == kit.cfg.page_size
    assert kit.match(left).device_prefix_len == len(left)
    kit.c.unlock(lock)
    assert kit.evict(kit.cfg.kv_size) == len(left)


def test_a_namespace_is_a_tree_of_its_own(kit):
    tokens = kit._make_seq(1, 2)
    kit.insert(tokens, extra_key="a")
    kit.insert(tokens, cache_salt="a")
    assert kit.match(tokens).device_prefix_len == 0
    assert kit.c.evictable_size() == 2 * len(tokens)


def test_priorities_reach_the_order():
    kit = Steps(dataclasses.replace(FULL_CONFIGS[1], eviction_policy="priority"))
    low, high = kit._make_seq(1, 1), kit._make_seq(5000, 1)
    kit.insert(high, priority=2)
    kit.insert(low, priority=1)
    assert kit.evict(1) == kit.cfg.page_size
    assert (kit.match(high).device_prefix_len, kit.match(low).device_prefix_len) == (kit.cfg.page_size, 0)


def test_a_finished_request_leaves_its_whole_pages(kit):
    """An input and an output of two pages each and one token more, split where the prompt ends."""
    prompt, output = kit._make_seq(1, 2), [*kit._make_seq(5000, 2), 7]
    req, _ = kit._make_inflight_req(kit.c, kit.allocator, kit.rows, prompt, output, allocated=True)
    finish_req(kit.c, req, req.owned_kv_len())
    whole = len(prompt) + len(output) - (0 if kit.cfg.page_size == 1 else 1)
    leaf = kit.match([*prompt, *output]).last_device_node
    lengths = [fixtures.node_key_length(kit.c, node) for node in kit._path_chain(kit.c, leaf)]
    assert lengths == [len(prompt), whole - len(prompt)]
    assert kit.total == kit.cfg.kv_size


def test_one_request_is_one_hit_per_node(kit):
    prompt, output = kit._make_seq(1, 2), kit._make_seq(5000, 2)
    req, _ = kit._make_inflight_req(kit.c, kit.allocator, kit.rows, prompt, output, allocated=True)
    kit.c.checkpoint(req, up_to=len(prompt))
    finish_req(kit.c, req, req.owned_kv_len())
    leaf = kit.match(prompt + output).last_device_node
    assert [kit.c.tree_core.get_node_hit_count(node) for node in kit._path_chain(kit.c, leaf)] == [1, 1]


def test_an_insert_reports_what_it_adopted(kit):
    tokens = kit._make_seq(1, 3)
    kit.insert(tokens[: kit.cfg.page_size])
    value = kit._alloc(kit.allocator, len(tokens))
    params = InsertParams(key=RadixKey(array("q", tokens)), value=value, track_adopted_ranges=True)
    assert kit.c.insert(params).adopted_ranges == {FULL: [(kit.cfg.page_size, len(tokens))]}
    again = InsertParams(key=RadixKey(array("q", tokens)), value=value.clone(), track_adopted_ranges=True)
    assert kit.c.insert(dataclasses.replace(again, prev_prefix_len=len(tokens))).adopted_ranges == {}


@pytest.mark.parametrize("cfg", WITH_EAGLE, ids=lambda cfg: cfg.label)
def test_pairs_are_kept_as_the_tokens_they_came_from(cfg):
    kit = Steps(cfg)
    tokens = [*kit._make_seq(1, 2), 9]
    leaf = kit.insert(tokens).last_device_node
    assert kit.c.tree_core.is_node_key_bigram(leaf)
    assert fixtures.node_token_ids(kit.c, leaf) == tokens
    assert fixtures.node_key_length(kit.c, leaf) == len(tokens) - 1


def test_a_disabled_cache_reads_no_policy_matches_nothing_and_keeps_nothing():
    """The kit's params name a policy option that does not exist: an error when enabled, nothing when disabled."""
    params = dataclasses.replace(core.DisabledUnifiedRadixCacheFixtures()._params(True), tree_core_backend=OURS)
    cache = fixtures.UnifiedRadixCache(params)
    key = RadixKey(array("q", [1, 2, 3]))
    assert cache.insert(InsertParams(key=key)).prefix_len == 0
    assert cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == 0
    assert cache.evict(EvictParams(num_tokens=5)).num_tokens_evicted == 0
    assert cache.take_events() == []
    assert cache.total_size() == (0, 0)
    with pytest.raises(ValueError, match="not_an_lru_option"):
        fixtures.UnifiedRadixCache(dataclasses.replace(params, disable=False))


# insert_walk.py: the lock fuzzer and session locks


@pytest.mark.parametrize("cfg", FULL_CONFIGS[:3] + WITH_EAGLE, ids=lambda cfg: cfg.label)
@pytest.mark.parametrize("seed", range(3))
def test_the_kits_lock_fuzzer_finds_nothing(cfg, seed, monkeypatch):
    """Inserts, locks, unlocks and evictions at random, with a full recount after every step.

    The fuzzer also works a sliding window; without one it has no slots and no lock to give back early.
    """

    def without_window(built):
        cache, allocator, rows = fixtures.build_fixture(built)
        take = cache.inc_lock_ref

        def inc_lock_ref(node_id, **options):
            receipt = take(node_id, **options)
            receipt.component_lock_uuids[ComponentType.SWA] = None
            return receipt

        cache.inc_lock_ref = inc_lock_ref
        allocator.free_swa = lambda slots: None
        return cache, allocator, rows

    monkeypatch.setattr(insert_walk, "build_fixture", without_window)
    fuzzer = type("Fuzzer", (insert_walk.SegmentLockFuzzFixtures, TestCase), {"cfg": cfg})("run")
    fuzzer._run_seed(seed)


class SessionSteps(TestCase, insert_walk.StreamingSessionLockLifecycleFixtures):
    __test__ = False

    def __init__(self, cfg):
        super().__init__("run")
        self.c, self.allocator, self.rows = fixtures.build_fixture(cfg)


def test_a_later_turn_runs_on_the_slots_record_and_takes_no_lock():
    kit = SessionSteps(FULL_CONFIGS[0])
    slot, req = kit._later_turn(kit.c, kit.allocator, kit.rows)
    assert req.kv is slot.kv
    assert req.lock is None
    assert kit.c.protected_size() == 8
    req.finished_reason = FINISH_LENGTH(length=0)
    assert kit.c.claim_kv_row(req)
    assert kit.c.protected_size() == 8
    kit.c.release_session("s")
    assert (kit.c.protected_size(), kit.c.evictable_size()) == (0, 8)
    assert kit.allocator.available_size() == 256 - 8


def test_an_aborted_later_turn_gets_the_slots_lock_back():
    kit = SessionSteps(FULL_CONFIGS[0])
    slot, req = kit._later_turn(kit.c, kit.allocator, kit.rows)
    lock = slot.lock
    req.finished_reason = FINISH_ABORT()
    assert not kit.c.claim_kv_row(req)
    assert (req.lock, slot.lock, kit.c.session.slots) == (lock, None, {})
    kit.c.unlock(req.lock)
    assert kit.c.protected_size() == 0


def test_a_receipt_is_refused_on_another_node(kit):
    """As the kit asks of every core: nothing changes, and the error is no KeyError."""
    one = kit.insert(kit._make_seq(1, 1)).last_device_node
    two = kit.insert(kit._make_seq(5000, 1)).last_device_node
    receipt = kit.c.inc_lock_ref(one).to_dec_params()
    kit.c.inc_lock_ref(two)
    for wrong in (receipt, dataclasses.replace(receipt, node_id=None)):
        with pytest.raises(RuntimeError, match="receipt"):
            kit.c.dec_lock_ref(two, wrong)
    assert kit.c.protected_size() == 2 * kit.cfg.page_size


# kv_events.py


class EventSteps(TestCase, kv_events.UnifiedRadixCacheKVEventsFixtures):
    __test__ = False

    def __init__(self, cfg, **options):
        super().__init__("run")
        self.cfg = cfg
        self.c, self.allocator, _ = fixtures.build_fixture(cfg, enable_kv_cache_events=True, **options)
        assert [type(event) for event in self.c.take_events()] == [AllBlocksCleared]

    def insert(self, tokens, **options):
        return self._insert(self.c, self.allocator, tokens, **options)


EVENT_CONFIGS = FULL_CONFIGS[:3]


@pytest.mark.parametrize("cfg", EVENT_CONFIGS, ids=lambda cfg: cfg.label)
def test_what_is_stored_is_removed_hash_by_hash(cfg):
    kit = EventSteps(cfg)
    kit.insert(list(range(1, 3 * cfg.page_size + 1)))
    stored = kit._event_hashes(kit._stored_events(kit.c))
    assert len(set(stored)) == 3
    kit.c.evict(EvictParams(num_tokens=3 * cfg.page_size))
    assert sorted(kit._event_hashes(kit._removed_events(kit.c))) == sorted(stored)


@pytest.mark.parametrize("cfg", EVENT_CONFIGS, ids=lambda cfg: cfg.label)
def test_a_leaf_of_the_kit_is_found_by_its_tokens_after_a_split(cfg):
    kit = EventSteps(cfg)
    tokens = list(range(1, 2 * cfg.page_size + 1))
    kit.insert(tokens)
    kit.c.take_events()
    front = kit._leaf_for(kit.c, tokens[: cfg.page_size])
    assert kit.c.tree_core.get_child_node_ids(front) == [kit._leaf_for(kit.c, tokens)]
    assert kit.c.take_events() == []


@pytest.mark.parametrize("cfg", EVENT_CONFIGS, ids=lambda cfg: cfg.label)
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_lora_name_is_published_with_its_namespace(cfg, dynamo):
    names, requests = kv_events.make_lora_names(a="adapter-a", b="adapter-b")
    kit = EventSteps(cfg, kv_event_lora_names=names, dynamo_kv_event_format=dynamo)
    tokens = list(range(1, cfg.page_size + 1))
    for extra_key in ("a", "b", None):
        kit.insert(tokens, extra_key=extra_key)
    stored = kit._stored_events(kit.c)
    assert [event.lora_name for event in stored] == ["adapter-a", "adapter-b", None]
    assert len(set(kit._event_hashes(stored))) == 3
    assert len(requests) == 2


@pytest.mark.parametrize("cfg", EVENT_CONFIGS, ids=lambda cfg: cfg.label)
def test_a_session_id_is_published_with_what_it_stored(cfg):
    kit = EventSteps(cfg)
    kit.insert(list(range(1, cfg.page_size + 1)), session_id="s", cache_salt="salt")
    (stored,) = kit._stored_events(kit.c)
    assert (stored.session_id, stored.cache_salt) == ("s", "salt")
