"""Frame plans. A drawing has a word for each frame and a letter for each page: `.` is free, `#` is held outside the
tree (the first is the padding page), and all pages of one small letter are a node's, in the order of its tokens.
Later letters are younger; `below` says which node hangs under which."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_pages.check import disagreements
from radix_pages.frame_planner import CachedPages, FreeFrames, HeldFrames, plan_frames
from radix_pages.frame_search import Prices
from radix_pages.ledger import Ledger, LedgerError
from radix_pages.order import LeafQueue, make_order
from radix_pages.planner import cheapest_tails
from radix_pages.reclaim import reclaim
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry


def pages_of(nodes):
    return np.concatenate([node.payload for node in nodes])


class Pool:
    """Tree, queue and ledger as drawn. A page's token is its number, so that a node tells where its pages were."""

    def __init__(self, frames, below=(), locked="", order="lru"):
        words = frames.split()
        letters = "".join(words)
        self.geometry = Geometry(1, 8, len(words[0]))
        self.leaves = LeafQueue(make_order(order))
        self.tree = RadixTree(self.geometry, np.copy, self.leaves)
        self.ledger = Ledger(self.geometry, len(letters) - 1)
        self.outside = [page for page, letter in enumerate(letters) if letter == "#" and page]
        self.letter_of = dict(enumerate(letters))
        self.content = np.arange(len(letters))
        self.nodes, paths, below = {}, {"": np.zeros(0, dtype=np.int64)}, dict(below)
        for letter in sorted(set(letters) - {"#", "."}):
            own = [page for page, other in self.letter_of.items() if other == letter]
            paths[letter] = np.concatenate((paths[below.get(letter, "")], own)).astype(np.int64)
            self.insert(letter, paths[letter])
        for letter in locked:
            self.tree.lock(self.nodes[letter].id)
        self.ledger.hold(np.array([page for page in self.letter_of if page and letters[page] != "."], dtype=np.int64))

    def insert(self, letter, path):
        self.nodes[letter] = self.tree.insert(path.tobytes(), path).node

    def plan(self, need, **prices):
        return plan_frames(self.leaves, self.ledger, need, pages_of, Prices(**prices))

    def evicted(self, plan):
        """The letter of each page that goes, in order."""
        spans = [(one.leaf.payload, one.span) for one in plan.evictions]
        return "".join(self.letter_of[page] for payload, span in spans for page in payload[span.start : span.stop])

    def carry_out(self, plan):
        """Evict and move. Afterwards every page of the tree must be where its content was moved to."""
        for removal in reclaim(self.tree, plan):
            self.ledger.release(removal.payload)
        self.ledger.hold(plan.targets)
        self.content[plan.targets] = self.content[plan.sources]
        target_of = np.arange(self.ledger.num_pages + 1)
        target_of[plan.sources] = plan.targets
        for node in plan.movers:
            node.payload = target_of[node.payload]
        self.ledger.release(plan.sources)
        for node in self.tree.nodes():
            assert self.content[node.payload].tolist() == np.frombuffer(node.tokens, dtype=np.int64).tolist()
        return self.drawing()

    def drawing(self):
        held = dict.fromkeys((0, *self.outside), "#")
        for node in self.tree.nodes():
            tokens = np.frombuffer(node.tokens, dtype=np.int64).tolist()
            held |= {page: self.letter_of[token] for page, token in zip(node.payload.tolist(), tokens, strict=True)}
        assert sorted(held) == np.flatnonzero(self.ledger.is_held).tolist()
        firsts = [self.geometry.first_page(frame) for frame in range(self.ledger.num_frames)]
        letters = "".join(held.get(page, ".") for page in range(self.ledger.num_pages + 1))
        return " ".join(letters[first : self.geometry.first_page(frame + 1)] for frame, first in enumerate(firsts))


def moves(plan):
    return list(zip(plan.sources.tolist(), plan.targets.tolist(), strict=True))


# -- moves --


def test_with_enough_holes_nothing_is_evicted_and_the_emptiest_frames_come_free():
    p = Pool("#### aab. c... dd.. ee..")
    plan = p.plan(FreeFrames(2))
    assert (plan.evictions, plan.frames.tolist(), plan.shortfall_frames) == ((), [2, 3], 0)
    assert p.carry_out(plan) == "#### aabc .... .... eedd"


def test_moves_fill_the_fullest_frames_first():
    p = Pool("#### aab. c... dd..")
    plan = p.plan(FreeFrames(1))
    assert moves(plan) == [(8, 7)]
    assert p.carry_out(plan) == "#### aabc .... dd.."


def test_frames_with_pages_that_cannot_move_stay_and_their_holes_are_filled_first():
    p = Pool("#### aaa. #... b... cc..", locked="b")
    plan = p.plan(FreeFrames(1))
    assert p.carry_out(plan) == "#### aaa. #cc. b... ...."


def test_frame_0_stays_and_its_holes_are_filled_like_those_of_locked_frames():
    p = Pool("#... aaa. b...")
    assert p.carry_out(p.plan(HeldFrames(2))) == "#b.. aaa. ...."
    plan = p.plan(HeldFrames(0))
    assert plan.shortfall_frames == 1
    assert p.carry_out(plan) == "#baa .... ...."


def test_the_pages_of_the_emptiest_frame_move_first_and_those_of_a_frame_together():
    p = Pool("#....... aba..... b.......")
    plan = p.plan(FreeFrames(2))
    assert moves(plan) == [(16, 1), (8, 2), (9, 3), (10, 4)]
    assert {p.letter_of[node.payload[0]] for node in plan.movers} == {"a", "b"}


def test_only_nodes_with_a_page_that_moves_are_movers():
    p = Pool("#### aab. c...")
    assert p.plan(FreeFrames(1)).movers == (p.nodes["c"],)


# -- evictions --


def test_without_holes_the_oldest_pages_go_and_the_others_take_their_places():
    p = Pool("#### bcde afgh ijkl")
    plan = p.plan(FreeFrames(1))
    assert p.evicted(plan) == "abcd"
    assert p.carry_out(plan) == "#### .... efgh ijkl"
    assert plan.cost == pytest.approx(1 + 2 + 3 + 4 + 0.1)


def test_only_as_many_pages_go_as_holes_are_missing():
    p = Pool("#### bbbb aaaa c.c.")
    plan = p.plan(FreeFrames(1))
    assert p.evicted(plan) == "aa"
    assert p.carry_out(plan) == "#### bbbb .... caca"


def test_of_the_last_leaf_only_the_tail_goes():
    p = Pool("#### abab cdcd")
    plan = p.plan(FreeFrames(1))
    assert [(one.leaf, one.span.start, one.span.stop) for one in plan.evictions] == [
        (p.nodes["a"], 0, 2),
        (p.nodes["b"], 0, 2),
    ]
    p = Pool("#### aaaa aaaa")
    plan = p.plan(FreeFrames(1))
    assert [(one.leaf, one.span.start, one.span.stop) for one in plan.evictions] == [(p.nodes["a"], 4, 8)]
    assert p.carry_out(plan) == "#### aaaa ...."


def test_children_go_before_their_parents():
    p = Pool("#### abcd efgh", below={"b": "a", "c": "b", "d": "c"})
    assert p.evicted(p.plan(FreeFrames(2))) == "dcbaefgh"
    assert p.evicted(p.plan(FreeFrames(1))) == "dcba"


def test_a_parent_is_worth_what_hangs_below_it_even_when_its_own_key_is_lower():
    p = Pool("#### adbc", below={"d": "a"}, order="fifo")
    assert p.evicted(p.plan(CachedPages(2))) == "bc"


def test_what_is_rarer_goes_first_under_lfu():
    p = Pool("#### ab", order="lfu")
    p.insert("a", np.array([4]))
    assert p.evicted(p.plan(CachedPages(1))) == "b"


def test_a_page_that_goes_from_an_emptied_frame_saves_its_move():
    p = Pool("#### cdef aabb ghij")
    plan = p.plan(FreeFrames(1))
    assert (p.evicted(plan), moves(plan), plan.frames.tolist()) == ("aabb", [], [2])


def test_a_page_dearer_to_move_than_to_evict_is_evicted():
    p = Pool("#### a... bb..")
    assert p.evicted(p.plan(FreeFrames(1), move=0.5)) == ""
    assert p.evicted(p.plan(FreeFrames(1), move=1.5)) == "a"


def test_when_holes_are_scarce_a_short_last_frame_is_worth_emptying():
    p = Pool("#### abcd efgh ij")
    plan = p.plan(FreeFrames(1))
    assert (p.evicted(plan), plan.frames.tolist()) == ("ab", [3])
    assert p.carry_out(plan) == "#### ijcd efgh .."


# -- needs --


def test_case_c5_with_moves():
    """256 one-page leaves in slot order, frames of 8, every 8th touched: keep those 32 and 28 frames come free."""
    letters = "".join(chr(0x100 + n) for n in range(256))
    p = Pool(" ".join(("#" + letters)[start : start + 8] for start in range(0, 257, 8)))
    touched = [p.nodes[letter] for letter in letters[::8]]
    for node in touched:
        p.tree.match(node.tokens)
    plan = p.plan(CachedPages(32))
    assert (plan.num_pages, len(plan.frames), plan.shortfall_frames) == (224, 28, 0)
    assert p.carry_out(plan).split().count("........") == 27  # and the last frame, which has one page only
    assert all(p.tree.find(node.tokens).node is node for node in touched)


def test_a_cap_keeps_the_youngest_pages_and_packs_them():
    p = Pool("#### a.b. c.d. e...")
    assert p.carry_out(p.plan(CachedPages(4))) == "#### .... cbde ...."


def test_a_cap_above_what_is_cached_only_packs():
    p = Pool("#### a.b. c.d. e...")
    plan = p.plan(CachedPages(9))
    assert (plan.evictions, len(plan.frames)) == ((), 1)
    assert p.ledger.num_held_frames - 1 == max(1, p.ledger.geometry.frames_to_hold(p.ledger.num_held + 1))


def test_locked_pages_do_not_count_towards_a_cap():
    p = Pool("#### aabb", locked="b")
    assert p.evicted(p.plan(CachedPages(1))) == "a"


def test_a_ceiling_counts_every_frame_that_holds_a_page():
    p = Pool("#... aaaa bbbb cccc")
    assert p.plan(HeldFrames(4)).frames.tolist() == []
    plan = p.plan(HeldFrames(2))
    assert (p.evicted(plan), len(plan.frames)) == ("aaaab", 2)


def test_returned_frames_do_not_count_as_free_and_nothing_moves_into_them():
    p = Pool("#... a... .... ....")
    p.ledger.mark_returned(np.array([2]))
    assert p.plan(FreeFrames(1)).frames.tolist() == []
    plan = p.plan(FreeFrames(2))
    assert (plan.frames.tolist(), moves(plan)) == ([1], [(4, 1)])


def test_what_is_out_of_reach_is_the_plans_shortfall():
    p = Pool("#### abcd e#.. ffff", locked="a")
    plan = p.plan(FreeFrames(3))
    assert (plan.frames.tolist(), plan.shortfall_frames) == ([3], 2)
    assert p.carry_out(plan) == "#### affd e#ff ...."


def test_a_parent_of_a_locked_leaf_stays():
    p = Pool("#### aaaa bbbb", below={"b": "a"}, locked="b")
    assert p.plan(FreeFrames(1)).shortfall_frames == 1


def test_nothing_to_do_is_an_empty_plan():
    p = Pool("#### aa.. ....")
    for need in (FreeFrames(1), HeldFrames(2), CachedPages(2), FreeFrames(0)):
        plan = p.plan(need)
        assert (plan.evictions, moves(plan), plan.frames.tolist(), plan.cost) == ((), [], [], 0.0)
    empty = Pool("#### ....")
    assert empty.plan(FreeFrames(2)).shortfall_frames == 1


def test_a_plan_changes_nothing_and_comes_out_the_same_again():
    p = Pool("#### bcde afgh .jkl", below={"c": "b"})
    before = p.drawing()
    once, again = p.plan(FreeFrames(1)), p.plan(FreeFrames(1))
    assert (p.evicted(once), moves(once), once.cost) == (p.evicted(again), moves(again), again.cost)
    assert p.drawing() == before
    assert disagreements(p.tree, p.leaves) == []


def test_a_page_that_nobody_holds_is_an_error_that_names_it():
    p = Pool("#### aab.")
    p.ledger.release(np.array([5]))
    with pytest.raises(LedgerError, match=r"pages \[5\] of the tree are not held"):
        p.plan(FreeFrames(1))


# -- against everything there is --

LETTERS = "abcdefgh"


@st.composite
def pools(draw):
    """At most 23 pages in frames of 2 to 4, up to eight nodes."""
    per_frame = draw(st.integers(2, 4))
    letters = draw(st.text(alphabet=LETTERS + "..#", min_size=per_frame, max_size=23))
    text = "#" + letters
    words = [text[start : start + per_frame] for start in range(0, len(text), per_frame)]
    named = sorted(set(letters) - {"#", "."})
    below = {}
    for place, letter in enumerate(named[1:], 1):
        if draw(st.booleans()):
            below[letter] = draw(st.sampled_from(named[:place]))
    locked = "".join(letter for letter in named if draw(st.integers(0, 5)) == 0)
    pool = Pool(" ".join(words), below, locked, draw(st.sampled_from(["lru", "fifo", "filo", "mru"])))
    return pool


NEEDS = st.one_of(
    st.builds(FreeFrames, st.integers(0, 9)),
    st.builds(HeldFrames, st.integers(0, 9)),
    st.builds(CachedPages, st.integers(0, 20)),
)
PRICES = st.sampled_from([{}, {"move": 1.0}, {"move": 5.0, "later": 0.25}, {"move": 0.5, "first": 0.0, "later": 0.0}])


@given(pools(), NEEDS, PRICES)
def test_a_plan_does_what_it_says(pool, need, prices):
    ledger, tree = pool.ledger, pool.tree
    plan = pool.plan(need, **prices)
    movable = {page for node in tree.nodes() if not node.locks for page in node.payload.tolist()}
    fixed = set(np.flatnonzero(ledger.is_held).tolist()) - movable
    can_empty = {ledger.geometry.frame_of(page) for page in movable} - {
        ledger.geometry.frame_of(page) for page in fixed
    }
    empty_before = set(np.flatnonzero(ledger.occupancy == 0).tolist())
    num_held_frames, cost = ledger.num_held_frames, cost_of(pool, plan, **prices)
    num_holes = int((ledger.sizes - ledger.occupancy)[ledger.occupancy > 0].sum())

    sources, targets = plan.sources.tolist(), plan.targets.tolist()
    assert len(set(sources)) == len(sources) == len(set(targets)) == len(targets)
    assert movable.issuperset(sources)
    assert {ledger.geometry.frame_of(page) for page in sources}.issubset(plan.frames.tolist())
    assert not {ledger.geometry.frame_of(page) for page in targets} & (empty_before | set(plan.frames.tolist()))
    for one in plan.evictions:
        assert one.span.stop == one.leaf.num_pages

    pool.carry_out(plan)
    assert disagreements(tree, pool.leaves) == []
    empty = set(np.flatnonzero(ledger.occupancy == 0).tolist())
    assert empty == empty_before | set(plan.frames.tolist())
    assert plan.cost == pytest.approx(cost)
    match need:
        case FreeFrames(asked):
            missing = max(asked - len(empty_before), 0)
        case HeldFrames(asked):
            missing = max(num_held_frames - asked, 0)
        case CachedPages(kept):
            assert tree.evictable_pages <= kept
            room = np.cumsum(np.sort(ledger.sizes[sorted(can_empty)]))
            missing = int(np.count_nonzero(room <= num_holes + max(len(movable) - kept, 0)))
    assert plan.shortfall_frames == max(missing - len(can_empty), 0)
    assert len(plan.frames) >= min(missing, len(can_empty))


def ranks_of(pool):
    """The rank of each node that no lock protects."""
    nodes = [node for node in pool.tree.nodes() if not node.locks]
    raised = {node.id: pool.leaves.order.key(node) for node in nodes}
    for node in reversed(nodes):
        if node.parent.id in raised:
            raised[node.parent.id] = max(raised[node.parent.id], raised[node.id])
    rank_of = {key: rank for rank, key in enumerate(sorted(set(raised.values())))}
    return {node_id: rank_of[key] for node_id, key in raised.items()}


def cost_of(pool, plan, move=0.1, first=1.0, later=1.0):
    ranks = ranks_of(pool)
    evicted = sum((first + later * ranks[one.leaf.id]) * len(one.span) for one in plan.evictions)
    return evicted + move * len(plan.sources)


def least_cost(pool, num_frames, move=0.1, first=1.0, later=1.0):
    """The least cost of emptying so many frames, by trying every way to cut nodes short."""
    ledger, ranks = pool.ledger, ranks_of(pool)
    nodes = [node for node in pool.tree.nodes() if not node.locks]
    movable = np.bincount(ledger.geometry.frame_of(pages_of(nodes)), minlength=ledger.num_frames)
    can_empty = np.flatnonzero((ledger.occupancy > 0) & (ledger.occupancy == movable))
    num_holes = int((ledger.sizes - ledger.occupancy)[ledger.occupancy > 0].sum())
    least = np.inf
    for cuts in itertools.product(*(range(node.num_pages + 1) for node in nodes)):
        kept = {node.id: cut for node, cut in zip(nodes, cuts, strict=True)}
        if any(kept[node.id] and kept.get(node.parent.id, 99) < node.parent.num_pages for node in nodes):
            continue
        occupancy = ledger.occupancy.astype(np.int64)
        value = 0.0
        for node in nodes:
            gone = node.payload[kept[node.id] :]
            np.subtract.at(occupancy, ledger.geometry.frame_of(gone), 1)
            value += (first + later * ranks[node.id]) * len(gone)
        evicted = sum(node.num_pages for node in nodes) - sum(cuts)
        for emptied in itertools.combinations(can_empty.tolist(), num_frames):
            if evicted >= int(ledger.sizes[list(emptied)].sum()) - num_holes:
                least = min(least, value + move * int(occupancy[list(emptied)].sum()))
    return least


def test_plans_of_small_pools_cost_about_as_little_as_any_plan():
    rng = random.Random(0)
    ratios = []
    while len(ratios) < 120:
        per_frame = rng.choice((2, 3))
        text = "#" + "".join(rng.choice("abcdef.") for _ in range(rng.randrange(per_frame, 11)))
        words = [text[start : start + per_frame] for start in range(0, len(text), per_frame)]
        named = sorted(set(text) - {"#", "."})
        below = {one: rng.choice(named[:n]) for n, one in enumerate(named) if n and rng.random() < 0.4}
        prices = rng.choice(({}, {"move": 0.5}, {"move": 2.0}, {"move": 4.0, "later": 0.25}))
        pool = Pool(" ".join(words), below, order=rng.choice(("lru", "fifo", "mru")))
        num_held_frames = pool.ledger.num_held_frames
        if not named or num_held_frames < 2:
            continue
        num_frames = rng.randrange(1, num_held_frames)
        cost = pool.plan(HeldFrames(num_held_frames - num_frames), **prices).cost
        least = least_cost(pool, num_frames, **prices)
        assert cost >= least - 1e-9
        ratios.append(cost / least)
    assert max(ratios) <= 1.25
    assert sum(ratios) / len(ratios) <= 1.02


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.data())
def test_the_cheapest_tails_are_the_cheapest_of_all(lengths, data):
    pool = Pool("#.")
    place = st.integers(0, 99)
    parents = [data.draw(place) % (n + 1) - 1 for n in range(len(lengths))]  # -1: below the root
    paths, nodes, token = [], [], itertools.count()
    for parent, length in zip(parents, lengths, strict=True):
        above = [] if parent < 0 else paths[parent]
        paths.append([*above, *itertools.islice(token, length)])
        path = np.array(paths[-1], dtype=np.int64)
        nodes.append(pool.tree.insert(path.tobytes(), path).node)
    nodes, parents = nodes[::-1], [len(nodes) - 1 - parent if parent >= 0 else -1 for parent in parents[::-1]]
    lengths = [node.num_pages for node in nodes]
    weights = np.array(data.draw(st.lists(st.integers(-3, 9), min_size=sum(lengths), max_size=sum(lengths))), float)
    at_least = data.draw(st.integers(0, sum(lengths)))
    starts = np.cumsum([0, *lengths])

    def weight(lost):
        return sum(weights[start : start + count].sum() for start, count in zip(starts, lost, strict=False))

    def is_allowed(lost):
        below = [(parent, place) for place, parent in enumerate(parents) if parent >= 0]
        whole = all(not lost[parent] or lost[place] == lengths[place] for parent, place in below)
        return whole and sum(lost) >= at_least

    every = itertools.product(*(range(length + 1) for length in lengths))
    found = cheapest_tails(nodes, lengths, weights, at_least)
    assert is_allowed(found)
    assert weight(found) == min(weight(lost) for lost in every if is_allowed(lost))
