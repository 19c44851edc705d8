"""The radix tree: match, insert, split, lock, unlock, trim, remove. It does not know why something is removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from radix_pages.node import ChildKey, Namespace, Node
from radix_pages.results import Insertion, Leaves, Match, Removal, TreeError, UnknownNodeError, removal_of
from radix_pages.units import Geometry


class RadixTree:
    """A radix tree over whole pages of tokens.

    Keys are bytes of `geometry.token_bytes` a token; what does not fill a page is cut off. `copy` makes an
    independent copy of a slice of a payload, so that no node keeps the storage of a longer one alive. `leaves` is
    told of every node that becomes evictable. Node ids and ticks grow for ever, also across resets.
    """

    def __init__(self, geometry: Geometry, copy: Callable[[Any], Any], leaves: Leaves) -> None:
        self.geometry = geometry
        self._copy = copy
        self._leaves = leaves
        self._page_bytes = geometry.key_bytes_per_page
        self._last_id = -1
        self.tick = 0
        self.reset()

    def reset(self) -> None:
        """Forget every node and void every lock. Ids from before stay unknown for ever."""
        self._leaves.clear()
        self._nodes: dict[int, Node] = {}
        self.evictable_pages = 0
        self.protected_pages = 0
        self._last_id += 1
        self.root = Node(self._last_id, None, b"", 0, None, None, self.tick, 0)
        self._nodes[self.root.id] = self.root

    # -- reading --

    @property
    def num_nodes(self) -> int:
        """Nodes in the tree, without the root."""
        return len(self._nodes) - 1

    def child_key(self, node: Node) -> ChildKey:
        """Under what `node`'s parent keeps it; the root has no such key (TreeError)."""
        if node.parent is None:
            raise TreeError(f"node {node.id} has no parent")
        if node.is_overwritten:
            return node.id
        return self._child_key(node.parent, node.tokens, 0, node.namespace)

    def node(self, node_id: int) -> Node:
        """The node with this id; raises UnknownNodeError when it has left the tree."""
        try:
            return self._nodes[node_id]
        except KeyError:
            raise UnknownNodeError(
                f"node {node_id} is not in the tree: it was evicted or trimmed since it was matched, "
                "or the cache was reset; match again"
            ) from None

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children, children in the order they came."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def path(self, node: Node) -> list[Node]:
        """The nodes from the one below the root down to `node`."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def find(self, key: bytes, namespace: Namespace | None = None) -> Match:
        """The longest cached prefix, changing nothing. It may end inside the returned node."""
        page_bytes = self._page_bytes
        end = len(key) - len(key) % page_bytes
        node, offset = self.root, 0
        while offset < end:
            child = node.children.get(self._child_key(node, key, offset, namespace))
            if child is None:
                break
            node = child
            if not key.startswith(child.tokens, offset):
                offset += self._shared_pages(child.tokens, key, offset) * page_bytes
                break
            offset += len(child.tokens)
        return Match(node, offset // page_bytes)

    # -- access --

    def match(self, key: bytes, namespace: Namespace | None = None) -> Match:
        """The longest cached prefix, which counts as accessed now. A node it ends inside of is split there."""
        page_bytes = self._page_bytes
        end = len(key) - len(key) % page_bytes
        self.tick = tick = self.tick + 1
        node, offset = self.root, 0
        while offset < end:
            # `_child_key` written out, here and in `insert`: the hot loops make no call for each node.
            first = key[offset : offset + page_bytes]
            if not offset and namespace is not None:
                child = node.children.get((namespace, first))
            else:
                child = node.children.get(first)
            if child is None:
                break
            if not key.startswith(child.tokens, offset):
                shared = self._shared_pages(child.tokens, key, offset)
                node = self._split(child, shared)
                node.tick = tick
                offset += shared * page_bytes
                break
            child.tick = tick
            node = child
            offset += len(child.tokens)
        if self._leaves.touched_is_urgent and node.is_leaf:
            self._leaves.offer(node)
        return Match(node, offset // page_bytes)

    def insert(
        self,
        key: bytes,
        payload: Any,
        *,
        namespace: Namespace | None = None,
        owned_pages: int = 0,
        counted_pages: int = 0,
        priority: int = 0,
    ) -> Insertion:
        """Put `key` with its `payload` (one item per slot) into the tree; what it shares counts as accessed now.

        The first `owned_pages` pages are known to be the tree's; when they no longer match, the caller has
        overwritten them, and the insert is declined. Nodes that end within the first `counted_pages` pages count
        no hit: the same request inserted them before. Payload of pages found in the tree is left to the caller.
        """
        page_bytes = self._page_bytes
        end = len(key) - len(key) % page_bytes
        total = end // page_bytes
        self.tick = tick = self.tick + 1
        node, offset = self.root, 0
        while offset < end:
            first = key[offset : offset + page_bytes]
            if not offset and namespace is not None:
                child = node.children.get((namespace, first))
            else:
                child = node.children.get(first)
            if child is None:
                break
            whole = key.startswith(child.tokens, offset)
            if not whole:
                child = self._split(child, self._shared_pages(child.tokens, key, offset))
            child.tick = tick
            if priority > child.priority:
                child.priority = priority
            if total > child.branch:
                child.branch = total
            if child.start + child.num_pages > counted_pages:
                child.hits += 1
            node = child
            offset += len(child.tokens)
        matched = offset // page_bytes
        declined = matched < owned_pages and matched < total
        leaf = None
        if matched < total and not declined:
            hits = int(total > counted_pages)
            node = leaf = self._add_leaf(node, key[offset:end], payload, matched, total, namespace, priority, hits)
        elif self._leaves.touched_is_urgent and node.is_leaf:
            self._leaves.offer(node)
        return Insertion(node, matched, leaf, declined)

    # -- locks --

    def lock(self, node_id: int) -> Node:
        """Protect the path to this node from eviction, counted.

        Raises UnknownNodeError when it is gone, TreeError when its slots were overwritten since it was matched.
        """
        node = self.node(node_id)
        if node.parent is None:
            return node
        if node.is_overwritten:
            raise TreeError(
                f"node {node_id} no longer holds what was matched: its slots were overwritten; match again"
            )
        node.held += 1
        up: Node = node
        newly = 0
        while up.parent is not None:
            if not up.locks:
                newly += up.num_pages
            up.locks += 1
            up = up.parent
        self.evictable_pages -= newly
        self.protected_pages += newly
        return node

    def unlock(self, node_id: int) -> list[Removal]:
        """Undo one `lock` of this node; returns overwritten pages that this lets go, almost always none.

        Raises UnknownNodeError when the node is gone, TreeError when it holds no lock.
        """
        node = self.node(node_id)
        if node.parent is None:
            return []
        if not node.held:
            raise TreeError(f"node {node_id} holds no lock: it was unlocked more often than locked")
        node.held -= 1
        up: Node = node
        freed = 0
        while up.parent is not None:
            up.locks -= 1
            if not up.locks:
                freed += up.num_pages
            up = up.parent
        self.evictable_pages += freed
        self.protected_pages -= freed
        if node.is_overwritten:
            return self._drop_overwritten(node)
        if node.is_leaf:
            self._leaves.offer(node)
        return []

    def mark_overwritten(self, node: Node) -> list[Removal]:
        """A request has put other tokens' KV into `node`'s slots: nothing may find `node` or what is below it.

        What no lock protects leaves at once and is returned; the rest leaves at its last unlock.
        """
        below = [node]
        for each in below:
            below += each.children.values()
        for each in below:
            key = self.child_key(each)
            parent = each.parent
            assert parent is not None
            del parent.children[key]
            each.is_overwritten = True
            parent.children[each.id] = each
        return [removal for each in reversed(below) if each.is_leaf for removal in self._drop_overwritten(each)]

    def _drop_overwritten(self, node: Node) -> list[Removal]:
        """Remove `node` and then its parents, as far as they are overwritten leaves."""
        removals = []
        while node.is_overwritten and node.is_leaf:
            parent = node.parent
            assert parent is not None
            removals.append(self.remove(node))
            node = parent
        return removals

    # -- removal --

    def remove(self, leaf: Node) -> Removal:
        """Take a whole leaf out of the tree. Raises TreeError when it is locked, has children or is not there."""
        self._require_leaf(leaf)
        parent = leaf.parent
        assert parent is not None
        del parent.children[self.child_key(leaf)]
        del self._nodes[leaf.id]
        self._leaves.forget(leaf)
        leaf.parent = None
        self.evictable_pages -= leaf.num_pages
        if parent.is_leaf:
            self._leaves.offer(parent)
        return removal_of(leaf, leaf.num_pages, leaf.tokens, leaf.payload, leaf.labels)

    def trim(self, leaf: Node, num_pages: int) -> Removal:
        """Take the last `num_pages` pages of a leaf out of the tree and give what is left a new id.

        The leaf keeps its place in every order. Its old id becomes unknown, because it named the longer prefix.
        """
        self._require_leaf(leaf)
        keep = leaf.num_pages - num_pages
        if not 0 < num_pages < leaf.num_pages:
            raise TreeError(f"cannot trim {num_pages} of node {leaf.id}'s {leaf.num_pages} pages; remove it instead")
        cut = self.geometry.slots(keep)
        tokens, labels = leaf.tokens, leaf.labels
        cut_bytes = keep * self._page_bytes
        gone = None if labels is None else labels[keep:]
        removal = removal_of(leaf, num_pages, tokens[cut_bytes:], leaf.payload[cut:], gone)
        leaf.payload = self._copy(leaf.payload[:cut])
        leaf.tokens = tokens[:cut_bytes]
        leaf.labels = None if labels is None else labels[:keep]
        leaf.num_pages = keep
        self.evictable_pages -= num_pages
        del self._nodes[leaf.id]
        leaf.id = self._new_id()
        self._nodes[leaf.id] = leaf
        return removal

    # -- inside --

    def _child_key(self, parent: Node, key: bytes, offset: int, namespace: Namespace | None) -> ChildKey:
        first = key[offset : offset + self._page_bytes]
        return first if namespace is None or parent.parent is not None else (namespace, first)

    def _shared_pages(self, tokens: bytes, key: bytes, offset: int) -> int:
        """Whole pages that `tokens` and `key` at `offset` share; the first page is known to be equal.

        Halving keeps this at a few byte comparisons, never one per token.
        """
        page_bytes = self._page_bytes
        equal = 1
        differ = min(len(tokens), len(key) - offset) // page_bytes + 1
        while differ - equal > 1:
            middle = (equal + differ) // 2
            low, high = equal * page_bytes, middle * page_bytes
            if tokens[low:high] == key[offset + low : offset + high]:
                equal = middle
            else:
                differ = middle
        return equal

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _add_leaf(
        self,
        parent: Node,
        tokens: bytes,
        payload: Any,
        start: int,
        stop: int,
        namespace: Namespace | None,
        priority: int,
        hits: int,
    ) -> Node:
        own = self._copy(payload[self.geometry.slots(start) : self.geometry.slots(stop)])
        leaf = Node(self._new_id(), parent, tokens, stop - start, own, namespace, self.tick, priority)
        leaf.hits = hits
        parent.children[self._child_key(parent, tokens, 0, namespace)] = leaf
        self._nodes[leaf.id] = leaf
        self.evictable_pages += leaf.num_pages
        self._leaves.offer(leaf)
        return leaf

    def _split(self, node: Node, num_pages: int) -> Node:
        """Put a new node with `node`'s first `num_pages` pages above it and return it.

        `node` keeps its id (it still ends the same prefix), recency, creation, hits and its own locks; the new
        node starts with the same values, since every access to `node` was one to it.
        """
        parent = node.parent
        assert parent is not None
        if not 0 < num_pages < node.num_pages:
            raise TreeError(f"cannot split node {node.id} of {node.num_pages} pages after {num_pages}")
        cut_bytes, cut_slots = num_pages * self._page_bytes, self.geometry.slots(num_pages)
        tokens, payload, labels = node.tokens, node.payload, node.labels
        front = Node(
            self._new_id(),
            parent,
            tokens[:cut_bytes],
            num_pages,
            self._copy(payload[:cut_slots]),
            node.namespace,
            node.tick,
            node.priority,
        )
        front.created, front.hits, front.branch, front.locks = (
            node.created,
            node.hits,
            node.branch,
            node.locks,
        )
        node.tokens = tokens[cut_bytes:]
        node.payload = self._copy(payload[cut_slots:])
        if labels is not None:
            front.labels, node.labels = labels[:num_pages], labels[num_pages:]
        node.parent = front
        node.num_pages -= num_pages
        node.start += num_pages
        parent.children[self._child_key(parent, tokens, 0, node.namespace)] = front
        front.children[node.tokens[: self._page_bytes]] = node
        self._nodes[front.id] = front
        if node.is_leaf:
            self._leaves.offer(node)
        return front

    def _require_leaf(self, node: Node) -> None:
        if not node.is_leaf:
            why = f"{node.locks} locks" if node.locks else f"{len(node.children)} children"
            if node.parent is None:
                why = "no place in the tree"
            raise TreeError(f"node {node.id} cannot be evicted: it has {why}")
