"""The small script that moves ceilings between two models which share one memory budget.

It decides every moment anew from what it has seen until then, and works on anything that tells what it has committed
and takes a ceiling: the replay's models and real servers alike. A ceiling is raised only by what the other model has
given back already, so the two never have more than the budget together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Model(Protocol):
    """What a broker sees of a model, and the one thing that it does."""

    @property
    def committed_frames(self) -> int:
        """Frames that have memory."""

    @property
    def ceiling_frames(self) -> int:
        """Frames that may have memory."""

    @property
    def reserved_frames(self) -> int:
        """The least frames for the padding page and for what requests use and will ask for, as far as that is
        known: below that a ceiling cannot be kept."""

    @property
    def demand_tokens(self) -> int:
        """Tokens that were computed so far; only the growth counts."""

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""

    def settled_at(self, now: float) -> float:
        """When it came below its ceiling the last time; `now` where only a look tells."""

    def set_ceiling(self, num_frames: int) -> None:
        """Take no more than so many frames from now on, and give back what is more."""

    def flush(self) -> None:
        """Drop all that is cached and not in use."""


@dataclass(frozen=True, slots=True)
class Lend:
    """A ceiling was lowered at `start`; `seconds` later the model had given all of it back."""

    model: int
    start: float
    frames: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Giving:
    """A lowered ceiling that the model has not come below yet."""

    start: float
    frames: int
    ceiling: int


class Broker:
    """Keeps two ceilings within `budget_frames`; a subclass says where they should be.

    `lends` has every lowered ceiling below which the model had come, in the order in which it did.
    """

    def __init__(self, models: Sequence[Model], budget_frames: int) -> None:
        self.models = models
        self.budget_frames = budget_frames
        self.lends: list[Lend] = []
        self._giving: tuple[list[_Giving], list[_Giving]] = ([], [])

    def wanted(self, now: float) -> tuple[int, int] | None:
        """The ceilings that would be right now; None when they are to stay."""
        raise NotImplementedError

    def admit(self, place: int) -> bool:
        """Whether a request may be sent to this model now. Where its memory was taken away, it has to come back
        first: asking is what brings it back, at the next tick."""
        return True

    def tick(self, now: float) -> None:
        """Look at both models and set what has to be set."""
        self._note(now)
        wanted = self.wanted(now)
        if wanted is None:
            return
        for place, (model, ceiling) in enumerate(zip(self.models, wanted, strict=True)):
            ceiling = max(ceiling, model.reserved_frames)
            if ceiling < model.ceiling_frames:
                self._lower(place, ceiling, now)
        self._note(now)
        for place, (model, ceiling) in enumerate(zip(self.models, wanted, strict=True)):
            other = self.models[1 - place]
            allowed = self.budget_frames - max(other.ceiling_frames, other.committed_frames)
            if min(ceiling, allowed) > model.ceiling_frames:
                self._giving[place].clear()
                model.set_ceiling(min(ceiling, allowed))

    def _lower(self, place: int, ceiling: int, now: float) -> None:
        model = self.models[place]
        frames = min(model.committed_frames, model.ceiling_frames) - ceiling
        model.set_ceiling(ceiling)
        if frames > 0:
            self._giving[place].append(_Giving(now, frames, ceiling))

    def _note(self, now: float) -> None:
        """Who has come below a lowered ceiling has lent."""
        for place, (model, waiting) in enumerate(zip(self.models, self._giving, strict=True)):
            while waiting and model.committed_frames <= waiting[0].ceiling:
                giving = waiting.pop(0)
                settled = model.settled_at(now)
                seconds = (settled if settled >= giving.start else now) - giving.start
                self.lends.append(Lend(place, giving.start, giving.frames, seconds))


class FirstCome(Broker):
    """Nobody sets a ceiling: a model takes what the device has free, and what it gives back anybody may take."""

    def wanted(self, now: float) -> None:
        return None


class Fixed(Broker):
    """A static split: `first_frames` for one model, the rest for the other."""

    def __init__(self, models: Sequence[Model], budget_frames: int, first_frames: int) -> None:
        super().__init__(models, budget_frames)
        self.first_frames = first_frames

    def wanted(self, now: float) -> tuple[int, int]:
        return self.first_frames, self.budget_frames - self.first_frames


class FlushWhenIdle(Broker):
    """release_memory_occupation's rule: a model without requests for `idle_seconds` drops its cache and gives all
    but `least_frames` back; at its next request it takes its part of a static split again. SGLang leaves to its user
    when to call release and resume; this is how we would."""

    def __init__(
        self,
        models: Sequence[Model],
        budget_frames: int,
        first_frames: int,
        least_frames: int,
        idle_seconds: float,
    ) -> None:
        super().__init__(models, budget_frames)
        self.shares = (first_frames, budget_frames - first_frames)
        self.least_frames = least_frames
        self.idle_seconds = idle_seconds
        self._busy_at = [0.0, 0.0]
        self._is_released = [False, False]
        self._is_called = [False, False]

    def admit(self, place: int) -> bool:
        self._is_called[place] = True
        return not self._is_released[place] and self.models[place].ceiling_frames >= self.shares[place]

    def wanted(self, now: float) -> tuple[int, int]:
        for place, model in enumerate(self.models):
            if self._is_called[place] or not model.is_idle:
                self._busy_at[place] = now
                self._is_released[place] = self._is_called[place] = False
            elif not self._is_released[place] and now - self._busy_at[place] >= self.idle_seconds:
                model.flush()
                self._is_released[place] = True
        first, second = (self._frames(place) for place in range(2))
        return first, second

    def _frames(self, place: int) -> int:
        if self._is_released[place]:
            return self.least_frames
        return self.budget_frames - self.least_frames if self._is_released[1 - place] else self.shares[place]


class Demand(Broker):
    """Ours: each model keeps `keep_frames`, and what is above goes by how much each had to compute lately.

    Lately is an average that forgets half in `half_life_seconds`. Ceilings stay where they are until one is wrong by
    `least_move_frames`: every move costs cached pages.
    """

    def __init__(
        self,
        models: Sequence[Model],
        budget_frames: int,
        keep_frames: int,
        half_life_seconds: float,
        least_move_frames: int,
    ) -> None:
        super().__init__(models, budget_frames)
        self.keep_frames = keep_frames
        self.half_life_seconds = half_life_seconds
        self.least_move_frames = least_move_frames
        self._seen = [model.demand_tokens for model in models]
        self._lately = [0.0, 0.0]
        self._now = 0.0

    def wanted(self, now: float) -> tuple[int, int] | None:
        forgotten = math.exp2((self._now - now) / self.half_life_seconds)
        self._now = now
        for place, model in enumerate(self.models):
            tokens = model.demand_tokens
            self._lately[place] = self._lately[place] * forgotten + tokens - self._seen[place]
            self._seen[place] = tokens
        total = sum(self._lately)
        share = self._lately[0] / total if total > 0 else 0.5
        first = self.keep_frames + round(share * (self.budget_frames - 2 * self.keep_frames))
        first_now, second_now = (model.ceiling_frames for model in self.models)
        is_settled = first_now + second_now == self.budget_frames
        if is_settled and abs(first - first_now) < self.least_move_frames:
            return None
        return first, self.budget_frames - first
