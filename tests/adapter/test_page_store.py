"""The device's store of pages and the host's."""

from __future__ import annotations

import random

import pytest
import torch

from radix_pages.ledger import Ledger, LedgerError
from radix_pages.units import Geometry
from radix_pages_sglang.page_store import DevicePages, HostPages
from tests.adapter.framed import PLACEMENTS, assert_counts_are_right, held

pytestmark = pytest.mark.usefixtures("published_config")


class Shadow:
    """Who should hold what, from what a store handed out and took back."""

    def __init__(self, store):
        self.store = store
        self.owned: dict[int, list[int]] = {}
        self.half_freed: dict[int, int] = {}

    def take(self, name, count):
        pages = self.store.take([count]).tolist()
        assert len(pages) == count
        assert self.pages.isdisjoint(pages)
        self.owned[name] = pages

    def take_batch(self, names, counts):
        pages = self.store.take(counts).tolist()
        for name, count in zip(names, counts, strict=True):
            self.owned[name], pages = pages[:count], pages[count:]

    def give(self, name):
        pages = self.owned.pop(name)
        for page in pages:
            self.half_freed.pop(page, None)
        self.store.give(torch.tensor(pages, dtype=torch.int64))

    def give_slots_of_first_page(self, name, count, page_size):
        """The next `count` slots of the first page; with the last one the page goes."""
        page = self.owned[name][0]
        start = self.half_freed.get(page, 0)
        stop = min(start + count, page_size)
        self.store.give_slots(torch.arange(page * page_size + start, page * page_size + stop))
        self.half_freed[page] = stop
        if stop == page_size:
            del self.half_freed[page]
            del self.owned[name][0]

    @property
    def pages(self):
        return {page for pages in self.owned.values() for page in pages}

    def assert_agrees(self):
        ledger = self.store.ledger()
        assert held(ledger) == self.pages
        assert_counts_are_right(ledger)
        free = self.store.free_pages().tolist()
        assert len(set(free)) == len(free) == self.store.num_free
        assert set(free) | self.pages == set(range(1, ledger.num_pages + 1))
        return ledger


def drive(shadows, seed, *, page_size, num_pages, whole_pages_only=False):
    rng = random.Random(seed)
    for step in range(300):
        names = list(shadows[0].owned)
        free = shadows[0].store.num_free
        roll = rng.random()
        if roll < 0.4 and free:
            count = rng.randrange(1, min(free, num_pages // 6) + 1)
            for shadow in shadows:
                shadow.take(step, count)
        elif roll < 0.5 and free >= 8:
            counts = [rng.randrange(3) for _ in range(4)]
            for shadow in shadows:
                shadow.take_batch([f"{step}.{i}" for i in range(4)], counts)
        elif roll < 0.85 and names:
            name = rng.choice(names)
            for shadow in shadows:
                shadow.give(name)
        elif names and not whole_pages_only:
            name, count = rng.choice(names), rng.randrange(1, page_size + 1)
            for shadow in shadows:
                if shadow.owned[name]:
                    shadow.give_slots_of_first_page(name, count, page_size)
        elif rng.random() < 0.05:
            for shadow in shadows:
                shadow.store.clear()
                shadow.owned.clear()
                shadow.half_freed.clear()
        yield


def both_stores(page_size, frame_pages, num_pages, placement):
    geometry = Geometry(page_size, pages_per_frame=frame_pages)
    device = DevicePages(geometry, num_pages, placement, torch.device("cpu"))
    return Shadow(HostPages(geometry, num_pages, placement)), Shadow(device)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("page_size", "frame_pages"), [(1, 1), (1, 16), (4, 1), (4, 4), (16, 64), (16, 128)])
def test_the_devices_store_keeps_the_ledger_that_the_hosts_keeps(page_size, frame_pages, placement):
    """Driven on CPU tensors. Which pages they choose may differ; what is held, and its count, may not."""
    host, device = both_stores(page_size, frame_pages, 300, placement)
    for _ in drive((host, device), frame_pages, page_size=page_size, num_pages=300):
        ledgers = [host.assert_agrees(), device.assert_agrees()]
        assert host.store.num_free == device.store.num_free
        assert ledgers[0].num_held == ledgers[1].num_held
        assert ledgers[0].occupancy_report().packed_floor == ledgers[1].occupancy_report().packed_floor
        if placement == "stock":
            assert host.store.free_pages().tolist() == device.store.free_pages().tolist()
            assert ledgers[0].occupancy_report() == ledgers[1].occupancy_report()


@pytest.mark.parametrize("which", [0, 1], ids=["host", "device"])
def test_a_store_forgets_which_slots_of_a_page_were_freed_once_it_is_released_as_a_whole(which):
    """One slot of the page, the page, and in its next life three slots: one is still alive."""
    store = both_stores(4, 4, 1, "pack")[which].store
    page = store.take([1])
    store.give_slots(page * 4)
    store.give(page)
    assert store.take([1]).tolist() == page.tolist()
    store.give_slots(page * 4 + torch.arange(1, 4))
    assert store.num_free == 0
    store.give_slots(page * 4)
    assert store.num_free == 1


def test_the_devices_store_packs_too():
    """Frames of 4: pages 5 and 9, 10 are free beside an empty frame 3; three pages leave that one empty."""
    store = DevicePages(Geometry(4, pages_per_frame=4), 15, "pack", torch.device("cpu"))
    store.take([15])
    store.give(torch.tensor([12, 13, 14, 15, 10, 9, 5]))
    assert store.take([3]).tolist() == [5, 9, 10]
    assert store.ledger().occupancy_report().empty_frames == 1


def test_the_devices_store_names_a_double_free_when_it_is_read():
    store = DevicePages(Geometry(4, pages_per_frame=4), 15, "pack", torch.device("cpu"))
    pages = store.take([3])
    store.give(pages)
    store.give(pages[:1])
    with pytest.raises(LedgerError, match=rf"pages \[{pages[0]}\] are in the free list more than once"):
        store.ledger()


@pytest.mark.parametrize("kind", [HostPages, DevicePages])
def test_a_store_can_be_made_again_in_another_size(kind):
    device = () if kind is HostPages else (torch.device("cpu"),)
    store = kind(Geometry(4, pages_per_frame=4), 15, "pack", *device)
    store.take([9])
    other = store.resized(40)
    assert (other.num_pages, other.num_free, type(other)) == (40, 40, kind)
    assert isinstance(other.ledger(), Ledger)
    assert other.ledger().num_held == 0
