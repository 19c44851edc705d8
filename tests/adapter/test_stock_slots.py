"""The same calls on SGLang's allocators and ours: slots alike but for the names of pages (`framed.py`)."""

from __future__ import annotations

import random

import pytest
import torch

from tests.adapter.framed import (
    FRAMES,
    PLACEMENTS,
    assert_whole,
    held,
    lengths,
    our_allocator,
    stock_allocator,
)

pytestmark = pytest.mark.usefixtures("published_config")


def structure(slots, before, after, last_slots, page_size):
    """Slots with page names taken out: what goes on in a request's last page, and the order of its new ones."""
    names: dict[int, int] = {}
    described, at = [], 0
    for start, stop, last in zip(before, after, last_slots, strict=True):
        for slot in slots[at : at + stop - start]:
            page, place = divmod(slot, page_size)
            if start % page_size and page == last // page_size:
                described.append(("last page", place))
            else:
                described.append((names.setdefault(page, len(names)), place))
        at += stop - start
    assert at == len(slots)
    return described


class Rows:
    """Requests that grow, shrink and end on one allocator; only lengths are decided outside."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.rows: dict[int, list[int]] = {}

    def last_slots(self, names):
        return [self.rows[name][-1] if self.rows[name] else -1 for name in names]

    def extend(self, names, new_tokens):
        before = [len(self.rows.setdefault(name, [])) for name in names]
        after = [length + new for length, new in zip(before, new_tokens, strict=True)]
        last = self.last_slots(names)
        slots = self.allocator.alloc_extend(
            *lengths(*before), *lengths(*after), torch.tensor(last, dtype=torch.int64), sum(new_tokens)
        )
        return self._take(slots, names, before, after, last)

    def decode(self, names):
        before = [len(self.rows[name]) for name in names]
        after = [length + 1 for length in before]
        last = self.last_slots(names)
        slots = self.allocator.alloc_decode(*lengths(*after), torch.tensor(last, dtype=torch.int64))
        return self._take(slots, names, before, after, last)

    def end(self, name):
        row = torch.tensor(self.rows.pop(name), dtype=torch.int64)
        self.allocator.free_segment(row, start_pos=0)

    def _take(self, slots, names, before, after, last):
        if slots is None:
            return None
        assert slots.dtype == torch.int64
        found, at = slots.tolist(), 0
        described = structure(found, before, after, last, self.allocator.page_size)
        for name, start, stop in zip(names, before, after, strict=True):
            self.rows[name] += found[at : at + stop - start]
            at += stop - start
        return described

    def assert_rows_are_pages(self):
        """Every row fills its pages from the first slot on, and no page serves two rows."""
        page_size, seen = self.allocator.page_size, []
        for row in self.rows.values():
            assert [slot % page_size for slot in row] == [place % page_size for place in range(len(row))]
            pages = [row[place] // page_size for place in range(0, len(row), page_size)]
            assert all(slot // page_size == pages[place // page_size] for place, slot in enumerate(row))
            seen += pages
        assert len(set(seen)) == len(seen)
        assert held(self.allocator.ledger()) == set(seen)


def grow_and_end_at_random(both, seed, steps):
    """The same random requests on both; yields what each step gave them."""
    rng = random.Random(seed)
    names: list[int] = []
    for step in range(steps):
        roll = rng.random()
        if roll < 0.35 or not names:
            chosen = [*rng.sample(names, min(len(names), rng.randrange(3))), *range(1000 * step, 1000 * step + 2)]
            new_tokens = [rng.choice([1, 2, 3, 4, 5, 15, 16, 17, 40]) for _ in chosen]
            got = [rows.extend(chosen, new_tokens) for rows in both]
            if got[0] is not None:
                names += [name for name in chosen if name not in names]
            else:
                for rows in both:
                    for name in chosen:
                        if not rows.rows[name]:
                            del rows.rows[name]
            yield got
        elif roll < 0.8:
            yield [rows.decode(names) for rows in both]
        else:
            gone = names.pop(rng.randrange(len(names)))
            for rows in both:
                rows.end(gone)
            yield [None, None]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("frame_pages", FRAMES)
@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_slots_mean_what_stocks_mean_while_requests_grow_and_end(page_size, frame_pages, placement):
    """256 pages, which run out now and then: both refuse the same steps."""
    ours = Rows(our_allocator(page_size, 256, frame_pages=frame_pages, placement=placement))
    stock = Rows(stock_allocator(page_size, 256))
    refused = 0
    for got, expected in grow_and_end_at_random((ours, stock), seed=page_size, steps=150):
        assert got == expected
        refused += expected is None
        assert ours.allocator.available_size() == stock.allocator.available_size()
        ours.assert_rows_are_pages()
    assert_whole(ours.allocator)
    assert refused


def same_calls_on_both(page_size, seed):
    """Allocations and frees of every kind, random but legal, on ours with stock's order and on stock's."""
    ours, stock = our_allocator(page_size, 64, placement="stock"), stock_allocator(page_size, 64)
    rng = random.Random(seed)
    owned: list[torch.Tensor] = []
    for _ in range(200):
        roll = rng.random()
        if roll < 0.5:
            room = page_size * rng.randrange(1, 9)
            got, expected = ours.alloc(room), stock.alloc(room)
            yield got, expected
            if expected is not None:
                owned.append(expected)
        elif owned:
            slots = owned.pop(rng.randrange(len(owned)))
            how = rng.randrange(4)
            for allocator in (ours, stock):
                if how == 0:
                    allocator.free(slots)
                elif how == 1:
                    allocator.free_segment(slots, start_pos=0)
                elif how == 2:
                    allocator.free_page_ids(slots[::page_size] // page_size)
                else:
                    allocator.free_group_begin()
                    allocator.free_segment(slots, start_pos=0)
                    allocator.free_group_end()
        yield ours.free_pages, stock.free_pages


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_placement_stock_hands_out_the_very_pages_that_sglang_would(page_size, seed):
    for got, expected in same_calls_on_both(page_size, seed):
        assert (got is None) == (expected is None)
        assert got is None or got.tolist() == expected.tolist()


def test_placement_stock_gives_batches_the_very_slots_that_sglang_would():
    ours = Rows(our_allocator(16, 256, placement="stock"))
    stock = Rows(stock_allocator(16, 256))
    for _ in grow_and_end_at_random((ours, stock), seed=7, steps=150):
        assert ours.rows == stock.rows
        assert ours.allocator.free_pages.tolist() == stock.allocator.free_pages.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_placement_stock_puts_freed_slots_back_in_the_order_of_their_pages(seed):
    """`free` takes slots in any order; SGLang sorts the pages before it puts them in front."""
    ours, stock = our_allocator(4, 32, placement="stock"), stock_allocator(4, 32)
    slots = [allocator.alloc(64) for allocator in (ours, stock)][1]
    pages = slots.view(-1, 4)[random.Random(seed).sample(range(16), 5)]
    for allocator in (ours, stock):
        allocator.free(pages.flatten())
    assert ours.free_pages.tolist() == stock.free_pages.tolist()


def test_slots_are_int64_also_when_a_requests_last_one_is_read_off_its_int32_row():
    """As `alloc_for_decode` reads it; SGLang's allocators answer int64."""
    last = [torch.tensor([4 * 9 + 3, 4 * 2 + 1], dtype=dtype) for dtype in (torch.int32, torch.int64)]
    for allocator in (our_allocator(4, 16), stock_allocator(4, 16)):
        allocator.alloc(40)
        inside, beyond = (allocator.alloc_decode(*lengths(length, 3), last[0]) for length in (4, 5))
        assert (inside.dtype, beyond.dtype) == (torch.int64, torch.int64)
        extended = allocator.alloc_extend(*lengths(4, 2), *lengths(9, 3), last[0], 6)
        assert extended.dtype == torch.int64


def test_alloc_gives_whole_pages_in_order():
    allocator = our_allocator(4, 8)
    slots = allocator.alloc(12)
    assert slots.dtype == torch.int64
    assert torch.equal(slots % 4, torch.arange(12) % 4)
    assert len(torch.unique(slots // 4)) == 3
    assert allocator.alloc(24) is None
    assert allocator.available_size() == 20
    assert_whole(allocator)
