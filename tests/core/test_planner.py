from radix_pages.planner import Eviction, Plan, plan_pages
from radix_pages.units import Span
from tests.core.drawing import LetterTree


def test_of_the_last_leaf_only_the_tail_pages_that_are_needed_go():
    t = LetterTree(page_size=2)
    a = t.insert("abcdef").node
    b = t.insert("uvwxyz").node
    assert plan_pages(t.leaves, 4) == Plan((Eviction(a, Span(0, 3)), Eviction(b, Span(2, 3))), shortfall_pages=0)


def test_a_plan_changes_nothing():
    t = LetterTree()
    t.insert("abcd")
    t.insert("xy")
    before = t.drawing()
    assert plan_pages(t.leaves, 5) == plan_pages(t.leaves, 5)
    assert t.drawing() == before


def test_what_cannot_be_found_is_the_plans_shortfall():
    t = LetterTree()
    t.tree.lock(t.insert("abc").node.id)
    leaf = t.insert("xy").node
    assert plan_pages(t.leaves, 5) == Plan((Eviction(leaf, Span(0, 2)),), shortfall_pages=3)


def test_nothing_needed_is_an_empty_plan():
    t = LetterTree()
    t.insert("abc")
    assert plan_pages(t.leaves, 0) == Plan((), shortfall_pages=0)


def test_a_locked_parent_stays_when_its_children_go():
    t = LetterTree()
    above = t.insert("ab").node
    t.tree.lock(above.id)
    leaf = t.insert("abcd").node
    assert plan_pages(t.leaves, 4) == Plan((Eviction(leaf, Span(0, 2)),), shortfall_pages=2)


def test_a_parent_with_one_child_left_is_not_a_candidate():
    t = LetterTree()
    t.insert("ab")
    old, new = t.insert("abcd").node, t.insert("abxy").node
    t.tree.lock(new.id)
    assert plan_pages(t.leaves, 9).evictions == (Eviction(old, Span(0, 2)),)


def test_a_deep_chain_is_planned_from_its_end_to_its_start():
    t = LetterTree()
    nodes = [t.insert("abcde"[: n + 1]).node for n in range(5)]
    plan = plan_pages(t.leaves, 5)
    assert plan.evictions == tuple(Eviction(node, Span(0, 1)) for node in reversed(nodes))
    assert plan.num_pages == 5
