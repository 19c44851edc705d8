"""The recount: rebuilds every running count of the tree and lists each disagreement."""

from __future__ import annotations

from collections import Counter

from radix_pages.node import Node
from radix_pages.order import LeafQueue
from radix_pages.results import UnknownNodeError
from radix_pages.tree import RadixTree


def disagreements(tree: RadixTree, leaves: LeafQueue) -> list[str]:
    """What is wrong with `tree` and its queue, a sentence each; empty when all is well. Linear in nodes."""
    found: list[str] = []
    nodes = list(tree.nodes())
    if tree.root.parent is not None or tree.root.locks or tree.root.num_pages:
        found.append(f"the root {tree.root!r} has a parent, locks or pages")
    for node in nodes:
        found += _about_node(tree, node)
    evictable = sum(node.num_pages for node in nodes if not node.locks)
    protected = sum(node.num_pages for node in nodes if node.locks)
    if tree.evictable_pages != evictable:
        found.append(f"evictable_pages is {tree.evictable_pages}, the nodes hold {evictable}")
    if tree.protected_pages != protected:
        found.append(f"protected_pages is {tree.protected_pages}, the nodes hold {protected}")
    known = tree.num_nodes
    if known != len(nodes):
        found.append(f"{known} ids are registered for {len(nodes)} nodes")
    filed = Counter(node.id for node in leaves.leaves())
    for node in nodes:
        if filed[node.id] != node.is_leaf:
            found.append(f"node {node.id} is_leaf={node.is_leaf} but stands {filed[node.id]} times in the queue")
        elif node.is_leaf and leaves.order.key(node) < node.queued:
            found.append(f"node {node.id} is filed as less urgent than it is: {node.queued}")
    strays = sorted(set(filed) - {node.id for node in nodes})
    if strays:
        found.append(f"the queue offers nodes that are not in the tree: {strays}")
    return found


def _about_node(tree: RadixTree, node: Node) -> list[str]:
    geometry, parent, name = tree.geometry, node.parent, f"node {node.id}"
    found: list[str] = []
    try:
        if tree.node(node.id) is not node:
            found.append(f"{name}'s id leads to another node")
    except UnknownNodeError:
        found.append(f"{name} is in the tree but its id is unknown")
    if parent is None:
        return [*found, f"{name} has no parent"]
    if node.num_pages < 1:
        found.append(f"{name} holds no page")
    if len(node.tokens) != node.num_pages * geometry.key_bytes_per_page:
        found.append(f"{name} has {len(node.tokens)} key bytes for {node.num_pages} pages")
    if len(node.payload) != geometry.slots(node.num_pages):
        found.append(f"{name} has a payload of {len(node.payload)} slots for {node.num_pages} pages")
    if node.labels is not None and len(node.labels) != node.num_pages:
        found.append(f"{name} has {len(node.labels)} labels for {node.num_pages} pages")
    if node.start != parent.start + parent.num_pages:
        found.append(f"{name} starts at page {node.start}, its parent ends at {parent.start + parent.num_pages}")
    if node.branch < node.start + node.num_pages:
        found.append(f"{name} ends beyond its branch of {node.branch} pages")
    if parent is not tree.root and node.namespace != parent.namespace:
        found.append(f"{name} is in namespace {node.namespace}, its parent in {parent.namespace}")
    if parent.children.get(tree.child_key(node)) is not node:
        found.append(f"{name} is not where its parent {parent.id} would look for it")
    below = sum(child.locks for child in node.children.values())
    if node.held < 0 or node.locks != node.held + below:
        found.append(f"{name} counts {node.locks} locks, but {node.held} were taken here and {below} below")
    return found
