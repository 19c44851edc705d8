"""What SGLang's cache kit wants to see of a tree core, for ours: the white-box view, tests only.

Methods that would plant host tiers, other components or half a node are left to raise: such states do not exist here.
"""

from __future__ import annotations

from sglang.test.kits.unified_radix_cache.unified_tree_core_inspection_interface import (
    UnifiedTreeCoreInspectionInterface,
)

from radix_pages_sglang import convert
from radix_pages_sglang.tree_core import FULL, RadixPagesTreeCore

_STATES_THAT_DO_NOT_EXIST = (
    "advance_insert_walk_once",
    "build_backup_node_ids",
    "cleanup_tombstone_ancestors",
    "evict_component",
    "finalize_component_match_result",
    "get_component_device_lru_node_ids",
    "insert_node_into_host_lru",
    "remove_node_from_device_lru",
    "set_component_device_lock_ref",
    "set_component_device_value_raw",
    "set_component_evictable_size",
    "set_component_host_value_raw",
    "set_component_protected_size",
    "set_node_hash_values",
    "update_duplicate_tracking",
    "validate_cascade_evict",
)


def _no_such_state(name):
    def call(self, *args, **kwargs):
        raise NotImplementedError(f"a radix_pages tree has no state that {name}() could read or set")

    return call


class RadixPagesInspector(RadixPagesTreeCore, UnifiedTreeCoreInspectionInterface):
    """Our core, opened for the kit."""

    for _name in _STATES_THAT_DO_NOT_EXIST:
        locals()[_name] = _no_such_state(_name)
    del _name

    def contains_node(self, node_id):
        return node_id in self.get_all_node_ids()

    def get_parent_node_id(self, node_id):
        parent = self.tree.node(node_id).parent
        return None if parent is None else parent.id

    def get_child_node_ids(self, node_id):
        return [child.id for child in self.tree.node(node_id).children.values()]

    def get_node_key_length(self, node_id):
        return self.geometry.slots(self.tree.node(node_id).num_pages)

    def get_node_token_ids(self, node_id):
        node = self.tree.node(node_id)
        return list(convert.radix_key(node.tokens, node.namespace, self.is_eagle).token_ids)

    def is_node_key_bigram(self, node_id):
        return self.is_eagle

    def get_component_host_value(self, node_id, component_type):
        return None

    def get_component_device_lock_ref(self, node_id, component_type):
        return self.tree.node(node_id).locks if component_type == FULL else 0

    def get_component_host_lock_ref(self, node_id, component_type):
        return 0

    def get_node_hit_count(self, node_id):
        return self.tree.node(node_id).hits

    def get_write_through_pending_id(self, node_id):
        return None

    def is_external_cache_stored(self, node_id):
        return False

    def is_node_in_device_lru(self, node_id, component_type):
        return False

    def is_node_in_host_lru(self, node_id, component_type):
        return False

    def is_device_evictable_leaf(self, node_id):
        return self.tree.node(node_id).is_leaf

    def is_host_evictable_leaf(self, node_id):
        return False

    def is_device_leaf(self, node_id):
        node = self.tree.node(node_id)
        return node.parent is not None and not node.children

    def get_all_node_ids(self):
        return [self.tree.root.id, *(node.id for node in self.tree.nodes())]
