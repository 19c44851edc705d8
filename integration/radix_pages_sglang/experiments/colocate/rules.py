"""The rules that are compared: who may have how much memory, and how a model comes down to it.

Every rule has one setting, which is chosen on training streams. `SPLIT` is the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radix_pages_sglang.experiments.colocate.broker import Broker, Demand, FirstCome, Fixed, FlushWhenIdle, Model

LEAST_FRAMES = 2
"""A model always may have the padding page's frame and one more."""

LEAST_MOVE = 1 / 16
"""Ours changes ceilings when one is wrong by this part of the budget."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What rules take beside their setting: how soon ours forgets, and the static split that a released model comes
    back to."""

    half_life_seconds: float
    split: float = 0.5


@dataclass(frozen=True, slots=True)
class Rule:
    """`settings` are those tried in training; `setting_is` says what one means. `shrink` is what a model does above
    its ceiling (`cache.Cache`). With `has_cap` there are no ceilings: the setting is the part of the budget that each
    model may cache beside what runs, and memory belongs to whoever takes it first."""

    name: str
    setting_is: str
    settings: tuple[float, ...]
    make_broker: Callable[[Sequence[Model], int, float, Basis], Broker]
    shrink: str = "evict"
    has_cap: bool = False


def _split(models: Sequence[Model], budget: int, part: float, basis: Basis) -> Broker:
    return Fixed(models, budget, round(part * budget))


def _flush(models: Sequence[Model], budget: int, seconds: float, basis: Basis) -> Broker:
    return FlushWhenIdle(models, budget, round(basis.split * budget), LEAST_FRAMES, seconds)


def _first_come(models: Sequence[Model], budget: int, part: float, basis: Basis) -> Broker:
    return FirstCome(models, budget)


def _demand(models: Sequence[Model], budget: int, keep: float, basis: Basis) -> Broker:
    least_move = max(round(LEAST_MOVE * budget), 1)
    return Demand(models, budget, round(keep * budget), basis.half_life_seconds, least_move)


KEEPS = (0.1, 0.15, 0.2, 0.3)
"""Not less: what a model keeps must hold the largest request."""

SPLIT = Rule("static split", "part of the first model", tuple(i / 16 for i in range(4, 13)), _split)
FLUSH = Rule("flush when idle", "seconds without a request", (0.5, 1.0, 2.0, 5.0, 10.0), _flush)
KVCACHED = Rule("kvcached", "cached part of the budget, each", (0.1, 0.2, 0.3, 0.4, 0.5), _first_come, has_cap=True)
KVCACHED_LENT = Rule("kvcached, limits moved", "kept part of the budget", KEEPS, _demand, shrink="whole")
WITHOUT_MOVES = Rule("ours without moves", "kept part of the budget", KEEPS, _demand)
OURS = Rule("ours", "kept part of the budget", KEEPS, _demand, shrink="move")
RULES = (SPLIT, FLUSH, KVCACHED, KVCACHED_LENT, WITHOUT_MOVES, OURS)
"""`SPLIT` is first: its setting is part of `Basis` for those after it."""

SERVED_RULES = (SPLIT, FLUSH, WITHOUT_MOVES, OURS)
"""Those that real servers can follow."""
