"""What pairs of measurements say: worked out by hand."""

from __future__ import annotations

import math

import pytest

from radix_pages_sglang.experiments.pairs import difference, interval


def test_an_interval_is_students_t_around_the_mean():
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))


def test_twice_as_much_is_100_percent_better():
    found = difference([[(2.0, 1.0), (6.0, 3.0)]])
    assert found is not None
    assert (found.percent, found.low, found.high) == pytest.approx((100, 100, 100))


def test_half_the_time_is_50_percent_better():
    found = difference([[(1.0, 2.0), (3.0, 6.0)]], is_less_better=True)
    assert found is not None
    assert (found.percent, found.low, found.high) == pytest.approx((50, 50, 50))


def test_a_pair_and_its_mirror_image_cancel_out():
    found = difference([[(1.0, 3.0), (3.0, 1.0)]])
    assert found is not None
    assert found.percent == pytest.approx(0)


def test_the_interval_of_times_is_turned_round_with_them():
    """Times of 1.0 and 1.1 of stock's: at best nothing lost, at worst more than 10%."""
    found = difference([[(1.0, 1.0), (1.1, 1.0)]], is_less_better=True)
    assert found is not None
    assert found.low < found.percent < found.high
    assert found.percent == pytest.approx(100 * (1 - math.sqrt(1.1)))


def test_pairs_of_one_block_do_not_narrow_the_interval_of_several():
    few = difference([[(1.1, 1.0)], [(1.2, 1.0)], [(1.3, 1.0)]])
    many = difference([[(1.1, 1.0)] * 20, [(1.2, 1.0)] * 20, [(1.3, 1.0)] * 20])
    assert few is not None
    assert many is not None
    assert (many.low, many.high) == pytest.approx((few.low, few.high))
    assert many.samples == 3


def test_pairs_of_a_single_block_are_samples_themselves():
    found = difference([[(1.1, 1.0), (1.2, 1.0), (1.3, 1.0)]])
    assert found is not None
    assert found.samples == 3


def test_a_single_pair_has_no_interval():
    found = difference([[(1.5, 1.0)]])
    assert found is not None
    assert (found.percent, found.low, found.high) == (pytest.approx(50), None, None)


def test_nothing_is_some_percent_better_than_zero():
    assert difference([[(1.0, 0.0), (1.0, 1.0)]]) is None
