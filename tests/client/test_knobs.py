"""Which values a knob takes, and what it says of others."""

import math

import pytest

from radix_pages_sglang.knobs import Knob


@pytest.mark.parametrize("value", [True, False, "16", None, [1], math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(value):
    assert Knob(4, 0, 100).complaint("cap", value) == f"cap takes a number, not {value!r}."


@pytest.mark.parametrize("value", [0, 100, 50, 50.0])
def test_numbers_within_the_range_are_taken(value):
    assert Knob(4, 0, 100).complaint("cap", value) == ""


@pytest.mark.parametrize("value", [-1, 101, 101.0, -2, 10**400, -(10**400)])
def test_numbers_out_of_the_range_are_refused_with_it(value):
    assert Knob(4, 0, 100).complaint("cap", value) == f"cap={value} is out of the range [0, 100]."


def test_fractions_are_for_knobs_that_take_them():
    assert Knob(4, 0, 100).complaint("cap", 0.5) == "cap takes a whole number, not 0.5."
    assert Knob(4, 0, 100, is_whole=False).complaint("seconds", 0.5) == ""
    assert Knob(4, 0, 100, is_whole=False).complaint("seconds", 100.5)


def test_no_bound_is_a_value_of_some_knobs():
    bounded = Knob(4, 0, 100, can_be_unbounded=True)
    assert bounded.complaint("cap", -1) == bounded.complaint("cap", -1.0) == ""
    assert bounded.complaint("cap", -2) == "cap=-2 is out of the range [0, 100], or -1 for no bound."
