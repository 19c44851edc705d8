import random

import numpy as np
import pytest

from radix_pages.ledger import Ledger, LedgerError
from radix_pages.placement import PLACEMENTS, give_slots
from radix_pages.units import Geometry


def ids(*pages):
    return np.array(pages, dtype=np.int64)


def drawn(frames, rule="pack", page_size=16):
    """A placement whose frames look like `frames`: one word a frame, `#` a held page, `.` a free one.

    All frames are as long as the first, but for the last. The very first page is the padding page.
    """
    words = frames.split()
    letters = "".join(words)
    ledger = Ledger(Geometry(page_size, pages_per_frame=len(words[0])), len(letters) - 1)
    placement = PLACEMENTS[rule](ledger)
    everything = placement.take(placement.num_free)
    placement.give(ids(*(page for page in np.sort(everything).tolist() if letters[page] == ".")))
    return placement


def drawing(placement):
    ledger, geometry = placement.ledger, placement.ledger.geometry
    firsts = [geometry.first_page(frame) for frame in range(ledger.num_frames)]
    letters = "".join("#" if held else "." for held in ledger.is_held)
    return " ".join(letters[first : geometry.first_page(frame + 1)] for frame, first in enumerate(firsts))


def fresh(num_pages, pages_per_frame, rule="pack", page_size=16):
    """A placement of which nothing was ever taken."""
    return PLACEMENTS[rule](Ledger(Geometry(page_size, pages_per_frame=pages_per_frame), num_pages))


# -- SGLang's order --


def test_stock_hands_out_first_what_was_freed_last_each_release_in_its_own_order():
    p = fresh(8, 4, "stock")
    assert p.take(6).tolist() == [1, 2, 3, 4, 5, 6]
    p.give(ids(2, 5))
    p.give(ids(6, 1))
    assert p.take(5).tolist() == [6, 1, 2, 5, 7]


def test_stock_hands_out_single_slots_in_the_order_they_were_freed():
    p = fresh(8, 4, "stock", page_size=1)
    p.take(7)
    p.give(ids(2, 5))
    p.give(ids(1))
    assert p.take(4).tolist() == [8, 2, 5, 1]


# -- ours --


def test_a_page_goes_beside_the_last_one_of_its_request():
    p = drawn("#### ##.. ###. ##..")
    assert p.take(1, near=12).tolist() == [14]


def test_a_run_that_finds_no_room_beside_its_request_goes_on_elsewhere():
    p = drawn("#### ##.. ###. ##..")
    assert p.take(3, near=8).tolist() == [11, 6, 7]


def test_a_request_in_a_full_frame_finds_room_elsewhere():
    p = drawn("#### ##.. #### ##..")
    assert p.take(1, near=8).tolist() == [6]


def test_near_may_name_a_page_that_nobody_holds_any_more():
    p = drawn("#### .... #### ....")
    assert p.take(6, near=5).tolist() == [4, 5, 6, 7, 12, 13]


def test_a_run_goes_into_the_first_frame_that_holds_all_of_it_however_full():
    p = drawn("#### ###. #... ##.. ....")
    assert p.take(2).tolist() == [9, 10]


def test_a_run_that_no_frame_can_hold_takes_the_roomiest_first_and_its_rest_the_first_that_fits():
    p = drawn("#### ###. ##.. #... ###.")
    assert p.take(4).tolist() == [13, 14, 15, 7]


def test_a_single_page_never_opens_an_empty_frame_while_a_held_one_has_room():
    p = drawn("#### .... #### ###. ....")
    assert p.take(2).tolist() == [15, 4]


def test_a_run_that_fills_a_frame_gets_an_empty_one():
    p = drawn("#### ##.. .... #... ....")
    assert p.take(5).tolist() == [8, 9, 10, 11, 6]


def test_holes_are_filled_before_more_frames_are_held_than_ever():
    p = fresh(19, 4)
    p.take(9)
    p.give(ids(2, 3, 5, 6))
    assert drawing(p) == "##.. #..# ##.. .... ...."
    assert p.take(4).tolist() == [2, 3, 5, 6]
    p.give(ids(8, 9, 2, 5))
    assert p.take(4).tolist() == [8, 9, 10, 11]


def test_a_run_beyond_all_holes_opens_empty_frames_by_number():
    p = fresh(19, 4)
    p.take(4)
    assert drawing(p) == "#### #... .... .... ...."
    assert p.take(9).tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_a_shorter_last_frame_is_filled_to_its_end():
    p = drawn("#### #### ....")
    assert p.take(2).tolist() == [8, 9]
    p = fresh(9, 4)
    assert p.take(9).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_shorter_last_frame_is_not_a_frame_that_a_run_fills():
    p = drawn("#### ##.. ..")
    assert p.take(2).tolist() == [6, 7]


def test_frame_0_is_filled_like_any_held_frame():
    p = drawn("#... #### ....")
    assert p.take(3).tolist() == [1, 2, 3]


def test_with_one_page_in_a_frame_the_order_is_stocks():
    ours, stock = fresh(9, 1), fresh(9, 1, "stock")
    for placement in (ours, stock):
        placement.take(6)
        placement.give(ids(2, 5))
    assert ours.take(4).tolist() == stock.take(4).tolist() == [2, 5, 7, 8]


# -- every rule --

RULES = pytest.mark.parametrize("rule", PLACEMENTS)


@RULES
def test_more_than_is_free_is_refused_and_nothing_changes(rule):
    p = drawn("#### ##.. #...", rule)
    before = drawing(p)
    with pytest.raises(ValueError, match="asked for 6 pages, 5 are free"):
        p.take(6)
    assert (drawing(p), p.num_free) == (before, 5)


@RULES
def test_no_pages_are_no_change(rule):
    p = drawn("#### ##..", rule)
    assert (p.take(0).tolist(), p.take(0, near=4).tolist(), p.give(ids())) == ([], [], [])
    assert drawing(p) == "#### ##.."


@RULES
def test_a_double_free_is_an_error_and_frees_nothing(rule):
    p = drawn("#### ##..", rule)
    with pytest.raises(LedgerError, match=r"pages 6 .* are not held"):
        p.give(ids(4, 6))
    assert (drawing(p), p.num_free, sorted(p.free_pages().tolist())) == ("#### ##..", 2, [6, 7])


@RULES
def test_give_returns_the_frames_that_run_empty(rule):
    p = drawn("#... #### ####", rule)
    assert p.give(ids(4, 5, 8)) == []
    assert p.give(ids(6, 7, 9)) == [1]


@RULES
def test_free_pages_are_in_the_order_in_which_single_pages_go(rule):
    p = drawn("##.. #### .... ..## #.#. ....", rule)
    expected = p.free_pages().tolist()
    assert [int(p.take(1)[0]) for _ in range(p.num_free)] == expected


@RULES
def test_clear_frees_everything_and_starts_anew(rule):
    p = drawn("#### #### ####", rule)
    p.clear()
    assert (p.num_free, p.ledger.num_held) == (11, 0)
    assert p.take(11).tolist() == fresh(11, 4, rule).take(11).tolist()


@RULES
def test_single_slots_give_their_page_back_with_the_last_one(rule):
    p = drawn("#### ####", rule, page_size=4)
    assert give_slots(p, np.arange(16, 31)) == []
    assert drawing(p) == "#### ...#"
    assert give_slots(p, ids(31)) == [1]


@RULES
@pytest.mark.parametrize("pages_per_frame", [1, 4, 64, 128])
def test_equal_calls_give_equal_pages_and_what_is_taken_was_free(rule, pages_per_frame):
    def run():
        rng = random.Random(7)
        p = fresh(1000, pages_per_frame, rule)
        runs, taken = [], []
        for _ in range(400):
            if runs and (rng.random() < 0.45 or not p.num_free):
                p.give(runs.pop(rng.randrange(len(runs))))
                continue
            near = int(rng.choice(runs)[-1]) if runs and rng.random() < 0.5 else None
            free = set(p.free_pages().tolist())
            run = p.take(rng.randrange(1, min(80, p.num_free) + 1), near)
            assert len(set(run.tolist())) == len(run)
            assert free.issuperset(run.tolist())
            assert len(free) - len(run) == p.num_free
            runs.append(run)
            taken.append(run.tolist())
        return taken

    assert run() == run()


@pytest.mark.parametrize("rule", PLACEMENTS)
@pytest.mark.parametrize("per_frame", [1, 4, 64])
def test_one_page_at_a_time_is_the_same_choice_as_a_run_of_one(rule, per_frame):
    rng = random.Random(0)
    twins = [PLACEMENTS[rule](Ledger(Geometry(16, pages_per_frame=per_frame), 200)) for _ in range(2)]
    held: list[int] = []
    for _ in range(2000):
        if held and (rng.random() < 0.45 or len(held) == 200):
            gone = [held.pop(rng.randrange(len(held))) for _ in range(min(len(held), rng.randrange(1, 9)))]
            for twin in twins:
                twin.give(np.array(gone))
        else:
            near = rng.choice([None, *held[-3:]])
            page = twins[0].take_one(near)
            assert [page] == twins[1].take(1, near).tolist()
            held.append(page)
