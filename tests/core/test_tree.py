import numpy as np
import pytest

from radix_pages.check import disagreements
from radix_pages.order import LeafQueue, make_order
from radix_pages.results import TreeError, UnknownNodeError
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry
from tests.core.drawing import LetterTree


def test_an_insert_into_an_empty_tree_makes_one_leaf_of_whole_pages():
    t = LetterTree(page_size=2)
    done = t.insert("abcde")
    assert t.drawing() == ["abcd [0, 1, 2, 3]"]
    assert (done.matched_pages, done.leaf, done.declined) == (0, done.node, False)


def test_less_than_a_page_is_not_cached():
    t = LetterTree(page_size=4)
    done = t.insert("abc")
    assert t.drawing() == []
    assert (done.node, done.matched_pages, done.leaf) == (t.tree.root, 0, None)


def test_a_match_inside_a_node_splits_it_at_the_page_boundary():
    t = LetterTree(page_size=2)
    t.insert("abcdef")
    match = t.match("abcdxx")
    assert t.drawing() == ["abcd [0, 1, 2, 3]", "abcd|ef [4, 5]"]
    assert (match.num_pages, match.node.tokens) == (2, b"abcd")


def test_pages_that_differ_in_their_last_token_share_nothing():
    t = LetterTree(page_size=4)
    t.insert("abcd")
    t.insert("abce")
    assert t.drawing() == ["abcd [0, 1, 2, 3]", "abce [4, 5, 6, 7]"]


def test_an_insert_keeps_the_slots_that_are_there_and_adds_the_rest():
    t = LetterTree(page_size=2)
    t.insert("abcd")
    done = t.insert("abcxyz")
    assert t.drawing() == ["ab [0, 1]", "ab|cd [2, 3]", "ab|cxyz [6, 7, 8, 9]"]
    assert done.matched_pages == 1


@pytest.mark.parametrize("shared", range(1, 40))
def test_the_shared_prefix_is_found_at_every_length(shared):
    t = LetterTree()
    t.insert("a" * 40)
    assert t.match("a" * shared + "b" * 9).num_pages == shared
    assert t.cached("a" * 40) == 40


def test_find_changes_nothing_even_when_it_ends_inside_a_node():
    t = LetterTree(page_size=2)
    t.insert("abcdef")
    before, tick = t.drawing(), t.tree.tick
    match = t.tree.find(b"abcd??")
    assert (t.drawing(), t.tree.tick) == (before, tick)
    assert (match.num_pages, match.node.num_pages) == (2, 3)


def test_namespaces_are_compared_as_pairs_and_never_joined():
    t = LetterTree()
    t.insert("xyz", namespace=("ab", "c"))
    assert t.cached("xyz", ("a", "bc")) == 0
    assert t.cached("xyz", ("ab", "c")) == 3
    assert t.cached("xyz", (None, "abc")) == 0
    assert t.cached("xyz", ("abc", None)) == 0
    assert t.cached("xyz") == 0


def test_an_empty_extra_key_is_not_an_absent_one():
    t = LetterTree()
    t.insert("xyz", namespace=("", None))
    assert t.cached("xyz") == 0


def test_a_split_leaves_the_suffix_recency_creation_and_hits_as_they_were():
    t = LetterTree()
    leaf = t.insert("abcd").node
    t.insert("xyz")
    t.insert("abcd")
    before = (leaf.tick, leaf.created, leaf.hits, leaf.id)
    front = t.match("ab").node
    assert (leaf.tick, leaf.created, leaf.hits, leaf.id) == before
    assert (front.tick, front.created, front.hits) == (t.tree.tick, leaf.created, leaf.hits)


def test_a_split_caused_by_an_insert_leaves_the_suffix_alone_too():
    t = LetterTree()
    leaf = t.insert("abcd").node
    before = (leaf.tick, leaf.created, leaf.hits)
    t.insert("abxy")
    assert (leaf.tick, leaf.created, leaf.hits) == before


def test_a_split_raises_the_priority_of_the_shared_part_only():
    t = LetterTree()
    leaf = t.insert("abcd", priority=1).node
    t.insert("ab", priority=5)
    assert (leaf.priority, leaf.parent.priority) == (1, 5)


def test_a_request_that_inserts_in_chunks_counts_one_hit_a_node():
    t = LetterTree()
    for done in (2, 4, 6):
        t.insert("abcdef"[:done], counted_pages=done - 2)
    assert [node.hits for node in t.tree.nodes()] == [1, 1, 1]


def test_a_second_insert_of_what_was_counted_adds_no_hit():
    t = LetterTree()
    t.insert("abcdef")
    t.insert("abcd", counted_pages=4)
    assert {node.tokens: node.hits for node in t.tree.nodes()} == {b"abcd": 1, b"ef": 1}


def test_a_lock_protects_the_whole_path_and_counts():
    t = LetterTree()
    t.insert("ab")
    leaf = t.insert("abcd").node
    t.insert("abxyz")
    t.tree.lock(leaf.id)
    t.tree.lock(leaf.id)
    assert (t.tree.evictable_pages, t.tree.protected_pages) == (3, 4)
    t.tree.unlock(leaf.id)
    assert (t.tree.evictable_pages, t.tree.protected_pages) == (3, 4)
    t.tree.unlock(leaf.id)
    assert (t.tree.evictable_pages, t.tree.protected_pages) == (7, 0)


def test_a_split_under_a_lock_keeps_both_halves_protected_until_the_one_unlock():
    t = LetterTree()
    leaf = t.insert("abcd").node
    t.tree.lock(leaf.id)
    front = t.match("ab").node
    assert (front.locks, front.held, leaf.locks, leaf.held) == (1, 0, 1, 1)
    t.tree.unlock(leaf.id)
    assert (t.tree.evictable_pages, t.tree.protected_pages) == (4, 0)


def test_a_second_unlock_is_an_error_and_the_sizes_stay_right():
    t = LetterTree()
    leaf = t.insert("abcd").node
    t.tree.lock(leaf.id)
    t.tree.unlock(leaf.id)
    with pytest.raises(TreeError, match=f"node {leaf.id} holds no lock"):
        t.tree.unlock(leaf.id)
    assert (t.tree.evictable_pages, t.tree.protected_pages) == (4, 0)


def test_an_ancestor_cannot_be_unlocked_with_its_descendants_lock():
    t = LetterTree()
    above = t.insert("ab").node
    leaf = t.insert("abcd").node
    t.tree.lock(leaf.id)
    with pytest.raises(TreeError, match=f"node {above.id} holds no lock"):
        t.tree.unlock(above.id)


def test_locking_a_node_that_was_evicted_is_an_error_that_names_it():
    t = LetterTree()
    leaf = t.insert("abcd").node
    t.evict(4)
    with pytest.raises(UnknownNodeError, match=f"node {leaf.id} is not in the tree"):
        t.tree.lock(leaf.id)
    assert (t.tree.evictable_pages, t.tree.protected_pages) == (0, 0)


def test_a_handle_from_before_a_trim_never_passes_for_the_longer_prefix():
    t = LetterTree()
    handle = t.insert("abcdef").node.id
    assert t.evict(2) == ["ef"]
    with pytest.raises(UnknownNodeError):
        t.tree.lock(handle)
    rest = t.match("abcdef")
    assert (rest.num_pages, t.tree.lock(rest.node.id)) == (4, rest.node)


def test_the_root_can_be_locked_and_means_nothing():
    t = LetterTree()
    root = t.tree.root.id
    t.tree.lock(root)
    t.tree.unlock(root)
    assert (t.tree.evictable_pages, t.tree.protected_pages) == (0, 0)


def test_reset_voids_locks_and_never_reuses_ids():
    t = LetterTree()
    leaf = t.insert("abcd").node
    old = {t.tree.root.id, leaf.id}
    t.tree.lock(leaf.id)
    t.tree.reset()
    assert (t.tree.evictable_pages, t.tree.protected_pages, t.drawing()) == (0, 0, [])
    with pytest.raises(UnknownNodeError):
        t.tree.unlock(leaf.id)
    fresh = {t.tree.root.id, t.insert("abcd").node.id}
    assert not old & fresh


@pytest.mark.parametrize("what", ["locked", "parent", "gone"])
def test_only_a_leaf_can_be_removed(what):
    t = LetterTree()
    above = t.insert("ab").node
    leaf = t.insert("abcd").node
    if what == "locked":
        t.tree.lock(leaf.id)
    if what == "gone":
        t.tree.remove(leaf)
    victim, why = {"locked": (leaf, "1 locks"), "parent": (above, "1 children"), "gone": (leaf, "no place")}[what]
    with pytest.raises(TreeError, match=f"node {victim.id} cannot be evicted: it has {why}"):
        t.tree.remove(victim)


@pytest.mark.parametrize("pages", [0, 4, 5])
def test_a_trim_takes_some_pages_and_never_all(pages):
    t = LetterTree()
    leaf = t.insert("abcd").node
    with pytest.raises(TreeError, match=f"cannot trim {pages} of node {leaf.id}'s 4 pages"):
        t.tree.trim(leaf, pages)


def test_what_was_overwritten_is_not_inserted_again():
    t = LetterTree(page_size=2)
    t.insert("abcd")
    done = t.insert("abxyzz", owned_pages=2)
    assert (done.declined, done.matched_pages, done.leaf) == (True, 1, None)
    assert t.cached("abxyzz") == 2


def test_no_node_keeps_the_storage_of_a_longer_one():
    def storage(node):
        payload = node.payload
        return payload.nbytes if payload.base is None else payload.base.nbytes

    leaves = LeafQueue(make_order("lru"))
    tree = RadixTree(Geometry(1), np.copy, leaves)
    tree.insert(np.arange(1024).tobytes(), np.arange(1024))
    for cut in (1000, 500, 100, 20, 4):
        tree.match(np.arange(cut).tobytes())
    assert sorted(storage(node) for node in tree.nodes()) == sorted(8 * n for n in (4, 16, 80, 400, 500, 24))
    tree.trim(max(tree.nodes(), key=lambda node: node.start), 10)
    assert sum(storage(node) for node in tree.nodes()) == 8 * (1024 - 10)


def test_labels_are_cut_with_the_pages_they_belong_to():
    t = LetterTree(page_size=2)
    leaf = t.insert("abcdefgh").node
    leaf.labels = ["ab", "cd", "ef", "gh"]
    front = t.match("ab").node
    removal = t.tree.trim(leaf, 1)
    assert (front.labels, leaf.labels, removal.labels) == (["ab"], ["cd", "ef"], ["gh"])


def overwritten():
    """A request locked `abcd`, then wrote `xy` into the slots of `cd`; somebody else had cached `abcdef`."""
    t = LetterTree(page_size=2)
    handle = t.insert("abcd").node.id
    t.tree.lock(handle)
    t.insert("abcdef")
    assert t.insert("abxy", owned_pages=2).declined
    return t, handle


def test_an_overwritten_span_cannot_be_found_and_goes_with_its_last_lock():
    t, handle = overwritten()
    stale = t.tree.node(handle)
    gone = t.tree.mark_overwritten(stale)
    assert [removal.tokens for removal in gone] == [b"ef"]
    assert (t.cached("abcdef"), t.tree.protected_pages, t.tree.evictable_pages) == (2, 2, 0)
    assert disagreements(t.tree, t.leaves) == []
    assert [removal.payload for removal in t.tree.unlock(handle)] == [[2, 3]]
    assert (t.drawing(), t.tree.protected_pages, t.tree.evictable_pages) == (["ab [0, 1]"], 0, 1)
    assert disagreements(t.tree, t.leaves) == []


def test_new_tokens_can_take_the_place_of_an_overwritten_span_before_it_is_gone():
    t, handle = overwritten()
    t.tree.mark_overwritten(t.tree.node(handle))
    t.insert("abcd")
    assert t.cached("abcd") == 4
    t.tree.unlock(handle)
    assert t.cached("abcd") == 4
    assert disagreements(t.tree, t.leaves) == []


def test_an_overwritten_span_can_no_longer_be_locked():
    t, handle = overwritten()
    t.tree.mark_overwritten(t.tree.node(handle))
    with pytest.raises(TreeError, match=f"node {handle} no longer holds what was matched"):
        t.tree.lock(handle)


def test_spans_overwritten_one_after_the_other_go_with_their_own_last_locks():
    t = LetterTree(page_size=2)
    upper = t.insert("abcd").node.id
    lower = t.insert("abcdef").node.id
    t.tree.lock(upper)
    t.tree.lock(lower)
    assert t.tree.mark_overwritten(t.tree.node(lower)) == []
    assert t.tree.mark_overwritten(t.tree.node(upper)) == []
    assert disagreements(t.tree, t.leaves) == []
    assert [removal.tokens for removal in t.tree.unlock(lower)] == [b"ef"]
    assert [removal.tokens for removal in t.tree.unlock(upper)] == [b"abcd"]
    assert (t.tree.evictable_pages, t.tree.protected_pages, t.drawing()) == (0, 0, [])
