"""SGLang's tree-core interface over `radix_pages.tree`. No policy: it converts, calls and reports.

Synchronisation: nothing here waits for the device except `all_values`-style reports, `walk_for_kv_canary` and, in an
insert whose request has overwritten what it inserted before (`_overwritten`), a comparison of slots; eviction needs
lengths only and hands back the payload tensors it took out of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
)
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceNextNodeResult,
    InsertStepResult,
    RadixCacheWalkResult,
    TreePathNodeInfo,
)

from radix_pages.check import disagreements
from radix_pages.frame_planner import FramePlan
from radix_pages.node import Node
from radix_pages.order import LeafQueue, make_order
from radix_pages.planner import Plan, plan_pages
from radix_pages.reclaim import reclaim
from radix_pages.results import Removal, TreeError
from radix_pages.tree import RadixTree
from radix_pages_sglang import convert
from radix_pages_sglang.events import TreeEvents
from radix_pages_sglang.no_host_tier import DeviceOnlyTreeCore

if TYPE_CHECKING:
    import numpy as np
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

FULL = ComponentType.FULL


class Evicted(NamedTuple):
    """What one eviction took out of the tree: whole pages, as an int64 tensor of their slots in key order."""

    num_tokens: int
    slots: torch.Tensor
    removals: list[Removal]


class RadixPagesTreeCore(DeviceOnlyTreeCore):
    """The page-exact tree behind SGLang's UnifiedRadixCache, for full attention on one device.

    Sizes SGLang sees are in tokens (slots); the tree counts pages.
    """

    def __init__(self, params: CacheInitParams) -> None:
        allocator = params.token_to_kv_pool_allocator
        self.device = torch.device(allocator.device if allocator is not None else "cpu")
        self.page_size = params.page_size
        self.is_eagle = params.is_eagle
        self.geometry = convert.geometry(params.page_size, self.is_eagle)
        order = make_order(params.eviction_policy, params.eviction_policy_config, page_size=params.page_size)
        self.leaves = LeafQueue(order)
        self.tree = RadixTree(self.geometry, torch.clone, self.leaves)
        self.events = TreeEvents(params, self.is_eagle)
        self.kv_events = self.events.recorder
        self._evict_tokens = 0
        self.pending_actions: list[FreeDeviceKV] = []
        self._remember_empty_match()

    def reset(self) -> None:
        self.tree.reset()
        self._evict_tokens = 0
        self.pending_actions = []
        self._remember_empty_match()

    def _remember_empty_match(self) -> None:
        root = self.tree.root.id
        self._empty_match = MatchResult(0, root, root, root, cache_actions=[])

    # -- match and insert --

    @property
    def empty_match_result(self) -> MatchResult:
        return self._empty_match

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key = params.key
        match = self.tree.match(convert.key_bytes(key, self.is_eagle), convert.namespace_of(key))
        num_pages = match.num_pages
        if not num_pages:
            return self._empty_match
        node_id = match.node.id
        num_tokens = num_pages * self.page_size
        # In field order: device_prefix_len, last_device_node, last_host_node, best_match_node, five lengths of
        # tiers and components that do not exist here, cache_protected_len, full_kv_hit_length, cache_actions,
        # last_visited_node_id.
        return MatchResult(
            num_tokens, node_id, node_id, node_id, 0, 0, None, 0, None, None, num_tokens, [], node_id
        )  # fmt: skip

    def match_full_device_prefix(self, key: RadixKey) -> tuple[int, int, int]:
        match = self.tree.find(convert.key_bytes(key, self.is_eagle), convert.namespace_of(key))
        pinned = match.node.start + match.node.num_pages
        return self.geometry.slots(match.num_pages), match.node.id, self.geometry.slots(pinned)

    def begin_insert(self, params: InsertParams) -> InsertStepResult:
        key = params.key
        tokens = convert.key_bytes(key, self.is_eagle)
        value = params.value
        if value is None:
            value = torch.tensor(key.raw_token_ids(), dtype=torch.int64, device=self.device)
        page_size = self.page_size
        done = self.tree.insert(
            tokens,
            value,
            namespace=convert.namespace_of(key),
            owned_pages=params.prev_prefix_len // page_size,
            counted_pages=params.inserted_len // page_size,
            priority=params.priority or 0,
        )
        matched = done.matched_pages * page_size
        leaf = done.leaf
        if leaf is not None and self.events.enabled:
            self.events.stored(leaf, params.session_id)
        result = InsertResult(
            prefix_len=matched,
            last_device_node=done.node.id,
            mamba_exist=len(tokens) < self.geometry.key_bytes_per_page,
            rotation_tail_declined=done.declined,
        )
        if params.track_adopted_ranges:
            added = 0 if leaf is None else leaf.num_pages * page_size
            result.adopted_ranges = {FULL: [(matched, matched + added)]} if added else {}
        actions = self._overwritten(done.node, value[matched : matched + page_size]) if done.declined else []
        if params.prev_prefix_len < matched and not done.declined:
            # What the tree had already: the caller's own copy of it goes back to the allocator.
            actions.append(FreeDeviceKV([value[params.prev_prefix_len : matched]]))
        return InsertStepResult(actions, result)

    def _overwritten(self, above: Node, first_page: torch.Tensor) -> list[FreeDeviceKV]:
        """A request rewrote tokens that it had inserted, in the same slots: take the old span out of reach.

        It is the locked child of `above` that owns these slots. Waits for the device, in this rare case alone.
        """
        for child in above.children.values():
            if child.locks and convert.same_slots(child.payload[: self.page_size], first_page):
                removals = self.tree.mark_overwritten(child)
                self._forget_events_below(child)
                return self._freed(removals)
        return []

    def _forget_events_below(self, node: Node) -> None:
        """Tell listeners now that the overwritten nodes from `node` down are gone: nothing can match them, though
        their locks keep them in the tree. Losing their labels, they are not reported again when they leave."""
        if not self.events.enabled or node.parent is None:
            return
        below = [node]
        for each in below:
            below += each.children.values()
            self.events.removed(each)
            each.labels = None

    def _freed(self, removals: list[Removal]) -> list[FreeDeviceKV]:
        """The actions that give removed pages back, with their events recorded."""
        self._report(removals)
        return [FreeDeviceKV([removal.payload for removal in removals])] if removals else []

    def _report(self, removals: list[Removal]) -> None:
        if self.events.enabled:
            for removal in removals:
                self.events.removed(removal)

    def resume_insert(self) -> InsertStepResult:
        raise TreeError("no insert is under way: radix_pages finishes every insert in begin_insert()")

    def has_ongoing_insert(self) -> bool:
        return False

    def end_insert(self) -> list:
        return []

    # -- locks --

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[ComponentType] = ()) -> IncLockRefResult:
        self.tree.lock(node_id)
        return IncLockRefResult(None, node_id, skip_lock_components)

    def dec_lock_ref(self, node_id: int, params: DecLockRefParams, skip_swa: bool = False) -> DecLockRefResult:
        if params.node_id != node_id:
            raise TreeError(f"lock receipt anchored on node {params.node_id} released on node {node_id}")
        removals = self.tree.unlock(node_id)
        if removals:
            self.pending_actions += self._freed(removals)
        return DecLockRefResult()

    def inc_full_pin(self, node_id: int) -> None:
        self.tree.lock(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        self.pending_actions += self._freed(self.tree.unlock(node_id))

    # -- eviction: one plan and one step for a whole request --

    def evict_tokens(self, num_tokens: int) -> Evicted:
        """Evict `num_tokens` tokens, rounded up to pages, or all that is evictable; the caller frees the slots."""
        return self.carry_out(plan_pages(self.leaves, self.geometry.pages_to_hold(num_tokens)))

    def carry_out(self, plan: Plan | FramePlan) -> Evicted:
        """Evict what `plan` says; the caller frees the slots."""
        removals = reclaim(self.tree, plan)
        self._report(removals)
        num_pages = sum(removal.num_pages for removal in removals)
        slots = convert.concatenated([removal.payload for removal in removals], self.device)
        return Evicted(self.geometry.slots(num_pages), slots, removals)

    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        self._evict_tokens = request_cnt if component_type == FULL else 0

    def evict_device_next_node(self, component_type: ComponentType, tracker: dict) -> EvictDeviceNextNodeResult:
        step = EvictDeviceNextNodeResult()
        missing = self._evict_tokens - tracker.get(FULL, 0)
        evicted = self.evict_tokens(missing) if missing > 0 else None
        if evicted is not None and evicted.num_tokens:
            step.made_progress = True
            step.device_frees[FULL].append(evicted.slots)
            step.tracker[FULL] = evicted.num_tokens
        return step

    def evict_device_end(self, component_type: ComponentType) -> None:
        self._evict_tokens = 0

    # -- sizes, in tokens --

    def evictable_size(self) -> int:
        return self.tree.evictable_pages * self.page_size

    def protected_size(self) -> int:
        return self.tree.protected_pages * self.page_size

    def full_evictable_size(self) -> int:
        return self.tree.evictable_pages * self.page_size

    def full_protected_size(self) -> int:
        return self.tree.protected_pages * self.page_size

    def component_evictable_size(self, component_type: ComponentType) -> int:
        return self.evictable_size() if component_type == FULL else 0

    def component_protected_size(self, component_type: ComponentType) -> int:
        return self.protected_size() if component_type == FULL else 0

    def total_size(self) -> tuple[int, int]:
        return self.evictable_size() + self.protected_size(), 0

    # -- nodes and paths --

    def node_by_id(self, node_id: int) -> Node:
        return self.tree.node(node_id)

    @property
    def root_node(self) -> Node:
        return self.tree.root

    def root_node_handle(self, extra_key: str | None = None) -> int:
        return self.tree.root.id

    def is_root(self, node_id: int) -> bool:
        return self.tree.node(node_id).parent is None

    def collect_full_device_indices(self, from_node_id: int, until_node_id: int) -> torch.Tensor:
        until = self.tree.node(until_node_id)
        payloads = []
        node: Node | None = self.tree.node(from_node_id)
        while node is not until:
            if node is None or node.parent is None:
                raise TreeError(f"node {until_node_id} is not above node {from_node_id}")
            payloads.append(node.payload)
            node = node.parent
        payloads.reverse()
        return convert.concatenated(payloads, self.device)

    def collect_path_info(self, end_node_ids: Sequence[int]) -> tuple[tuple[TreePathNodeInfo, ...], ...]:
        slots = self.geometry.slots
        return tuple(
            tuple(
                TreePathNodeInfo(
                    node.id,
                    node.parent.id,
                    slots(node.start),
                    slots(node.start + node.num_pages),
                    slots(node.num_pages),
                    len(node.children),
                )
                for node in self.tree.path(self.tree.node(node_id))
            )
            for node_id in end_node_ids
        )

    def dfs_weight_order(self, node_ids: Sequence[int]) -> list[int]:
        """Indices in depth-first order, the child with the most waiting requests below it first.

        Equal weights go by the first index that asked. Costs the paths of these nodes, not the whole tree.
        """
        asked: dict[int, list[int]] = {}
        weight: dict[int, int] = {}
        first: dict[int, int] = {}
        children: dict[int, dict[int, None]] = {}
        for index, node_id in enumerate(node_ids):
            node = self.tree.node(node_id)
            asked.setdefault(node.id, []).append(index)
            weight[node.id] = weight.get(node.id, 0) + 1
            first.setdefault(node.id, index)
            while node.parent is not None:
                parent = node.parent
                children.setdefault(parent.id, {})[node.id] = None
                weight[parent.id] = weight.get(parent.id, 0) + 1
                first.setdefault(parent.id, index)
                node = parent
        order: list[int] = []
        stack = [(self.tree.root.id, False)]
        while stack:
            node_id, below_done = stack.pop()
            if below_done:
                order += asked.get(node_id, ())
                continue
            stack.append((node_id, True))
            below = sorted(children.get(node_id, ()), key=lambda child: (-weight[child], first[child]))
            stack += [(child, False) for child in reversed(below)]
        return order

    # -- hashes (present only while KV events are on) --

    def get_hash_values(self, node_id: int) -> list[str]:
        return list(self.tree.node(node_id).labels or ())

    def get_last_hash_value(self, node_id: int) -> str | None:
        labels = self.tree.node(node_id).labels
        return labels[-1] if labels else None

    def get_prefix_hash_values(self, node_id: int) -> list[str]:
        return [label for node in self.tree.path(self.tree.node(node_id))[:-1] for label in node.labels or ()]

    def backfill_missing_hash_values(self) -> int:
        return 0

    # -- reports; these wait for the device --

    def get_component_device_value(self, node_id: int, component_type: ComponentType) -> torch.Tensor | None:
        return self.tree.node(node_id).payload if component_type == FULL else None

    def all_values_flatten(self) -> torch.Tensor:
        return convert.concatenated([node.payload for node in self.tree.nodes()], self.device)

    def walk_for_kv_canary(self, unlocked_only: bool, swa_resident_only: bool) -> RadixCacheWalkResult:
        """One row a slot: the slot, its position on its path, and the slot of the position before (-1 at 0)."""
        slots: list[int] = []
        positions: list[int] = []
        previous: list[int] = []
        last_slot = {self.tree.root.id: -1}
        for node in self.tree.nodes():
            own = convert.host_ints(node.payload)
            last_slot[node.id] = own[-1]
            if unlocked_only and node.locks:
                continue
            start = self.geometry.slots(node.start)
            slots += own
            positions += range(start, start + len(own))
            previous += [last_slot[node.parent.id], *own[:-1]]
        as_tensor = [torch.tensor(column, dtype=torch.int64) for column in (slots, positions, previous)]
        return RadixCacheWalkResult(slot_indices=as_tensor[0], positions=as_tensor[1], prev_slot_indices=as_tensor[2])

    def disagreements(self, slots: np.ndarray | None = None) -> list[str]:
        """The full recount: structure, counts, queue, and that no slot is in two nodes.

        `slots` is `all_values_flatten` on the host, for callers who have copied it already.
        """
        if slots is None:
            slots = convert.host_array(self.all_values_flatten())
        found = disagreements(self.tree, self.leaves)
        for slot in convert.repeated(slots)[:8]:
            ids = [node.id for node in self.tree.nodes() if slot in convert.host_array(node.payload)]
            found.append(f"slot {slot} is in nodes {ids}")
        return found

    def sanity_check(self, ongoing_write_through: list, ongoing_load_back: list) -> None:
        """Recount everything; raises AssertionError that lists every disagreement."""
        found = self.disagreements()
        if found:
            raise AssertionError("the radix_pages tree disagrees with itself:\n  " + "\n  ".join(found))

    def pretty_print(self) -> None:
        """Print one line a node, indented by depth."""
        depth = {self.tree.root.id: 0}
        print(f"radix_pages tree: {self.tree.num_nodes} nodes, {self.total_size()[0]} tokens, tick {self.tree.tick}")
        for node in self.tree.nodes():
            depth[node.id] = depth[node.parent.id] + 1
            print(f"{'  ' * depth[node.id]}{node!r}")
