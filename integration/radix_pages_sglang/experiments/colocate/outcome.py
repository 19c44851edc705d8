"""What is shared, how fast things are, what counts, and what came of one run, by replay or on real servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radix_pages_sglang.experiments.colocate.broker import Lend
from radix_pages_sglang.experiments.colocate.streams import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Memory:
    """What the models share: `budget_frames` frames of so many pages, and what a token takes in bytes."""

    budget_frames: int
    pages_per_frame: int
    token_bytes: int

    @property
    def frame_bytes(self) -> int:
        return self.pages_per_frame * PAGE_TOKENS * self.token_bytes


@dataclass(frozen=True, slots=True)
class Speeds:
    """What things take, in seconds (modelled)."""

    prefill_tokens_per_second: float
    decode_step_seconds: float
    map_frame_seconds: float = 0.0
    unmap_frame_seconds: float = 0.0
    copy_page_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """What counts: requests that arrive in [warm_seconds, end_seconds); a first token within `limit_seconds` is
    good."""

    warm_seconds: float
    end_seconds: float
    limit_seconds: float

    def counts(self, seconds: float) -> bool:
        return self.warm_seconds <= seconds < self.end_seconds


@dataclass(frozen=True, slots=True)
class Served:
    """How one request fared; `first_token_seconds` None says that it failed, and `problem` why, where a server said
    so."""

    arrived: float
    prompt_tokens: int
    hit_tokens: int = 0
    first_token_seconds: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """Frames of each model that have memory, and its ceilings, at one moment."""

    seconds: float
    committed: tuple[int, int]
    ceilings: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rule did with both streams, of all that counts together."""

    hit_tokens: int
    prompt_tokens: int
    requests: int
    good: int
    failed_requests: int
    failed_commits: int
    retracted: int
    seconds: float
    first_token_seconds: tuple[float, ...]
    lend_seconds: tuple[float, ...]
    evicted_pages: int
    moved_pages: int
    samples: tuple[Sample, ...]
    problems: tuple[str, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were cached, over all prompt tokens of both models."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def goodput(self) -> float:
        """Requests a second whose first token came in time."""
        return self.good / self.seconds

    def lent_frames(self, shares: tuple[int, int]) -> float:
        """Frames that models have beyond their share of a static split, both together, on average over time."""
        counted = [
            sum(max(has - own, 0) for has, own in zip(one.committed, shares, strict=True)) for one in self.samples
        ]
        return sum(counted) / len(counted)


def outcome(
    served: Iterable[Served],
    lends: Sequence[Lend],
    samples: Iterable[Sample],
    judged: Judged,
    *,
    failed_commits: int,
    lost: int = 0,
    retracted: int = 0,
    evicted_pages: int = 0,
    moved_pages: int = 0,
) -> Outcome:
    """Take together what counts. `lost` requests had their first token and never their last."""
    counted = [one for one in served if judged.counts(one.arrived)]
    firsts = tuple(one.first_token_seconds for one in counted if one.first_token_seconds is not None)
    return Outcome(
        hit_tokens=sum(one.hit_tokens for one in counted),
        prompt_tokens=sum(one.prompt_tokens for one in counted),
        requests=len(counted),
        good=sum(first <= judged.limit_seconds for first in firsts),
        failed_requests=len(counted) - len(firsts) + lost,
        failed_commits=failed_commits,
        retracted=retracted,
        seconds=judged.end_seconds - judged.warm_seconds,
        first_token_seconds=firsts,
        lend_seconds=tuple(lend.seconds for lend in lends if judged.counts(lend.start)),
        evicted_pages=evicted_pages,
        moved_pages=moved_pages,
        samples=tuple(one for one in samples if judged.counts(one.seconds)),
        problems=tuple(one.problem for one in counted if one.problem),
    )
