import numpy as np
import pytest

from radix_pages.ledger import Ledger, LedgerError, Occupancy, PartlyFreed
from radix_pages.units import Geometry


def ledger(num_pages, pages_per_frame=4, page_size=4):
    return Ledger(Geometry(page_size, pages_per_frame=pages_per_frame), num_pages)


def ids(*pages):
    return np.array(pages, dtype=np.int64)


def up_to(last):
    return np.arange(1, last + 1)


def state(ledger):
    """All that a call may change, copied."""
    return (
        bytes(ledger.held_bytes),
        ledger.occupancy.tolist(),
        ledger.num_held,
        ledger.frames_emptied,
        ledger.frames_refilled,
        [ledger.live_slots(page) for page in range(1, ledger.num_pages + 1)],
    )


def test_a_double_free_of_slots_names_them():
    """Case C10."""
    t = ledger(8, page_size=1)
    t.hold(ids(1, 2, 3, 4))
    t.release(ids(1, 2, 3, 4))
    with pytest.raises(LedgerError, match="slots 1, 2, 3, 4 are not held: freed twice"):
        t.release(ids(1, 2, 3, 4))
    assert t.num_held == 0


def test_a_double_free_of_a_page_names_the_page_and_its_slots():
    t = ledger(8, page_size=4)
    with pytest.raises(LedgerError, match=r"pages 3, 5 \(slots 12\.\.15, 20\.\.23\) are not held: freed twice"):
        t.release(ids(3, 5))


def test_a_long_list_of_culprits_is_cut_and_says_by_how_many():
    t = ledger(40, page_size=1)
    with pytest.raises(LedgerError, match="slots 1, 2, 3, 4, 5, 6, 7, 8 and 32 more are not held"):
        t.release(up_to(40))


def test_only_the_culprits_are_named():
    t = ledger(40, page_size=1)
    t.hold(up_to(40))
    t.release(ids(7))
    with pytest.raises(LedgerError, match=r"^slots 7 are not held"):
        t.release(up_to(40))


def test_a_page_is_held_once():
    t = ledger(8)
    t.hold(ids(2))
    with pytest.raises(LedgerError, match=r"pages 2 .* are held already"):
        t.hold(ids(1, 2))


FAULTS = {
    "held already": lambda t, more: t.hold(ids(*more, 1)),
    "not held": lambda t, more: t.release(ids(1, *more)),
    "named twice in one call": lambda t, more: t.hold(ids(*more, 90, 90)),
    "pages 0 are not among pages 1 to 100": lambda t, more: t.hold(ids(0, *more)),
    "pages -1 are not among": lambda t, more: t.hold(ids(*more, -1)),
    "pages 101 are not among": lambda t, more: t.hold(ids(101, *more)),
}


@pytest.mark.parametrize("many", [False, True], ids=["few pages", "many pages"])
@pytest.mark.parametrize("message", FAULTS)
def test_a_call_with_a_fault_changes_nothing(message, many):
    t = ledger(100)
    t.hold(ids(1, 2, 3))
    t.free_slots(ids(9))
    before = state(t)
    with pytest.raises(LedgerError, match=message):
        FAULTS[message](t, range(20, 60) if many else [20])
    assert state(t) == before


@pytest.mark.parametrize("many", [False, True], ids=["few pages", "many pages"])
def test_a_page_released_twice_in_one_call_stays_held(many):
    t = ledger(100)
    t.hold(up_to(50))
    before = state(t)
    with pytest.raises(LedgerError, match=r"pages 5 .* named twice"):
        t.release(np.append(up_to(50) if many else ids(5), 5))
    assert state(t) == before


def test_the_padding_page_cannot_be_released():
    with pytest.raises(LedgerError, match="pages 0 are not among pages 1 to 8"):
        ledger(8).release(ids(0))


def test_no_pages_are_no_change():
    t = ledger(8)
    before = state(t)
    assert (t.hold(ids()), t.release(ids()), t.free_slots(ids()).tolist()) == (0, [], [])
    assert state(t) == before


def test_a_ledger_without_pages_is_refused():
    with pytest.raises(ValueError, match="at least one page, got 0"):
        ledger(0)


@pytest.mark.parametrize("size", [3, 30], ids=["few pages", "many pages"])
def test_the_frames_that_run_empty_are_returned_once_each(size):
    t = ledger(100, pages_per_frame=2)
    t.hold(up_to(size))
    assert t.release(up_to(size)[::-1]) == sorted(range(1, size // 2 + 1), reverse=size < 8)


def test_a_frame_is_empty_when_its_last_page_goes_and_not_before():
    t = ledger(11)
    t.hold(ids(4, 5, 6))
    assert t.release(ids(4, 6)) == []
    assert t.release(ids(5)) == [1]


def test_hold_says_how_many_frames_were_empty():
    t = ledger(100)
    assert t.hold(ids(4, 5, 8)) == 2
    assert t.hold(ids(6, 9, 12)) == 1
    assert t.hold(np.arange(40, 60)) == 5


def test_emptied_and_refilled_frames_are_counted_since_the_start():
    t = ledger(11)
    for _ in range(3):
        t.hold(ids(4, 8))
        t.release(ids(4))
        t.release(ids(8))
    assert (t.frames_refilled, t.frames_emptied) == (6, 6)


def test_clear_empties_frames_and_counts_them():
    t = ledger(11)
    t.hold(ids(1, 4, 8))
    t.clear()
    assert (t.num_held, t.frames_refilled, t.frames_emptied, t.num_held_frames) == (0, 2, 2, 1)
    assert t.hold(ids(4)) == 1


def test_frame_0_is_held_by_the_padding_page_and_never_runs_empty():
    t = ledger(11)
    assert t.hold(ids(1, 2, 3)) == 0
    assert t.release(ids(1, 2, 3)) == []
    assert (t.frames_refilled, t.frames_emptied) == (0, 0)


def test_a_report_counts_every_page_and_every_frame_once():
    """Frames of 4 and 10 pages: frame 0 is P123, frame 1 is 4567, frame 2 is 8 9 10."""
    t = ledger(10)
    assert t.occupancy_report() == Occupancy(0, 3, 7, held_frames=1, empty_frames=2, packed_floor=0)
    t.hold(ids(5))
    assert t.occupancy_report() == Occupancy(1, 6, 3, held_frames=2, empty_frames=1, packed_floor=1)
    t.hold(ids(8, 9, 10))
    assert t.occupancy_report() == Occupancy(4, 6, 0, held_frames=3, empty_frames=0, packed_floor=1)
    t.release(ids(5))
    assert t.occupancy_report() == Occupancy(3, 3, 4, held_frames=2, empty_frames=1, packed_floor=1)


def test_the_last_frame_runs_empty_with_the_pages_it_has():
    t = ledger(10)
    t.hold(ids(8, 9, 10))
    assert t.release(ids(8, 9, 10)) == [2]


def test_with_one_page_in_a_frame_frames_are_pages():
    t = ledger(5, pages_per_frame=1)
    t.hold(ids(2, 4))
    assert t.occupancy_report() == Occupancy(2, 0, 3, held_frames=3, empty_frames=3, packed_floor=2)
    assert t.release(ids(4)) == [4]


def test_a_pool_that_fits_into_frame_0_has_no_frame_to_give_back():
    t = ledger(3)
    assert t.occupancy_report() == Occupancy(0, 3, 0, held_frames=1, empty_frames=0, packed_floor=0)


def test_freeing_one_slot_does_not_free_its_page():
    """Case C14."""
    t = ledger(4)
    t.hold(ids(1))
    assert t.free_slots(ids(5)).tolist() == []
    assert t.live_slots(1) == 3


def test_a_page_is_done_with_its_last_slot():
    t = ledger(4)
    t.hold(ids(1, 2))
    t.free_slots(ids(5, 8))
    t.free_slots(ids(4, 7))
    done = t.free_slots(ids(6, 9))
    assert done.tolist() == [1]
    t.release(done)
    assert (t.live_slots(1), t.live_slots(2)) == (0, 2)


@pytest.mark.parametrize(("again", "named"), [((5,), "5"), ((6, 5), "5"), ((6, 7, 6), "6")])
def test_a_slot_freed_twice_is_named_and_nothing_is_counted(again, named):
    t = ledger(4)
    t.hold(ids(1))
    t.free_slots(ids(5))
    with pytest.raises(LedgerError, match=f"^slots {named} are free already"):
        t.free_slots(ids(*again))
    assert t.live_slots(1) == 3


def test_slots_of_a_free_page_cannot_be_freed():
    t = ledger(4)
    t.hold(ids(1))
    with pytest.raises(LedgerError, match=r"pages 2 \(slots 8\.\.11\) are not held"):
        t.free_slots(ids(5, 8))
    assert t.live_slots(1) == 4


def test_a_page_released_as_a_whole_forgets_its_single_slots():
    t = ledger(4)
    t.hold(ids(1))
    t.free_slots(ids(5, 6))
    t.release(ids(1))
    assert t.live_slots(1) == 0
    t.hold(ids(1))
    assert t.live_slots(1) == 4
    assert t.free_slots(ids(4, 5, 6, 7)).tolist() == [1]


def test_done_pages_are_in_the_order_of_their_numbers():
    t = ledger(8)
    t.hold(up_to(8))
    assert t.free_slots(np.arange(4, 36)[::-1]).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_done_page_starts_anew_without_being_told():
    t = PartlyFreed(Geometry(2))
    assert t.free(ids(4)).tolist() == []
    assert t.free(ids(5)).tolist() == [2]
    assert t.live_slots(2) == 2
