"""Which frames have memory: growth, trims, reserve, ceiling and failed commits, against drawn frames."""

import numpy as np
import pytest

from radix_pages.backing import CommitError, runs
from radix_pages.ledger import Ledger, LedgerError
from radix_pages.placement import PLACEMENTS
from radix_pages.residency import MOST_SKIPPED, Residency, ResidencyCounts
from radix_pages.units import Geometry
from tests.core.backings import KIB, MIB, PretendBacking, least_frame

RULES = pytest.mark.parametrize("rule", PLACEMENTS)


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def drawn(frames, rule="pack", **bounds):
    """A residency whose frames look like `frames`: one word a frame, `#` a held page, `.` a free one, `----` a
    frame that was returned. The very first page is the padding page; nothing counts as having happened."""
    words = frames.split()
    letters = "".join(words)
    geometry = Geometry(4, pages_per_frame=len(words[0]))
    ledger = Ledger(geometry, len(letters) - 1)
    residency = Residency(PLACEMENTS[rule](ledger), PretendBacking(geometry, ledger.num_pages), **bounds)
    placement = residency.placement
    everything = np.sort(placement.take(placement.num_free)).tolist()
    reserve, residency.reserve_frames = residency.reserve_frames, 0
    for free, then in (("-", residency.trim), (".", bool)):
        placement.give(ids(*(page for page in everything if letters[page] == free)))
        then()
    residency.reserve_frames = reserve
    residency.counts = ResidencyCounts()
    residency.backing.calls.clear()
    assert drawing(residency) == frames
    return residency


def drawing(residency):
    ledger = residency.ledger
    words = []
    for frame in range(ledger.num_frames):
        first = ledger.geometry.first_page(frame)
        pages = ledger.is_held[first : first + int(ledger.sizes[frame])]
        words.append(
            "-" * len(pages) if ledger.is_returned[frame] else "".join("#" if held else "." for held in pages)
        )
    return " ".join(words)


def calls(residency):
    return residency.backing.calls


def whole(residency):
    """Nothing contradicts anything, and exactly the committed frames are resident."""
    backing = residency.backing
    return (
        residency.disagreements() == []
        and residency.overspent() == ""
        and residency.committed_bytes == backing.resident_bytes()
        and (backing.is_committed == ~residency.ledger.is_returned).all()
    )


# growth


@RULES
def test_growth_commits_the_lowest_returned_frames_in_one_call(rule):
    r = drawn("##.. ---- .... ---- ----", rule)
    assert r.grow(5)
    assert drawing(r) == "##.. .... .... .... ----"
    assert calls(r) == [("commit", [1, 3])]
    assert whole(r)


@pytest.mark.parametrize(("num_pages", "after"), [(4, "#### .... ---- ---"), (5, "#### .... .... ---")])
def test_growth_takes_no_frame_more_than_the_pages_need(num_pages, after):
    r = drawn("#### ---- ---- ---")
    assert r.grow(num_pages)
    assert drawing(r) == after


@pytest.mark.parametrize(("num_pages", "had"), [(11, True), (12, False)])
def test_a_short_last_frame_counts_for_the_pages_it_has(num_pages, had):
    r = drawn("#### ---- ---- ---")
    assert r.grow(num_pages) is had
    assert drawing(r) == "#### .... .... ..."
    assert r.counts.ceiling_refusals == 0


def test_where_everything_is_committed_growth_asks_nobody():
    r = drawn("##.. .... ##..")
    assert not r.grow(1)
    assert calls(r) == []


def test_growth_stops_at_the_ceiling_and_says_so():
    r = drawn("#### ---- ---- ----", max_frames=3)
    assert not r.grow(12)
    assert drawing(r) == "#### .... .... ----"
    assert not r.grow(1)
    assert drawing(r) == "#### .... .... ----"
    assert r.counts.ceiling_refusals == 2
    assert calls(r) == [("commit", [1, 2])]


def test_growth_within_the_ceiling_is_no_refusal():
    r = drawn("#### ---- ---- ----", max_frames=3)
    assert r.grow(8)
    assert r.counts.ceiling_refusals == 0


def test_beyond_a_ceiling_that_was_lowered_nothing_grows():
    r = drawn("#### #### #### ----", max_frames=2)
    assert r.over_ceiling_frames == 1
    assert not r.grow(1)
    assert calls(r) == []


def test_what_comes_back_reads_as_zeros():
    r = drawn("#### ####")
    r.backing.write(5, 7)
    r.placement.give(ids(4, 5, 6, 7))
    r.trim()
    assert r.grow(1)
    assert r.backing.read(5) == [0, 0, 0, 0]


def test_pages_of_returned_frames_are_handed_out_once_they_are_committed():
    r = drawn("#### ---- ----")
    with pytest.raises(ValueError, match="asked for 1 pages, 0 are free"):
        r.placement.take(1)
    r.grow(2)
    assert sorted(r.placement.take(4).tolist()) == [4, 5, 6, 7]


def test_a_ceiling_refuses_nothing_where_nothing_is_returned():
    r = drawn("#### #### ####", max_frames=2)
    assert not r.grow(1)
    assert r.counts.ceiling_refusals == 0


# commits that fail


def test_a_failed_commit_changes_nothing_but_the_count():
    r = drawn("#### ---- ----")
    r.backing.fail_next()
    assert not r.grow(3)
    assert drawing(r) == "#### ---- ----"
    assert (r.counts.commit_failures, r.counts.committed_again_total, r.is_failing) == (1, 0, True)
    assert whole(r)


def test_after_failures_the_next_1_3_7_and_at_most_63_calls_are_spared():
    r = drawn("#### ---- ----")
    r.backing.fail_next(9)
    skipped = []
    while len(skipped) < 9:
        assert not r.grow(1)
        tried = len(calls(r))
        spared = 0
        while r._skip:
            assert not r.grow(1)
            spared += 1
        assert len(calls(r)) == tried
        skipped.append(spared)
    assert skipped == [1, 3, 7, 15, 31, 63, 63, 63, MOST_SKIPPED]
    assert r.grow(1)
    assert not r.is_failing


def test_a_commit_that_works_ends_the_back_off():
    r = drawn("#### ---- ----")
    r.backing.fail_next(2)
    assert [r.grow(1) for _ in range(7)] == [False] * 6 + [True]
    r.backing.fail_next()
    assert [r.grow(1) for _ in range(3)] == [False, False, True]


def test_every_second_commit_may_fail_and_growth_gets_there():
    r = drawn("#### ---- ---- ---- ----")
    r.backing.fail_every(2)
    for _ in range(40):
        r.grow(1)
    assert drawing(r) == "#### .... .... .... ...."
    assert r.counts.commit_failures == r.backing.failures == 3
    assert whole(r)


def test_a_commit_that_fails_on_another_rank_is_undone_on_this_one():
    answers = [False, True]
    r = drawn("#### ---- ----", agree=lambda succeeded: succeeded and answers.pop(0))
    assert not r.grow(1)
    assert drawing(r) == "#### ---- ----"
    assert calls(r) == [("commit", [1]), ("decommit", [1])]
    assert r.counts.commit_failures == 1
    assert r.counts.returned_frames_total == 0
    assert whole(r)
    assert [r.grow(1), r.grow(1)] == [False, True]
    assert whole(r)


def test_a_commit_that_cannot_be_undone_here_is_no_commit_and_its_memory_is_overspent():
    r = drawn("#### ---- ----", agree=lambda _: False)
    r.backing.keep_next_memory = True
    assert not r.grow(1)
    assert drawing(r) == "#### ---- ----"
    assert r.counts.commit_failures == 1
    assert r.disagreements() == []
    assert f"the pool occupies {16 * KIB} bytes, its committed frames take {8 * KIB}: " in r.overspent()


def test_the_other_ranks_hear_of_a_failure_here_and_each_commit_asks_them_once():
    heard = []
    r = drawn("#### ---- ----", agree=lambda succeeded: heard.append(succeeded) or succeeded)
    r.backing.fail_next()
    for _ in range(4):
        r.grow(1)
    assert heard == [False, True, True]


def test_a_slow_commit_is_only_slow():
    r = drawn("#### ---- ----")
    r.backing.delay_seconds = 0.01
    assert r.grow(8)
    assert whole(r)


# trims


@RULES
def test_a_trim_returns_every_empty_frame_and_no_other_in_one_call(rule):
    r = drawn("#... .... #... ---- .... ...", rule)
    assert r.trim() == 3
    assert drawing(r) == "#... ---- #... ---- ---- ---"
    assert calls(r) == [("decommit", [1, 4, 5])]
    assert whole(r)


def test_the_reserve_is_the_lowest_empty_frames_and_stays():
    r = drawn("#... .... ##.. .... ....", reserve_frames=2)
    assert r.trim() == 1
    assert drawing(r) == "#... .... ##.. .... ----"


def test_a_reserve_that_is_not_full_keeps_all():
    r = drawn("#### #### ....", reserve_frames=2)
    assert r.trim() == 0
    assert calls(r) == []


@pytest.mark.parametrize(
    ("keep", "after"),
    [
        (6, "#... .... ##.. .... ...."),
        (5, "#... .... ##.. .... ...."),
        (4, "#... .... ##.. .... ----"),
        (3, "#... .... ##.. ---- ----"),
        (2, "#... ---- ##.. ---- ----"),
        (0, "#... ---- ##.. ---- ----"),
    ],
)
def test_a_trim_to_a_number_of_frames_stops_there_and_takes_the_reserve_if_need_be(keep, after):
    r = drawn("#... .... ##.. .... ....", reserve_frames=2)
    r.trim(keep_committed=keep)
    assert drawing(r) == after
    assert whole(r)


@pytest.mark.parametrize(
    ("keep", "after"),
    [(None, "#... .... .... ---- ----"), (4, "#... .... .... .... ----"), (0, "#... .... .... ---- ----")],
)
def test_a_trim_of_at_most_two_frames_takes_the_highest_and_the_next_goes_on(keep, after):
    r = drawn("#... .... .... .... ....", reserve_frames=1)
    r.trim(keep, most=2)
    assert drawing(r) == after
    while r.trim(keep, most=2):
        pass
    all_at_once = drawn("#... .... .... .... ....", reserve_frames=1)
    all_at_once.trim(keep)
    assert drawing(r) == drawing(all_at_once)
    assert whole(r)


def test_a_trim_of_at_most_no_frame_does_nothing():
    r = drawn("#... .... ....")
    assert r.trim(most=0) == 0
    assert calls(r) == []


def test_counts_are_frames_and_bytes():
    """A frame takes 8 KiB in two buffers, the last one has two pages of four."""
    r = drawn("#### .... .... ..")
    assert (r.total_bytes, r.backing.frame_bytes) == (3 * 8 * KIB + 4 * KIB, 8 * KIB)
    r.trim()
    assert (r.returned_bytes, r.committed_bytes, r.committed_frames) == (20 * KIB, 8 * KIB, 1)
    r.grow(1)
    r.trim()
    assert r.counts == ResidencyCounts(
        returned_frames_total=4, returned_bytes_total=28 * KIB, committed_again_total=1
    )


def test_reports_hear_of_frames_that_went_and_came():
    r = drawn("#### .... .... ....", reserve_frames=1)
    heard = []
    r.on_return = lambda frames: heard.append(("went", frames.tolist()))
    r.on_commit = lambda frames: heard.append(("came", frames.tolist()))
    r.trim()
    r.backing.fail_next()
    r.grow(1)
    r.grow(1)
    r.grow(1)
    assert heard == [("went", [2, 3]), ("came", [2])]


# the reserve


def test_the_reserve_is_committed_ahead_the_lowest_frames_first():
    r = drawn("#### ##.. ---- ---- ----", reserve_frames=2)
    assert r.lacking_reserve == 2
    r.refill_reserve()
    assert drawing(r) == "#### ##.. .... ---- ----"
    r.refill_reserve()
    assert drawing(r) == "#### ##.. .... .... ----"
    r.refill_reserve()
    assert calls(r) == [("commit", [2]), ("commit", [3])]
    assert r.lacking_reserve == 0


def test_the_reserve_never_breaks_the_ceiling():
    r = drawn("#### ---- ---- ---- ----", reserve_frames=3, max_frames=3)
    assert r.lacking_reserve == 2
    for _ in range(3):
        r.refill_reserve()
    assert drawing(r) == "#### .... .... ---- ----"
    assert r.counts.ceiling_refusals == 0
    r.max_frames = 1
    r.refill_reserve()
    assert len(calls(r)) == 2


def test_the_reserve_takes_nothing_of_what_is_kept_free_for_a_neighbour():
    r = drawn("#### ---- ---- ---- ----", reserve_frames=2)
    r.free_frames = 3
    assert r.lacking_reserve == 1
    r.refill_reserve()
    r.refill_reserve()
    assert drawing(r) == "#### .... ---- ---- ----"
    r.free_frames = 4
    assert r.lacking_reserve == 0


def test_while_commits_fail_the_reserve_waits():
    r = drawn("#### ---- ---- ----", reserve_frames=2)
    r.backing.fail_next()
    r.refill_reserve()
    r.refill_reserve()
    assert (len(calls(r)), r.counts.commit_failures) == (1, 1)
    assert r.lacking_reserve == 0
    assert [r.grow(1), r.grow(1)] == [False, True]
    r.refill_reserve()
    assert drawing(r) == "#### .... .... ----"


# the start


def test_at_the_start_frame_0_and_the_reserve_are_committed_and_nothing_else():
    r = drawn(".... .... .... .... ..".replace(".", "#", 1), reserve_frames=1)
    r.start_returned()
    assert drawing(r) == "#... .... ---- ---- --"
    assert (r.committed_frames, r.counts.returned_frames_total) == (2, 0)
    assert r.backing.resident_bytes() == 2 * r.backing.frame_bytes
    assert whole(r)


def test_a_start_without_memory_is_an_error():
    r = drawn("#... .... ....")
    r.backing.fail_next()
    with pytest.raises(CommitError):
        r.start_returned()


# what the ceiling withholds


@pytest.mark.parametrize(
    ("max_frames", "withheld", "most"),
    [(None, 0, 18), (5, 0, 18), (4, 3, 15), (3, 7, 11), (2, 11, 7), (1, 11, 3)],
)
def test_pages_that_the_ceiling_withholds_and_the_most_it_lets_be_held(max_frames, withheld, most):
    """19 pages with the padding page. The short last frame is committed last: under a ceiling never."""
    r = drawn("#### ##.. ---- ---- ---", max_frames=max_frames)
    assert (r.withheld_pages, r.most_pages) == (withheld, most)


def test_a_lowered_ceiling_may_find_the_short_last_frame_among_those_it_allows():
    r = drawn("#... ---- ---- ---- ..#", max_frames=3)
    assert r.most_pages == 10
    r.placement.give(ids(18))
    r.trim()
    assert r.most_pages == 11


def test_a_ceiling_over_frames_that_are_committed_already_withholds_what_is_returned():
    r = drawn("#### #### #### ----", max_frames=2)
    assert (r.over_ceiling_frames, r.withheld_pages) == (1, 4)


# accounts


def test_a_page_held_behind_the_ledgers_back_is_a_disagreement():
    r = drawn("#### ---- ----")
    r.ledger.held_bytes[5] = True
    found = r.disagreements()
    assert "frames [1] hold other numbers of pages than the ledger counts" in found
    assert "frames [1] were returned while somebody holds their pages" in found


def test_a_placement_that_offers_what_has_no_memory_is_a_disagreement():
    r = drawn("#... ---- ....", "stock")
    r.placement.ledger.mark_returned(ids(2))
    assert r.disagreements() == ["7 pages are on offer, 3 are free and have memory"]


def test_memory_beyond_the_committed_frames_is_said_in_bytes():
    r = drawn("#### ---- ----")
    r.backing.stray_write(2)
    assert f"the pool occupies {10 * KIB} bytes, its committed frames take {8 * KIB}: " in r.overspent()
    assert r.disagreements() == []


def test_less_memory_than_committed_is_nobodys_business():
    r = drawn("#### ---- ----")
    r.backing._resident[0][0] = False
    assert r.overspent() == ""


def test_a_new_rule_over_the_same_ledger_offers_what_has_memory():
    r = drawn("##.. ---- .... #.##", "stock")
    for rule in PLACEMENTS:
        r.placement = PLACEMENTS[rule](r.ledger)
        assert r.placement.num_free == 7
        assert r.disagreements() == []
    r.grow(1)
    assert r.placement.num_free == 11


# the ledger


def state(ledger):
    return (
        bytes(ledger.held_bytes),
        ledger.occupancy.tolist(),
        ledger.is_returned.tolist(),
        ledger.num_held,
        ledger.num_returned_frames,
        ledger.num_returned_pages,
        ledger.frames_emptied,
        ledger.frames_refilled,
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda t: t.mark_returned(ids(4, 0)), "frames 0 are held or were returned already"),
        (lambda t: t.mark_returned(ids(4, 1)), "frames 1 are held or were returned already"),
        (lambda t: t.mark_returned(ids(2, 4)), "frames 2 are held or were returned already"),
        (lambda t: t.mark_returned(ids(4, 4)), "frames 4, 4 are named twice"),
        (lambda t: t.mark_returned(ids(4, 5)), "frames 5 are not among frames 0 to 4"),
        (lambda t: t.mark_returned(ids(-1)), "frames -1 are not among frames 0 to 4"),
        (lambda t: t.mark_committed(ids(2, 4)), "frames 4 were not returned"),
        (lambda t: t.mark_committed(ids(2, 2)), "frames 2, 2 are named twice"),
        (lambda t: t.mark_committed(ids(5, 2)), "frames 5 are not among"),
        (lambda t: t.hold(ids(16, 9)), "frames 2 were returned: commit them before"),
        (lambda t: t.hold(ids(6, 7, *range(8, 16), 16)), "frames 2, 3 were returned: commit them before"),
        (lambda t: t.hold_one(15), "frames 3 were returned: commit them before"),
    ],
)
def test_a_frame_in_the_wrong_state_is_named_and_nothing_changes(act, message):
    ledger = drawn("#... ##.. ---- ---- ....").ledger
    before = state(ledger)
    with pytest.raises(LedgerError, match=message):
        act(ledger)
    assert state(ledger) == before


def test_returned_frames_are_empty_ones_in_the_report_and_survive_a_clear():
    ledger = drawn("#... ##.. ---- ---- ..").ledger
    report = ledger.occupancy_report()
    assert (report.empty_frames, report.returned_frames, report.empty_pages) == (3, 2, 10)
    assert report.held_pages + report.stranded_pages + report.empty_pages == ledger.num_pages
    ledger.clear()
    assert (ledger.num_returned_frames, ledger.num_returned_pages) == (2, 8)
    assert ledger.occupancy_report().returned_frames == 2


# the placements


@RULES
def test_free_pages_names_those_of_returned_frames_last_and_counts_only_the_others(rule):
    p = drawn("##.. ---- #... ---- ....", rule).placement
    listed = p.free_pages().tolist()
    assert sorted(listed) == [2, 3, *range(4, 8), 9, 10, 11, *range(12, 20)]
    assert listed[-8:] == [*range(4, 8), *range(12, 16)]
    assert p.num_free == 9
    assert p.take(9).tolist() == listed[:9] if rule == "stock" else len(p.take(9)) == 9


@RULES
def test_one_page_at_a_time_never_lands_in_a_returned_frame(rule):
    p = drawn("#### ---- ---- ---- ---- ---- ---- ---- ---- ---- ---- #### ..", rule).placement
    assert [p.take_one(), p.take_one()] == [48, 49]
    with pytest.raises(ValueError, match="0 are free"):
        p.take_one()


@RULES
def test_a_request_whose_last_page_is_gone_with_its_frame_finds_room_elsewhere(rule):
    """`near` may name a page that nobody holds any more: then its frame may have been returned."""
    assert drawn("#### ---- ##..", rule).placement.take(2, near=5).tolist() == [10, 11]
    assert drawn("#### ---- ##..", rule).placement.take_one(near=5) == 10


@RULES
def test_clear_frees_everything_that_has_memory(rule):
    p = drawn("#### ---- ##.. ---- .", rule).placement
    p.clear()
    assert p.num_free == 8
    assert sorted(p.take(8).tolist()) == [1, 2, 3, 8, 9, 10, 11, 16]


# the backing of the tests, and its words


def test_neighbours_are_taken_together():
    assert runs(ids(0, 1, 2, 5, 7, 8)) == [(0, 3), (5, 6), (7, 9)]
    assert runs(ids()) == []


def test_a_frame_of_pages_that_straddle_granules_of_2_mib():
    """Pages of 1.5 MiB and 512 KiB: four of them fill 3 and 1 granules."""
    sizes = [3 * MIB // 2, MIB // 2]
    assert least_frame(sizes, 2 * MIB) == 4
    backing = PretendBacking(Geometry(16, pages_per_frame=4), 9, sizes, 2 * MIB)
    assert backing.frame_bytes == 8 * MIB
    assert backing.bytes_of(ids(0, 1)) == 16 * MIB
    assert backing.bytes_of(ids(2)) == (4 + 2) * MIB  # two pages, rounded up in each buffer
    backing.decommit(ids(1, 2))
    assert backing.resident_bytes() == 8 * MIB
    with pytest.raises(ValueError, match="do not fill granules"):
        PretendBacking(Geometry(16, pages_per_frame=2), 9, sizes, 2 * MIB)


def test_the_backing_complains_about_what_breaks_the_protocol():
    backing = PretendBacking(Geometry(4, pages_per_frame=4), 19)
    backing.write(5, [1, 2, 3, 4])
    backing.decommit(ids(1, 3))
    for wrong, message in (
        (lambda: backing.decommit(ids(1)), "no memory to give back"),
        (lambda: backing.commit(ids(2)), "committed already"),
        (lambda: backing.commit(ids(3, 1)), "do not ascend"),
        (lambda: backing.commit(ids(1, 1)), "do not ascend"),
        (lambda: backing.decommit(ids(5)), "not among frames 0 to 4"),
        (lambda: backing.commit(ids()), "names no frame"),
        (lambda: backing.write(5, 1), "its frame 1 has no memory"),
        (lambda: backing.read(5), "its frame 1 has no memory"),
    ):
        with pytest.raises(AssertionError, match=message):
            wrong()
    backing.commit(ids(1))
    assert backing.read(5) == [0, 0, 0, 0]


def test_the_backing_fails_at_random_the_same_way_each_time():
    def failures():
        backing = PretendBacking(Geometry(4, pages_per_frame=4), 19)
        backing.decommit(ids(1))
        backing.fail_at_random(0.3, seed=7)
        for _ in range(100):
            try:
                backing.commit(ids(1))
            except CommitError:
                continue
            backing.decommit(ids(1))
        return backing.failures

    assert 15 < failures() == failures() < 45
