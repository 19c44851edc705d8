import numpy as np
import pytest

from radix_pages.units import Geometry, Span


def test_a_span_splits_into_its_first_pages_and_the_rest():
    assert Span(3, 8).split(2) == (Span(3, 5), Span(5, 8))


def test_a_span_cannot_give_more_pages_than_it_has():
    with pytest.raises(ValueError, match="cannot split 6 pages off a span of 5"):
        Span(3, 8).split(6)


def test_a_backward_span_is_refused_with_its_bounds():
    with pytest.raises(ValueError, match=r"got \[4, 2\)"):
        Span(4, 2)


def test_the_slots_of_pages_come_page_by_page_in_the_order_given():
    assert Geometry(page_size=4).slots_of(np.array([3, 1])).tolist() == [12, 13, 14, 15, 4, 5, 6, 7]
    assert Geometry(page_size=4).slots_of(np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize(("slots", "whole", "needed"), [(0, 0, 0), (1, 0, 1), (16, 1, 1), (17, 1, 2), (32, 2, 2)])
def test_slots_fill_whole_pages_and_need_one_more_for_the_rest(slots, whole, needed):
    geometry = Geometry(16)
    assert (geometry.whole_pages(slots), geometry.pages_to_hold(slots)) == (whole, needed)


def test_a_bigram_key_takes_twice_the_bytes_of_a_plain_one():
    assert (Geometry(16).key_bytes_per_page, Geometry(16, token_bytes=16).key_bytes_per_page) == (128, 256)


@pytest.mark.parametrize("field", ["page_size", "token_bytes"])
def test_a_geometry_without_slots_or_bytes_is_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        Geometry(**{"page_size": 4, field: 0})
