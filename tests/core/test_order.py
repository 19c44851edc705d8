import pytest

from radix_pages.order import ORDER_NAMES, make_order
from radix_pages.planner import plan_pages
from radix_pages.reclaim import reclaim
from tests.core.drawing import LetterTree


def tree_with(order, **parameters):
    """Three leaves of one page: a, b, c, in the order they came."""
    t = LetterTree(order=order, **parameters)
    for letter in "abc":
        t.insert(letter)
    return t


def test_lru_evicts_the_least_recently_used():
    t = tree_with("lru")
    t.match("a")
    assert t.evict(3) == ["b", "c", "a"]


def test_mru_evicts_the_most_recently_used_also_after_a_late_access():
    t = tree_with("mru")
    t.match("a")
    assert t.evict(3) == ["a", "c", "b"]


def test_fifo_evicts_the_oldest_whatever_was_used_since():
    t = tree_with("fifo")
    t.match("a")
    assert t.evict(3) == ["a", "b", "c"]


def test_filo_evicts_the_youngest_whatever_was_used_since():
    t = tree_with("filo")
    t.match("a")
    assert t.evict(3) == ["c", "b", "a"]


def test_lfu_evicts_the_least_often_inserted_then_the_oldest():
    t = tree_with("lfu")
    t.insert("a")
    assert t.evict(3) == ["b", "c", "a"]


def test_slru_protects_what_reached_the_threshold():
    t = tree_with("slru", protected_threshold=3)
    for letter in "aab":
        t.insert(letter)
    assert t.evict(3) == ["c", "b", "a"]


def test_priority_evicts_the_least_important_then_the_oldest():
    t = LetterTree(order="priority")
    t.insert("a", priority=2)
    t.insert("b", priority=1)
    t.insert("c", priority=1)
    assert t.evict(3) == ["b", "c", "a"]


def test_tlru_first_evicts_what_lies_beyond_the_budget_of_its_conversation():
    """threshold 4, estimate 1: a conversation of 6 tokens needs 3 of them; what starts at 3 or later goes first."""
    t = LetterTree(order="tlru", threshold=4, next_prompt_estimate=1)
    t.insert("uvwxyz")
    t.insert("abc")
    t.insert("abcdef")
    t.match("abcdef")
    assert t.evict(3) == ["def"]
    assert t.evict(6) == ["uvwxyz"]


def test_tlru_sees_a_suffix_that_a_split_moved_beyond_the_budget():
    t = LetterTree(order="tlru", threshold=4, next_prompt_estimate=1)
    t.insert("uvwxyz")
    t.insert("abcdef")
    t.match("abcd")
    assert t.evict(2) == ["ef"]


def test_a_parent_takes_its_place_in_the_order_when_its_last_child_is_chosen():
    t = LetterTree()
    t.insert("ab")
    t.insert("abcd")
    t.insert("abxy")
    t.insert("z")
    t.match("abcd")
    assert t.evict(7) == ["xy", "z", "cd", "ab"]


def test_a_trimmed_leaf_keeps_its_place():
    t = LetterTree()
    t.insert("abcd")
    t.insert("z")
    assert t.evict(1) == ["d"]
    assert t.evict(4) == ["abc", "z"]


def test_an_unlocked_leaf_stands_where_its_last_access_puts_it():
    t = tree_with("lru")
    leaf = t.match("b").node
    t.tree.lock(leaf.id)
    assert t.evict(1) == ["a"]
    t.insert("d")
    t.tree.unlock(leaf.id)
    assert t.evict(3) == ["c", "b", "d"]


@pytest.mark.parametrize("order", ORDER_NAMES)
def test_locked_leaves_are_never_chosen(order):
    t = tree_with(order)
    t.tree.lock(t.match("b").node.id)
    assert sorted(t.evict(9)) == ["a", "c"]


@pytest.mark.parametrize("order", ORDER_NAMES)
def test_a_leaf_evicted_and_inserted_again_for_ever_leaves_no_litter(order):
    t = tree_with(order)
    for _ in range(2000):
        t.match("a")
        t.evict(1)
        t.insert("abc"[len(t.drawing()) - 2])
    assert len(t.leaves._heap) < 300


def test_removing_leaves_past_the_queue_leaves_no_litter():
    t = tree_with("lru")
    for _ in range(2000):
        t.tree.remove(t.insert("x").node)
    assert len(t.leaves._heap) < 200


def test_a_walk_looks_at_what_it_returns_and_not_at_the_whole_queue():
    looked = []
    for num_leaves in (100, 10_000):
        t = LetterTree(page_size=8)
        for i in range(num_leaves):
            t.insert(f"{i:08d}")
        calls = 0
        key = t.leaves.order.key

        def counting(node, key=key):
            nonlocal calls
            calls += 1
            return key(node)

        t.leaves.order.key = counting
        reclaim(t.tree, plan_pages(t.leaves, 8))
        looked.append(calls)
    assert looked[0] == looked[1] < 40


def test_an_unknown_order_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown eviction policy 'random'; choose one of lru, lfu, slru"):
        make_order("random")


def test_the_name_of_an_order_may_be_in_any_case():
    assert make_order("SLRU").name == "slru"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("lru", {"threshold": 3}, "'lru' has no parameter 'threshold'; it takes none"),
        ("slru", {"treshold": 3}, "'slru' has no parameter 'treshold'; it takes protected_threshold"),
        ("tlru", {"threshold": "3"}, "'tlru': threshold must be a number, got '3'"),
        ("slru", {"protected_threshold": True}, "protected_threshold must be a number, got True"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        make_order(name, parameters)


def test_a_leaf_accessed_for_ever_leaves_no_litter():
    t = tree_with("mru")
    for _ in range(2000):
        t.match("a")
    assert len(t.leaves._heap) < 200
