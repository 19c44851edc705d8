"""Sizes in bytes as people write them: "24GiB" and back. Needs the standard library alone."""

import re
from fractions import Fraction

UNITS = {
    **{"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3},
    **{"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4},
}
ACCEPTED = (
    "whole bytes (1073741824), or a number and KB, MB, GB (of 1000) or KiB, MiB, GiB, TiB (of 1024), as in 24GiB"
)

_BY_LOWER_CASE = {unit.lower(): size for unit, size in UNITS.items()}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """The bytes that `text` stands for, a broken one rounded down; upper and lower case are the same.

    Raises ValueError with the text and what is accepted.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _BY_LOWER_CASE.get(found[2].lower()) if found else None
    if found is None or unit is None or (unit == 1 and "." in found[1]):
        raise ValueError(f"{text!r} is not a size: {ACCEPTED}")
    return int(Fraction(found[1]) * unit)


def format_size(num_bytes: int) -> str:
    """`num_bytes` in the largest binary unit that it fills, to two decimals unless it is a whole number of them."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= UNITS[unit]:
            whole, rest = divmod(num_bytes, UNITS[unit])
            return f"{num_bytes / UNITS[unit]:.2f} {unit}" if rest else f"{whole} {unit}"
    return f"{num_bytes} B"
