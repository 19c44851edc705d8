"""Moves in slices: whole or not at all, and void as soon as the tree or the ledger is not what was planned for.

Drawings are those of `test_plan_frames`: a word for each frame, a letter for each page; pages of one small letter
are a node's in the order of its tokens, `.` is free, `#` is held by somebody else.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_pages.check import disagreements
from radix_pages.frame_planner import CachedPages, FreeFrames
from radix_pages.ledger import LedgerError
from radix_pages.placement import PLACEMENTS
from radix_pages.reclaim import Moves, reclaim
from tests.core.test_plan_frames import Pool, pages_of

RULES = pytest.mark.parametrize("rule", sorted(PLACEMENTS))
SCATTERED = "#a.a .b.b c.c. .d.d"
"""Eight pages and the padding page's: three frames can hold them."""
KEEP = CachedPages(99)


class Refused(Exception):
    """The mover could not do what it was asked."""


class Recorder:
    """`radix_pages.reclaim.Mover` that copies what a Pool says its pages hold, writes down what it was asked, and
    refuses when told to: the next copy, or the payload of the `refused_node`-th node of a slice."""

    def __init__(self, pool: Pool) -> None:
        self.content = pool.content
        self.copies: list[tuple[list[int], list[int]]] = []
        self.refuses_copy = False
        self.refused_node: int | None = None

    pages_of = staticmethod(pages_of)

    def copy(self, sources, targets) -> None:
        self.copies.append((sources.tolist(), targets.tolist()))
        if self.refuses_copy:
            raise Refused
        self.content[targets] = self.content[sources]

    def repointed(self, payload, sources, targets):
        if self.refused_node is not None:
            self.refused_node -= 1
            if self.refused_node < 0:
                raise Refused
        moved = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        return np.array([moved.get(page, page) for page in payload.tolist()], dtype=np.int64)


class Work:
    """A pool with a plan whose evictions were carried out, and its moves."""

    def __init__(self, drawing: str = SCATTERED, need=KEEP, rule: str = "pack", **options) -> None:
        self.pool = Pool(drawing, **options)
        self.tree, self.ledger = self.pool.tree, self.pool.ledger
        self.placement = PLACEMENTS[rule](self.ledger)
        self.mover = Recorder(self.pool)
        self.plan = self.pool.plan(need)
        for removal in reclaim(self.tree, self.plan):
            self.placement.give(removal.payload)
        self.moves = Moves(self.tree, self.placement, self.mover, self.plan)

    def node(self, letter: str):
        return self.pool.nodes[letter]

    def finish(self, most: int = 1) -> None:
        while not self.moves.is_done:
            self.moves.step(most)

    def facts(self):
        """Everything that somebody could notice, but for the order of free pages."""
        return (
            self.ledger.held_bytes.hex(),
            self.ledger.occupancy.tolist(),
            self.ledger.num_held,
            self.ledger.num_held_frames,
            self.placement.num_free,
            sorted(self.placement.free_pages().tolist()),
            {node.id: node.payload.tolist() for node in self.tree.nodes()},
        )

    def tree_facts(self):
        """What a move may not change in the tree."""
        tree = self.tree
        nodes = [
            (node.id, node.parent.id, node.tokens, node.num_pages, node.tick, node.hits, node.locks, node.priority)
            for node in tree.nodes()
        ]
        return nodes, tree.tick, tree.evictable_pages, tree.protected_pages

    def assert_sound(self) -> None:
        """Every page is owned once, every node finds its content, and the free pages are those that nobody holds."""
        assert disagreements(self.tree, self.pool.leaves) == []
        owned = [0, *self.pool.outside]
        for node in self.tree.nodes():
            assert self.pool.content[node.payload].tolist() == np.frombuffer(node.tokens, dtype=np.int64).tolist()
            owned += node.payload.tolist()
        assert sorted(owned) == np.flatnonzero(self.ledger.is_held).tolist()
        assert len(owned) == len(set(owned)) == self.ledger.num_held + 1
        free = self.placement.free_pages().tolist()
        assert sorted(free) == np.flatnonzero(~self.ledger.is_held).tolist()
        assert self.placement.num_free == len(free)


# all that was planned


@RULES
@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_slices_of_any_size_end_in_the_same_state(most, rule):
    work, whole = Work(rule=rule), Work(rule=rule)
    whole.moves.step(100)
    work.finish(most)
    assert work.facts() == whole.facts()
    assert work.pool.drawing() == whole.pool.drawing()
    assert not work.moves.is_stale
    assert work.moves.num_moved == len(work.plan.sources) > 1
    assert work.ledger.occupancy[work.plan.frames].tolist() == [0] * len(work.plan.frames)
    assert len(work.plan.frames) == 1
    work.assert_sound()


def test_a_slice_is_one_copy_of_at_most_so_many_pages_in_the_order_of_the_plan():
    work = Work("#a.a .b.b c.c. d.dd")
    moved = []
    while not work.moves.is_done:
        moved.append(work.moves.step(1))
    assert set(moved) == {1}
    assert [copy[0][0] for copy in work.mover.copies] == work.plan.sources.tolist()
    assert [copy[1][0] for copy in work.mover.copies] == work.plan.targets.tolist()
    assert work.moves.step(5) == 0


def test_payloads_name_the_targets_in_the_order_of_the_tokens():
    """Node b is scattered over two frames that empty: its pages go to holes, each to its own."""
    work = Work("#a.. aaa. b..b .cb. ccc.", FreeFrames(2))
    before = work.node("b").payload.tolist()
    work.finish(2)
    target_of = dict(zip(work.plan.sources.tolist(), work.plan.targets.tolist(), strict=True))
    assert work.node("b").payload.tolist() == [target_of.get(page, page) for page in before]
    assert any(page in target_of for page in before)
    work.assert_sound()


def test_ids_ticks_and_counts_of_the_tree_stay():
    work = Work(below=["ba"])
    before = work.tree_facts()
    queue = [leaf.id for leaf in work.pool.leaves.leaves()]
    work.finish(2)
    assert work.tree_facts() == before
    assert [leaf.id for leaf in work.pool.leaves.leaves()] == queue


def test_a_payload_that_was_given_out_before_keeps_naming_the_old_pages():
    work = Work()
    taken = {letter: work.node(letter).payload for letter in "abcd"}
    copies = {letter: payload.tolist() for letter, payload in taken.items()}
    work.finish()
    assert {letter: payload.tolist() for letter, payload in taken.items()} == copies


def test_a_plan_without_moves_is_done_at_once():
    work = Work("#aaa bbbb ....")
    assert work.moves.is_done
    assert not work.moves.is_stale
    assert work.moves.step(4) == 0


# exceptions


@RULES
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("refused", ["copy", 0, 1])
def test_an_exception_leaves_every_page_as_it_was_and_the_slice_can_be_tried_again(refused, steps_before, rule):
    work = Work("#aa. .a.b c... d... bb..", FreeFrames(2), rule)
    for _ in range(steps_before):
        work.moves.step(1)
    nodes_left = {node.id for node in work.moves._nodes[steps_before:]}
    if refused == "copy":
        work.mover.refuses_copy = True
    else:
        work.mover.refused_node = min(refused, len(nodes_left) - 1)
    before, tree_before = work.facts(), work.tree_facts()
    payloads = {node.id: node.payload for node in work.tree.nodes()}
    with pytest.raises(Refused):
        work.moves.step(100)
    assert work.facts() == before
    assert work.tree_facts() == tree_before
    assert all(node.payload is payloads[node.id] for node in work.tree.nodes())
    assert work.moves.num_moved == steps_before
    assert not work.moves.is_done
    work.assert_sound()
    work.mover.refuses_copy, work.mover.refused_node = False, None
    work.finish()
    assert not work.moves.is_stale
    assert work.ledger.occupancy[work.plan.frames].tolist() == [0, 0]
    work.assert_sound()


# overtaken


def lock(work):
    work.tree.lock(work.moves._nodes[1].id)


def trim(work):
    node = work.moves._nodes[1]
    work.placement.give(work.tree.trim(node, 1).payload)


def split(work):
    node = work.moves._nodes[1]
    work.tree.match(node.tokens[:8])


def remove(work):
    work.placement.give(work.tree.remove(work.moves._nodes[1]).payload)


def reset(work):
    work.tree.reset()
    work.placement.clear()


def move_otherwise(work):
    node = work.moves._nodes[1]
    node.payload = node.payload.copy()


def take_a_target(work):
    page = work.plan.targets[1:2]
    work.placement.take_these(page)
    work.pool.outside += page.tolist()


@RULES
@pytest.mark.parametrize("overtake", [lock, trim, split, remove, reset, move_otherwise, take_a_target])
def test_a_plan_that_was_overtaken_is_void_and_moves_nothing_more(overtake, rule):
    work = Work("#aa.a .bbb. cccc. dd..d", rule=rule)
    assert work.plan.sources.tolist() == [6, 7, 8]
    assert work.moves.step(1) == 1
    overtake(work)
    before, copies = work.facts(), len(work.mover.copies)
    assert work.moves.step(1) == 0
    assert (work.moves.is_stale, work.moves.is_done) == (True, True)
    assert work.moves.step(1) == 0
    assert (work.facts(), len(work.mover.copies)) == (before, copies)
    work.assert_sound()


@RULES
def test_a_plan_whose_targets_lost_their_memory_is_void(rule):
    """Frame 1 empties before its hole is filled, and is given back."""
    work = Work("#aaa #.#. bb.. ccc.", FreeFrames(1), rule)
    assert set(work.plan.targets.tolist()) == {5, 7}
    work.placement.give(np.array([4, 6]))
    work.pool.outside.clear()
    work.placement.withdraw(np.array([1]))
    before = work.facts()
    assert work.moves.step(9) == 0
    assert work.moves.is_stale
    assert (work.facts(), work.mover.copies) == (before, [])


def test_what_happens_to_other_nodes_and_pages_does_not_matter():
    work = Work("#aa.a .bbb. cccc. dd..d eeeee")
    movers = {node.id for node in work.plan.movers}
    assert work.moves.step(1) == 1
    other = work.node("e")
    assert other.id not in movers
    work.tree.lock(other.id)
    work.tree.match(work.moves._nodes[1].tokens)
    work.tree.lock(work.moves._nodes[1].id)
    work.tree.unlock(work.moves._nodes[1].id)
    work.finish()
    assert not work.moves.is_stale
    work.assert_sound()


# pages that are asked for by number


@RULES
def test_pages_asked_for_by_number_are_held_and_never_handed_out_again(rule):
    pool = Pool("#... .... ....")
    placement = PLACEMENTS[rule](pool.ledger)
    placement.take_these(np.array([6, 2, 11]))
    assert (pool.ledger.num_held, placement.num_free) == (3, 8)
    assert set(placement.free_pages().tolist()).isdisjoint({2, 6, 11})
    rest = [placement.take_one() for _ in range(4)] + placement.take(4).tolist()
    assert sorted(rest) == [1, 3, 4, 5, 7, 8, 9, 10]
    assert placement.num_free == 0


@RULES
def test_the_order_of_the_others_stays(rule):
    pool = Pool("#... .... ....")
    placement = PLACEMENTS[rule](pool.ledger)
    placement.take(11)
    placement.give(np.array([9, 4, 1, 10, 6]))
    before = placement.free_pages().tolist()
    placement.take_these(np.array([10, 4]))
    left = [page for page in before if page not in (4, 10)]
    assert placement.free_pages().tolist() == left
    if rule == "stock":
        assert placement.take(3).tolist() == left


@RULES
@pytest.mark.parametrize(
    ("pages", "complaint"),
    [
        ([5, 1], "slots 1 are held already"),
        ([5, 5], "slots 5 are named twice"),
        ([5, 12], "pages 12 are not among pages 1 to 11"),
        ([5, 9], "frames 2 were returned"),
        ([*range(2, 12), 5], "named twice|returned"),
    ],
)
def test_pages_that_cannot_be_had_are_refused_and_nothing_changes(rule, pages, complaint):
    pool = Pool("#... .... ....")
    placement = PLACEMENTS[rule](pool.ledger)
    placement.take_these(np.array([1]))
    placement.withdraw(np.array([2]))
    before = placement.free_pages().tolist(), placement.num_free, bytes(pool.ledger.held_bytes)
    with pytest.raises(LedgerError, match=complaint):
        placement.take_these(np.array(pages))
    assert (placement.free_pages().tolist(), placement.num_free, bytes(pool.ledger.held_bytes)) == before
    assert pool.ledger.occupancy.tolist() == [2, 0, 0]


# any pool


@given(st.data())
def test_any_plan_is_carried_out_in_any_slices_or_overtaken_without_harm(data):
    words = data.draw(st.lists(st.text("abcdef..#", min_size=4, max_size=4), min_size=3, max_size=6))
    drawing = "#" + " ".join(words)[1:]
    work = Work(drawing, FreeFrames(data.draw(st.integers(0, 4))), data.draw(st.sampled_from(sorted(PLACEMENTS))))
    work.assert_sound()
    is_overtaken = False
    while not work.moves.is_done:
        if data.draw(st.integers(0, 9)) == 0:
            leaf = next(iter(work.pool.leaves.leaves()), None)
            if leaf is not None:
                gone = work.tree.trim(leaf, 1) if leaf.num_pages > 1 else work.tree.remove(leaf)
                work.placement.give(gone.payload)
                is_overtaken = True
        work.moves.step(data.draw(st.integers(1, 4)))
        work.assert_sound()
    if not is_overtaken:
        assert not work.moves.is_stale
        assert work.ledger.occupancy[work.plan.frames].tolist() == [0] * len(work.plan.frames)
