import pytest

from radix_pages.check import disagreements
from tests.core.drawing import LetterTree


def grown():
    t = LetterTree()
    t.insert("ab")
    t.insert("abcd")
    leaf = t.insert("xy").node
    t.tree.lock(leaf.id)
    return t, leaf


def test_a_sound_tree_has_no_disagreement():
    t, _ = grown()
    assert disagreements(t.tree, t.leaves) == []


PLANTED = {
    "evictable_pages is 5, the nodes hold 4": lambda t, leaf: setattr(t.tree, "evictable_pages", 5),
    "protected_pages is 1, the nodes hold 2": lambda t, leaf: setattr(t.tree, "protected_pages", 1),
    "counts 1 locks, but 0 were taken here": lambda t, leaf: setattr(leaf, "held", 0),
    "has a payload of 1 slots for 2 pages": lambda t, leaf: setattr(leaf, "payload", [7]),
    "has 1 key bytes for 2 pages": lambda t, leaf: setattr(leaf, "tokens", b"x"),
    "has 1 labels for 2 pages": lambda t, leaf: setattr(leaf, "labels", ["one"]),
    "starts at page 9": lambda t, leaf: setattr(leaf, "start", 9),
    "ends beyond its branch of 1 pages": lambda t, leaf: setattr(leaf, "branch", 1),
    "its id is unknown": lambda t, leaf: t.tree._nodes.pop(leaf.id),
    "is not where its parent": lambda t, leaf: t.tree.root.children.update({b"z": t.tree.root.children.pop(b"x")}),
    "is_leaf=True but stands 0 times in the queue": lambda t, leaf: t.leaves.clear(),
    "is filed as less urgent than it is": lambda t, leaf: setattr(t.leaves.leaves()[0], "tick", 0),
    "ids are registered for 3 nodes": lambda t, leaf: t.tree._nodes.update({99: leaf}),
    "is in namespace": lambda t, leaf: setattr(
        next(iter(t.match("abcd").node.parent.children.values())), "namespace", 1
    ),
}


@pytest.mark.parametrize("sentence", PLANTED)
def test_every_planted_fault_is_named(sentence):
    t, leaf = grown()
    PLANTED[sentence](t, leaf)
    assert any(sentence in found for found in disagreements(t.tree, t.leaves))


def test_all_disagreements_are_listed_and_not_only_the_first():
    t, leaf = grown()
    t.tree.evictable_pages += 1
    leaf.held += 1
    assert len(disagreements(t.tree, t.leaves)) == 2
