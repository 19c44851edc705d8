"""Real SGLang caches on a CPU, small enough to draw, and requests that live as the scheduler lets them.

KV is drawn too: the slot of a token holds a mark of the whole prefix that ends there, so that a slot which the
tree hands out for another prefix is seen at once.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, alloc_token_slots
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, InsertResult, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

import radix_pages_sglang
from radix_pages.units import Geometry
from radix_pages_sglang.allocator import RadixPagesPagedAllocator, RadixPagesTokenAllocator
from radix_pages_sglang.cache import RadixPagesCache
from radix_pages_sglang.config import Settings, frame_geometry
from radix_pages_sglang.hooks import row_bytes
from radix_pages_sglang.pool import MmapBacking, create_buffers
from tests.core.backings import PretendBacking

OURS = "radix_pages"
STOCK = ("python", "rust")
BACKENDS = (OURS, *STOCK)

radix_pages_sglang.register()
assert get_tree_core_factory(OURS), "the plugin did not load: its log names the cause"

_request_ids = itertools.count()


class Namespace(NamedTuple):
    """What keeps equal tokens apart; a plain key has neither."""

    extra_key: str | None = None
    cache_salt: str | None = None


PLAIN = Namespace()


class Sizes(NamedTuple):
    """Tokens, as SGLang counts them."""

    available: int
    evictable: int
    protected: int

    @property
    def total(self) -> int:
        return sum(self)


def letters(text: str) -> list[int]:
    """One token a letter."""
    return [ord(letter) for letter in text]


def run(first: int, length: int) -> list[int]:
    """`length` tokens in a row from `first` on; A(16) of the cases is `run(1000, 16)`."""
    return list(range(first, first + length))


def prefix_marks(tokens: Sequence[int], namespace: Namespace = PLAIN) -> list[int]:
    """For every token a number that stands for the whole prefix up to it."""
    mark = zlib.crc32(repr(namespace).encode())
    marks = []
    for token in tokens:
        mark = zlib.crc32(token.to_bytes(8, "little"), mark)
        marks.append(mark)
    return marks


@dataclass
class Cache:
    """A prefix cache with the pools it was built on, and the calls that tests make."""

    tree: UnifiedRadixCache
    allocator: TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator
    rows: ReqToTokenPool
    pool_tokens: int
    page_size: int
    is_eagle: bool
    kv_pools: tuple[MHATokenToKVPool, ...]
    """The target model's KV first, then draft models' KV in the same slots."""
    _rows_of_buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def core(self):
        return self.tree.tree_core

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.allocator.available_size(), self.tree.evictable_size(), self.tree.protected_size())

    def key(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> RadixKey:
        return RadixKey(array("q", tokens), namespace.extra_key, cache_salt=namespace.cache_salt)

    def whole_pages(self, num_tokens: int) -> int:
        """Tokens of a key that the tree can hold: whole pages, and one position fewer for pairs of tokens."""
        positions = max(num_tokens - 1, 0) if self.is_eagle else num_tokens
        return positions - positions % self.page_size

    def room_for(self, num_tokens: int) -> int:
        """Slots of the pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size) * self.page_size

    # -- what the controller does --

    def match(self, tokens: Sequence[int], namespace: Namespace = PLAIN):
        return self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, namespace)))

    def matched(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> int:
        """Tokens that match, which counts as an access."""
        return self.match(tokens, namespace).device_prefix_len

    def cached(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> int:
        """Tokens that are in the tree, without touching anything."""
        return self.core.match_full_device_prefix(self.key(tokens, namespace))[0]

    def evict(self, num_tokens: int) -> int:
        return self.tree.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    def insert(
        self,
        tokens: Sequence[int],
        namespace: Namespace = PLAIN,
        *,
        priority: int = 0,
        counted_tokens: int = 0,
    ) -> InsertResult:
        """What a request that matched nothing leaves behind: it allocates, inserts, and keeps nothing.

        `counted_tokens` is how much of the key this request had inserted before. Evicts for room as SGLang does.
        """
        room = self.room_for(len(tokens))
        evict_from_tree_cache(self.tree, room)
        slots = self.allocator.alloc(room)
        self.compute(slots[: len(tokens)], tokens, namespace)
        key = self.key(tokens, namespace)
        params = InsertParams(key=key, value=slots[: len(tokens)], priority=priority, inserted_len=counted_tokens)
        result = self.tree.insert(params)
        whole = self.whole_pages(len(tokens))
        if whole < room:
            self.allocator.free_segment(slots[whole:], start_pos=whole)
        return result

    def publish(
        self,
        tokens: Sequence[int],
        namespace: Namespace = PLAIN,
        *,
        priority: int = 0,
        counted_tokens: int = 0,
    ) -> InsertResult:
        """What a running request leaves behind: it matches, locks, computes the rest and inserts it.

        Takes whole pages of the key and asks for exactly the slots it lacks.
        """
        match = self.match(tokens, namespace)
        known = match.device_prefix_len
        lock = self.tree.lock(match.last_device_node)
        row = self.tree.path_device_indices(match.last_device_node)
        whole = self.whole_pages(len(tokens))
        if known < whole:
            evict_from_tree_cache(self.tree, whole - known)
            fresh = self.allocator.alloc(whole - known)
            self.compute(fresh, tokens[:whole], namespace, known)
            row = torch.cat([row, fresh])
        result = self.tree.insert(
            InsertParams(
                key=self.key(tokens, namespace),
                value=row,
                prev_prefix_len=known,
                inserted_len=counted_tokens,
                priority=priority,
            )
        )
        self.tree.unlock(lock)
        return result

    def reset(self) -> None:
        """Flush, as the scheduler does it."""
        self.tree.reset()
        self.rows.clear()
        self.allocator.clear()

    # -- KV --

    def compute(self, slots: torch.Tensor, tokens: Sequence[int], namespace: Namespace = PLAIN, start: int = 0):
        """Stand-in for a forward: leave the marks of `tokens[start:]` in `slots`, in every KV buffer."""
        marks = torch.tensor(prefix_marks(tokens, namespace)[start:], dtype=torch.float64)
        for buffer, row in self._buffers():
            buffer[slots] = marks[:, None, None] + row

    def holds_computed_kv(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> bool:
        """Whether the cached prefix of `tokens` leads to the slots where exactly that prefix was computed."""
        length, node_id, _ = self.core.match_full_device_prefix(self.key(tokens, namespace))
        slots = self.core.collect_full_device_indices(node_id, self.core.root_node_handle())[:length]
        return self.marks_of(slots) == prefix_marks(tokens, namespace)[:length]

    def marks_of(self, slots: torch.Tensor) -> list[float]:
        """What was computed into these slots, -1 where a slot is negative, NaN where buffers disagree about it."""
        known = slots.clamp(min=0).numpy()
        buffers = self._buffers()
        marks = (buffers[0][0].numpy()[known] - buffers[0][1].numpy())[:, 0, 0]
        agree = np.ones(len(marks), dtype=np.bool_)
        for buffer, row in buffers:
            agree &= (buffer.numpy()[known] == marks[:, None, None] + row.numpy()).all(axis=(1, 2))
        return np.where(slots.numpy() < 0, -1.0, np.where(agree, marks, np.nan)).tolist()

    def _buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every KV buffer, and what each of its numbers adds to the mark of a slot: no two buffers look alike."""
        if not self._rows_of_buffers:
            buffers = [buffer for pool in self.kv_pools for buffer in (*pool.k_buffer, *pool.v_buffer)]
            for number, buffer in enumerate(buffers):
                places = torch.arange(buffer.shape[2], dtype=torch.float64) / 1024
                self._rows_of_buffers.append((buffer, (number + places)[None, None, :]))
        return self._rows_of_buffers

    def free_pages(self) -> list[int]:
        return sorted(self.allocator.get_all_free_pages().tolist())


def build(
    backend: str,
    *,
    page_size: int = 1,
    pool_tokens: int = 256,
    policy: str = "lru",
    parameters: dict | None = None,
    is_eagle: bool = False,
    events: bool = False,
    dynamo: bool = False,
    rows: int = 16,
    num_drafts: int = 0,
    head_dim: int = 1,
    layers: int = 1,
    exchange: Callable = lambda allocator: allocator,
) -> Cache:
    """A cache of `backend` over SGLang's own pools; ours under our controller, the others under SGLang's.

    `exchange` gives the allocator that takes the place of SGLang's.
    """
    kv_pools = tuple(
        MHATokenToKVPool(
            size=pool_tokens,
            page_size=page_size,
            dtype=torch.float64,
            head_num=1,
            head_dim=head_dim,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
        )
        for _ in range(1 + num_drafts)
    )
    common = {"dtype": torch.float64, "device": "cpu", "kvcache": kv_pools[0], "need_sort": False}
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(pool_tokens, **common)
    else:
        allocator = PagedTokenToKVPoolAllocator(pool_tokens, page_size=page_size, **common)
    allocator = exchange(allocator)
    requests = ReqToTokenPool(size=rows, max_context_len=pool_tokens, device="cpu", enable_memory_saver=False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        is_eagle=is_eagle,
        eviction_policy=policy,
        eviction_policy_config=parameters,
        enable_kv_cache_events=events,
        dynamo_kv_event_format=dynamo,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=backend,
        sidecar_draft_device_pools=kv_pools[1:],
    )
    controller = RadixPagesCache if backend == OURS else UnifiedRadixCache
    tree = controller(params)
    tree.take_events()  # building a cache announces that it is empty
    return Cache(tree, allocator, requests, pool_tokens, page_size, is_eagle, kv_pools)


def returning(
    *,
    page_size: int = 4,
    frame_pages: int = 2,
    pretended: bool = False,
    rows: int = 16,
    pool_tokens: int,
    mode: str = "return",
    layers: int = 1,
    returns_per_slice: int | None = 1000,
    **settings,
) -> Cache:
    """A cache of ours in mode return or move whose memory is all returned but for frame 0 and the reserve.

    Backed by the operating system, or by a PretendBacking. `settings` are those of the environment.
    """
    settings = Settings(mode=mode, frame_tokens=page_size * frame_pages, **settings)

    def exchange(stock):
        kind = RadixPagesTokenAllocator if page_size == 1 else RadixPagesPagedAllocator
        pool = stock.get_kvcache()
        if pretended:
            geometry = Geometry(page_size, pages_per_frame=frame_pages)
            backing = PretendBacking(geometry, pool_tokens // page_size)
        else:
            geometry = frame_geometry(settings, page_size, row_bytes(pool), on_cuda=False, is_backed=True)
            backing = MmapBacking(create_buffers(pool), geometry)
        allocator = kind(stock, geometry, settings)
        allocator.back_with(backing, starts_returned=True)
        return allocator

    # Keys and values of a frame then fill an operating-system page each, at least.
    head_dim = 1 if pretended else 512 // (page_size * frame_pages)
    shape = {"page_size": page_size, "pool_tokens": pool_tokens, "head_dim": head_dim, "layers": layers}
    cache = build(OURS, **shape, rows=rows, exchange=exchange)
    if returns_per_slice is not None:  # what is measured differs from machine to machine
        cache.tree.control.returns_per_slice = returns_per_slice
    return cache


class Request:
    """A real `Req`, taken through the same calls as the scheduler makes for it."""

    def __init__(
        self,
        cache: Cache,
        tokens: Sequence[int],
        namespace: Namespace = PLAIN,
        *,
        priority: int = 0,
        req: Req | None = None,
    ) -> None:
        self.cache = cache
        self.namespace = namespace
        self.req = req or Req(
            rid=f"r{next(_request_ids)}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1 << 20),
            extra_key=namespace.extra_key,
            cache_salt=namespace.cache_salt,
            priority=priority,
        )

    @property
    def tokens(self) -> list[int]:
        return [*self.req.origin_input_ids, *self.req.output_ids]

    @property
    def num_left_to_prefill(self) -> int:
        return len(self.req.full_untruncated_fill_ids) - self.req.prefix_len

    @property
    def held_tokens(self) -> int:
        """Slots of the pages that this request owns outside the tree."""
        kv = self.req.kv
        return self.cache.room_for(kv.kv_allocated_len) - kv.cache_protected_len if kv.holds_kv else 0

    def admit(self) -> Request:
        """Match the prompt and lock what matched."""
        self.req.init_next_round_input(self.cache.tree)
        self.req.lock = self.cache.tree.lock(self.req.last_node)
        return self

    def prefill(self, num_tokens: int | None = None) -> Request:
        """Allocate and compute the next `num_tokens` of the prompt, all that is left by default."""
        cache, req, kv = self.cache, self.req, self.req.kv
        start = req.prefix_len
        stop = start + min(self.num_left_to_prefill, num_tokens or self.num_left_to_prefill)
        req.extend_end = stop
        if kv.holds_kv:
            prefix = cache.rows.req_to_token[kv.req_pool_idx, :start].to(torch.int64)
        else:
            prefix = cache.tree.prefix_device_indices(req) if start else torch.empty(0, dtype=torch.int64)
            assert cache.rows.alloc([req]) is not None
            cache.rows.write((kv.req_pool_idx, slice(0, start)), prefix)
        slots = self._allocate(start, stop, prefix[-1:] if start else torch.tensor([-1]))
        self._commit(start, stop, slots)
        cache.tree.maybe_hand_to_session(req)
        return self

    def publish(self) -> Request:
        """Put what was prefilled into the tree and go on."""
        checkpoint_kv_cache(self.req, self.cache.tree)
        return self

    def decode(self, tokens: Sequence[int]) -> Request:
        """Generate `tokens`; the KV of the last one stays uncomputed, as in a server."""
        cache, req = self.cache, self.req
        for token in tokens:
            if req.output_ids:
                length = req.kv.kv_allocated_len
                last = cache.rows.req_to_token[req.kv.req_pool_idx, length - 1 : length].to(torch.int64)
                self._commit(length, length + 1, self._allocate_one(length, last))
            req.output_ids.append(token)
        return self

    def finish(self) -> Request:
        self.req.finished_reason = FINISH_LENGTH(length=len(self.req.output_ids))
        release_kv_cache(self.req, self.cache.tree, checkpoint=True)
        return self

    def abort(self) -> Request:
        """End without leaving anything new behind."""
        self.req.finished_reason = FINISH_ABORT()
        release_kv_cache(self.req, self.cache.tree, checkpoint=False)
        return self

    def serve(self, output: Sequence[int] = ()) -> Request:
        """A whole life at once."""
        return self.admit().prefill().publish().decode(output).finish()

    def _allocate(self, start: int, stop: int, last_slot: torch.Tensor) -> torch.Tensor:
        if self.cache.page_size == 1:
            return alloc_token_slots(self.cache.tree, stop - start)
        begin, end = torch.tensor([start]), torch.tensor([stop])
        return alloc_paged_token_slots_extend(self.cache.tree, begin, begin, end, end, last_slot, stop - start)

    def _allocate_one(self, length: int, last_slot: torch.Tensor) -> torch.Tensor:
        if self.cache.page_size == 1:
            return alloc_token_slots(self.cache.tree, 1)
        evict_from_tree_cache(self.cache.tree, self.cache.page_size)
        lengths = torch.tensor([length + 1])
        return self.cache.allocator.alloc_decode(lengths, lengths, last_slot)

    def _commit(self, start: int, stop: int, slots: torch.Tensor) -> None:
        kv = self.req.kv
        self.cache.rows.write((kv.req_pool_idx, slice(start, stop)), slots)
        self.cache.compute(slots, self.tokens[:stop], self.namespace, start)
        kv.kv_allocated_len = kv.kv_committed_len = stop
