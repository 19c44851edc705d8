"""The part of SGLang's tree-core interface that a device-only, full-attention cache has no use for.

Host tiers, storage, external linkers, sliding windows and Mamba state are refused at start-up (`support.py`), so
SGLang never drives them. What it asks anyway gets the true answer ("nothing is backed up"); a call that would
need a missing tier raises NotImplementedError with the name of the call.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    DecSwaLockOnlyResult,
    DriveHostEvictionResult,
    UnifiedTreeCoreInterface,
)

_MISSING_TIER_CALLS = (
    "attach_swa_window",
    "build_backup_spec",
    "build_external_linker_offload_transfers",
    "build_hicache_transfers",
    "build_load_back_spec",
    "build_storage_backup_spec",
    "commit_backup",
    "commit_hicache_transfers",
    "commit_load_back",
    "demote",
    "drop_subtree_no_host",
    "evict_device_leaf",
    "finish_external_linker_offload",
    "finish_load_back",
    "finish_mamba_state_eviction",
    "finish_swa_state_eviction",
    "finish_write_through",
    "insert_host",
    "mark_external_cache_stored_path",
    "mark_external_linker_offload_pending",
    "mark_write_through_pending",
    "prefetch_anchor_info",
    "set_component_device_value",
    "set_hicache_enabled",
    "set_host_memory_buffer_only",
    "snapshot_buffer_backup",
    "swa_tombstone_ranges",
    "validate_buffer_backup",
)


def _missing_tier_call(name: str):
    def call(self, *args, **kwargs):
        raise NotImplementedError(
            f"radix_pages caches on the device only and has no {name}(); start without host cache, external "
            "linker, sliding-window or Mamba components, or without --radix-cache-backend radix_pages"
        )

    call.__name__ = name
    return call


class DeviceOnlyTreeCore(UnifiedTreeCoreInterface):
    """Answers everything about tiers and components that do not exist here."""

    enable_hicache = False
    enable_storage = False
    enable_external_cache_linker = False
    enable_session_radix_cache = False
    is_host_memory_buffer_only = False
    is_write_back = False
    has_swa_host_pool = False
    write_through_threshold = 256

    for _name in _MISSING_TIER_CALLS:
        locals()[_name] = _missing_tier_call(_name)
    del _name

    def is_write_through_compatible(self) -> bool:
        return True

    def is_backuped(self, node_id: int) -> bool:
        return False

    def is_full_device_evicted(self, node_id: int) -> bool:
        return False

    def component_has_host_value_only(self, node_id: int, component_type: ComponentType) -> bool:
        return False

    def inc_host_lock_ref(self, node_id: int):
        return self.inc_lock_ref(node_id)

    def dec_host_lock_ref(self, node_id: int, params):
        return self.dec_lock_ref(node_id, params)

    def drive_host_eviction(self, component_type: ComponentType, num_tokens: int) -> DriveHostEvictionResult:
        return DriveHostEvictionResult()

    def evict_excess_path_states(self, tail_node_id, device_frees, host_frees, cache_actions) -> None:
        return None

    def dec_swa_lock_only(self, node_id: int, params) -> DecSwaLockOnlyResult:
        return DecSwaLockOnlyResult()

    def adjust_component_size(self, node_id: int, component_type: ComponentType, delta: int) -> None:
        raise NotImplementedError("radix_pages counts what its nodes hold; sizes cannot be adjusted from outside")

    def swa_evictable_size(self) -> int:
        return 0

    def swa_protected_size(self) -> int:
        return 0

    def mamba_evictable_size(self) -> int:
        return 0

    def mamba_protected_size(self) -> int:
        return 0

    def all_mamba_values_flatten(self) -> torch.Tensor:
        return torch.empty((0,), dtype=torch.int64, device=self.device)
