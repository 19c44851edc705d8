"""Tree, ledger and placement together against a plain model: a dict from every page that is not free to its owner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radix_pages.check import disagreements
from radix_pages.ledger import Ledger, LedgerError
from radix_pages.order import LeafQueue, make_order
from radix_pages.placement import PLACEMENTS, give_slots
from radix_pages.planner import plan_pages
from radix_pages.reclaim import reclaim
from radix_pages.tree import RadixTree
from radix_pages.units import Geometry

TREE = "tree"


@dataclass(eq=False)
class Request:
    """`letters` names the content of its whole pages, one letter a page; `pages` may have one more, not yet full.

    The first `shared` pages are the tree's, under the lock of `node`; the others are its own.
    """

    letters: str
    pages: list[int]
    shared: int
    node: int

    @property
    def own(self) -> list[int]:
        return self.pages[self.shared :]


class PagesAgainstADict(RuleBasedStateMachine):
    pages_per_frame = 1
    page_size = 1

    @initialize(rule_name=st.sampled_from(sorted(PLACEMENTS)), extra=st.integers(1, 40))
    def start(self, rule_name: str, extra: int) -> None:
        self.geometry = Geometry(self.page_size, token_bytes=1, pages_per_frame=self.pages_per_frame)
        self.leaves = LeafQueue(make_order("lru", page_size=self.page_size))
        self.tree = RadixTree(self.geometry, list, self.leaves)
        self.ledger = Ledger(self.geometry, min(2 * self.pages_per_frame, 150) + extra)
        self.placement = PLACEMENTS[rule_name](self.ledger)
        self.owner: dict[int, str | Request] = {}
        self.freed_slots: dict[int, set[int]] = {}
        self.requests: list[Request] = []

    # -- what an engine does --

    def key(self, letters: str) -> bytes:
        return "".join(letter * self.page_size for letter in letters).encode()

    def slots(self, pages: list[int]) -> list[int]:
        return [page * self.page_size + place for page in pages for place in range(self.page_size)]

    def pages_of(self, payload: list[int]) -> list[int]:
        pages = [slot // self.page_size for slot in payload[:: self.page_size]]
        assert payload == self.slots(pages)
        return pages

    def path(self, node_id: int) -> list[int]:
        return [page for node in self.tree.path(self.tree.node(node_id)) for page in self.pages_of(node.payload)]

    def make_room(self, num_pages: int) -> bool:
        lacking = num_pages - self.placement.num_free
        if lacking > 0:
            self.evict(lacking)
        return self.placement.num_free >= num_pages

    def take(self, request: Request, num_pages: int, near: int | None) -> None:
        pages = self.placement.take(num_pages, near).tolist()
        assert len(pages) == num_pages
        assert not self.owner.keys() & set(pages)
        self.owner.update(dict.fromkeys(pages, request))
        request.pages += pages

    def give(self, pages: list[int]) -> None:
        held_before = self.frames_in_use()
        emptied = self.placement.give(np.array(pages, dtype=np.int64))
        for page in pages:
            del self.owner[page]
            self.freed_slots.pop(page, None)
        assert sorted(emptied) == sorted(held_before - self.frames_in_use())

    def frames_in_use(self) -> set[int]:
        return {page // self.pages_per_frame for page in self.owner} - {0}

    def insert(self, request: Request) -> None:
        """What the engine does when a request's pages go into the tree: duplicates are freed, the tree's are used."""
        letters = request.letters
        payload = self.slots(request.pages[: len(letters)])
        done = self.tree.insert(self.key(letters), payload, owned_pages=request.shared)
        duplicates = request.pages[request.shared : done.matched_pages]
        self.tree.lock(done.node.id)
        self.tree.unlock(request.node)
        for page in request.pages[max(request.shared, done.matched_pages) : len(letters)]:
            self.owner[page] = TREE
        request.node, request.shared = done.node.id, len(letters)
        request.pages = self.path(done.node.id) + request.pages[len(letters) :]
        self.give(duplicates)

    # -- rules --

    @rule(letters=st.text(alphabet="ab", min_size=1, max_size=14), has_tail=st.booleans())
    def admit(self, letters: str, has_tail: bool) -> None:
        match = self.tree.match(self.key(letters))
        self.tree.lock(match.node.id)
        need = len(letters) - match.num_pages + has_tail
        if not self.make_room(need):
            self.tree.unlock(match.node.id)
            return
        pages = self.path(match.node.id)
        request = Request(letters, pages, len(pages), match.node.id)
        self.take(request, need, pages[-1] if pages else None)
        self.requests.append(request)

    def draw_request(self, data) -> Request:
        return self.requests[data.draw(st.integers(0, len(self.requests) - 1))]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), letter=st.sampled_from("ab"))
    def decode(self, data, letter: str) -> None:
        """The last page is full by now; the next one begins beside it."""
        request = self.draw_request(data)
        if self.freed_slots.keys() & set(request.own) or not self.make_room(1):
            return
        if len(request.pages) > len(request.letters):
            request.letters += letter
        self.take(request, 1, request.pages[-1] if request.pages else None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cache(self, data) -> None:
        request = self.draw_request(data)
        if not self.freed_slots.keys() & set(request.own):
            self.insert(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), is_cached=st.booleans())
    def finish(self, data, is_cached: bool) -> None:
        """With the end of a request its own pages are freed as a whole, whatever single slots were freed before."""
        request = self.draw_request(data)
        if is_cached and not self.freed_slots.keys() & set(request.own):
            self.insert(request)
        self.give(request.own)
        self.tree.unlock(request.node)
        self.requests.remove(request)

    @precondition(lambda self: any(request.own for request in self.requests))
    @rule(data=st.data())
    def free_single_slots(self, data) -> None:
        request = data.draw(st.sampled_from([request for request in self.requests if request.own]))
        page = request.pages[-1]
        freed = self.freed_slots.setdefault(page, set())
        live = [slot for slot in self.slots([page]) if slot not in freed]
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
        give_slots(self.placement, np.array(chosen))
        freed.update(chosen)
        if len(freed) == self.page_size:
            del self.freed_slots[page], self.owner[page]
            request.pages.pop()
            request.letters = request.letters[: len(request.pages)]

    @rule(num_pages=st.integers(0, 30))
    def evict(self, num_pages: int) -> None:
        removals = reclaim(self.tree, plan_pages(self.leaves, num_pages))
        pages = [page for removal in removals for page in self.pages_of(removal.payload)]
        assert {self.owner[page] for page in pages} <= {TREE}
        self.give(pages)

    @rule(data=st.data())
    def free_what_is_free(self, data) -> None:
        """A double free among sound pages is refused as a whole."""
        free = [page for page in range(1, self.ledger.num_pages + 1) if page not in self.owner]
        if not free:
            return
        culprit = data.draw(st.sampled_from(free))
        pages = [*data.draw(st.permutations(sorted(self.owner)[:12])), culprit]
        with pytest.raises(LedgerError, match=rf"\b{culprit}\b.* are not held"):
            self.placement.give(np.array(pages))
        with pytest.raises(LedgerError, match="are not held"):
            give_slots(self.placement, np.array(self.slots([culprit])[:1]))

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def hold_what_is_held(self, data) -> None:
        page = data.draw(st.sampled_from(sorted(self.owner)))
        with pytest.raises(LedgerError, match=rf"\b{page}\b.* are held already"):
            self.ledger.hold(np.array([page]))

    @rule()
    def ask_for_more_than_there_is(self) -> None:
        with pytest.raises(ValueError, match="are free"):
            self.placement.take(self.placement.num_free + 1)

    @rule()
    def reset(self) -> None:
        self.tree.reset()
        self.placement.clear()
        for everything in (self.owner, self.freed_slots, self.requests):
            everything.clear()

    # -- what must hold after every step --

    @invariant()
    def every_page_has_the_one_owner_that_the_model_says(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert disagreements(self.tree, self.leaves) == []
        in_tree = [page for node in self.tree.nodes() for page in self.pages_of(node.payload)]
        own = [page for request in self.requests for page in request.own]
        free = self.placement.free_pages().tolist()
        assert Counter([*in_tree, *own, *free]) == Counter(range(1, self.ledger.num_pages + 1))
        assert {page for page, owner in self.owner.items() if owner is TREE} == set(in_tree)
        for request in self.requests:
            assert {page for page, owner in self.owner.items() if owner is request} == set(request.own)
            assert request.pages[: request.shared] == self.path(request.node)[: request.shared]

    @invariant()
    def the_ledger_counts_what_the_model_counts(self) -> None:
        if not hasattr(self, "tree"):
            return
        ledger, last = self.ledger, self.ledger.num_pages
        assert ledger.is_held.tolist() == [True] + [page in self.owner for page in range(1, last + 1)]
        frame_of = [page // self.pages_per_frame for page in range(last + 1)]
        assert ledger.sizes.tolist() == list(Counter(frame_of).values())
        held = Counter([0, *(frame_of[page] for page in self.owner)])
        assert ledger.occupancy.tolist() == [held[frame] for frame in range(ledger.num_frames)]
        assert ledger.num_held == len(self.owner) == last - self.placement.num_free
        report = ledger.occupancy_report()
        assert report.held_frames == len(held)
        assert report.held_frames + report.empty_frames == ledger.num_frames
        assert report.held_pages + report.stranded_pages + report.empty_pages == last
        assert report.empty_pages == sum(not held[frame] for frame in frame_of)
        assert report.packed_floor <= report.held_frames
        for page in range(1, last + 1):
            freed = len(self.freed_slots.get(page, ()))
            assert ledger.live_slots(page) == (self.page_size - freed if page in self.owner else 0)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("pages_per_frame", [1, 4, 64, 128])
def test_owners_occupancy_and_free_pages_agree_after_every_step(pages_per_frame, page_size):
    members = {"pages_per_frame": pages_per_frame, "page_size": page_size}
    run_state_machine_as_test(type("PagesAgainstADict", (PagesAgainstADict,), members))
