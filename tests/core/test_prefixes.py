"""Which prefixes the tree's sequences share. A letter is a token; a page holds two of them."""

from __future__ import annotations

from radix_pages.prefixes import SharedPrefix, SharedPrefixes, shared_prefixes
from tests.core.drawing import LetterTree


def found(tree: LetterTree, count: int = 10, most_nodes: int = 1_000) -> SharedPrefixes:
    return shared_prefixes(tree.tree.root, count, most_nodes)


def grown(*keys: str, page_size: int = 2) -> LetterTree:
    tree = LetterTree(page_size)
    for key in keys:
        tree.insert(key)
    return tree


def test_a_prefix_is_shared_where_two_sequences_part():
    tree = grown("aabbcc", "aabbdd", "aabbee")
    only = SharedPrefix(num_pages=2, own_pages=2, children=3, leaves=3, locks=0, hits=3)
    assert found(tree) == SharedPrefixes((only,), is_complete=True)
    assert only.spared_pages == 4


def test_sequences_that_share_nothing_or_continue_one_another_share_no_prefix():
    assert found(grown("aabb", "ccdd")).largest == ()
    assert found(grown("aa", "aabb", "aabbcc")).largest == ()


def test_an_empty_tree_shares_nothing():
    assert found(LetterTree()) == SharedPrefixes((), is_complete=True)


def test_a_prefix_of_several_nodes_is_one_prefix():
    tree = grown("aa", "aaaa", "aaaabbcc", "aaaabbdd")
    assert len(tree.tree.path(tree.match("aaaabbcc").node)) == 4
    (prefix,) = found(tree).largest
    assert (prefix.num_pages, prefix.own_pages, prefix.leaves) == (3, 3, 2)


def test_of_a_prefix_within_a_longer_one_only_what_comes_after_it_is_its_own():
    tree = grown("aaaabbbbc1", "aaaabbbbd1", "aaaae1", "aaaaf1")
    shorter = SharedPrefix(2, 2, children=3, leaves=4, locks=0, hits=4)
    longer = SharedPrefix(4, 2, children=2, leaves=2, locks=0, hits=2)
    assert found(tree).largest == (shorter, longer)
    assert (shorter.spared_pages, longer.spared_pages) == (6, 2)


def test_the_best_come_first_and_no_more_than_asked_for():
    tree = grown("aaaaaa11", "aaaaaa22", "bb11", "bb22", "bb33", "cccc11", "cccc22")
    spared = [prefix.spared_pages for prefix in found(tree).largest]
    assert spared == [3, 2, 2]
    assert [prefix.num_pages for prefix in found(tree).largest] == [3, 1, 2]  # equals: the one that came first
    assert [prefix.num_pages for prefix in found(tree, count=1).largest] == [3]


def test_locks_and_hits_are_those_of_the_prefix():
    tree = grown("aabb", "aacc")
    first, second = tree.match("aabb").node, tree.match("aacc").node
    for node in (first, first, second):
        tree.tree.lock(node.id)
    (prefix,) = found(tree).largest
    assert (prefix.locks, prefix.hits) == (3, 2)


def test_a_prefix_whose_slots_were_overwritten_is_not_shared_any_more():
    tree = grown("aabb", "aacc")
    node = tree.match("aa").node
    tree.tree.lock(node.id)
    assert len(found(tree).largest) == 1
    tree.tree.mark_overwritten(node)
    assert found(tree).largest == ()


def test_in_a_tree_too_large_to_see_all_of_it_leaves_are_the_least_that_there_can_be():
    """Sixteen sequences follow 'aa', each of which forks once more; the search may visit four nodes."""
    tree = grown(*(f"aa{one}{one}{last}{last}" for one in "bcdefghijklmnopq" for last in "yz"))
    every, some = found(tree), found(tree, most_nodes=4)
    assert every.is_complete
    assert every.largest[0] == SharedPrefix(1, 1, children=16, leaves=32, locks=0, hits=32)
    assert not some.is_complete
    assert 16 <= some.largest[0].leaves <= 32


def test_a_chain_longer_than_the_search_may_go_ends_it():
    tree = grown(*("a" * length for length in range(2, 40, 2)), "a" * 38 + "bb", "a" * 38 + "cc")
    assert found(tree).largest[0].num_pages == 19
    assert found(tree, most_nodes=5) == SharedPrefixes((), is_complete=False)
