"""KV cache events through SGLang's own recorder, for nodes of our tree.

The recorder wants nodes with `key`, `hash_value`, `event_hash_value` and `parent`. Ours keep one hash a page in
`Node.labels`, which the tree slices at splits and trims; a view is made per event.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str

from radix_pages_sglang import convert

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from radix_pages.node import Node
    from radix_pages.results import Removal


@dataclass(slots=True)
class _EventNode:
    """What the recorder reads of a node. Hashes of a namespaced node are event hashes, of a plain one page hashes."""

    key: RadixKey
    hash_value: list[str] | None
    event_hash_value: list[str] | None
    parent: _EventNode | None


class TreeEvents:
    """Records what entered and what left the tree; does nothing when events are off."""

    def __init__(self, params: CacheInitParams, is_bigram: bool) -> None:
        self.recorder = KVCacheEventRecorder(
            enabled=params.enable_kv_cache_events,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        self.enabled = self.recorder.enabled
        self._is_bigram = is_bigram
        self._root = self._view(b"", None, [])
        if self.enabled:
            # SGLang compiles its hash on first use, which takes seconds and a C++ compiler: now, not while serving.
            get_hash_str(array("q", bytes(8 * params.page_size)), page_size=params.page_size)

    def stored(self, leaf: Node, session_id: str | None) -> None:
        """`leaf` is new in the tree; its pages' hashes become its labels."""
        parent = leaf.parent
        assert parent is not None
        above = self._root
        if parent.parent is not None:
            above = self._view(parent.tokens, parent.namespace, parent.labels)
            above.parent = self._root
        view = self._view(leaf.tokens, leaf.namespace, None)
        view.parent = above
        self.recorder.record_store(view, session_id=session_id)
        leaf.labels = view.hash_value if leaf.namespace is None else view.event_hash_value

    def removed(self, gone: Removal | Node) -> None:
        """These pages left the tree, as a leaf or as a leaf's tail, or can no longer be found in it."""
        if gone.labels is not None:
            self.recorder.record_remove(self._view(gone.tokens, gone.namespace, gone.labels))

    def _view(self, tokens: bytes, namespace, hashes: list[str] | None) -> _EventNode:
        key = convert.radix_key(tokens, namespace, self._is_bigram)
        # The recorder hashes a namespaced node twice and publishes only the second; an empty first list saves one.
        return _EventNode(
            key=key,
            hash_value=hashes if namespace is None else [],
            event_hash_value=hashes if namespace is not None else None,
            parent=None,
        )
