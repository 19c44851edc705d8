"""Sizes from text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_pages_sglang.sizes import ACCEPTED, UNITS, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1073741824", 1024**3),
        ("512MiB", 512 * 1024**2),
        ("24GiB", 24 * 1024**3),
        ("2 TiB", 2 * 1024**4),
        ("1.5gib", 3 * 512 * 1024**2),
        ("10 B", 10),
        ("3KB", 3000),
        ("0.0001KiB", 0),
        (" 4GB ", 4 * 1000**3),
    ],
)
def test_a_size_is_read(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "1.5", "GiB", "24G", "1e9", "1,000", "0x10", "24 GiB please", "nan", "٣"])
def test_anything_else_is_refused_with_what_is_accepted(text):
    with pytest.raises(ValueError, match="is not a size") as refusal:
        parse_size(text)
    assert str(refusal.value) == f"{text!r} is not a size: {ACCEPTED}"


@given(st.integers(0, 2**60))
def test_a_size_shown_and_read_again_is_the_same_to_what_is_shown(num_bytes):
    again = parse_size(format_size(num_bytes))
    assert abs(again - num_bytes) <= 0.005 * num_bytes
    assert num_bytes >= 1024 or again == num_bytes


@given(st.integers(1, 1023), st.sampled_from([unit for unit in UNITS if unit.endswith("iB")]))
def test_a_whole_number_of_units_is_shown_as_it_was_typed(number, unit):
    text = f"{number} {unit}"
    assert format_size(parse_size(text)) == text
