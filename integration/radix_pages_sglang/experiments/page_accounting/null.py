"""What chance would free: the expected number of empty pages when the kept tokens lie at random.

The matched null: a request keeps its first `sinks` tokens, its last `recent` ones, and `middle_kept` of the
`middle` tokens between, all choices equally likely. A run of g tokens inside the middle is then empty with
probability C(middle - g, middle_kept) / C(middle, middle_kept), the hypergeometric one of drawing none of them; a run
that touches sinks or recent window never is. Where a unit of memory holds the union of several sets, chosen
independently of each other, that probability is raised to their number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radix_pages_sglang.experiments.page_accounting.strategies import (
    PAGE_TOKENS,
    RULES,
    SINKS,
    TREE,
    Kept,
    Rule,
    sets_in_a_unit,
)
from radix_pages_sglang.serve import CommandError

FRAME_PAGES = (1, 4, 64, 128)
CEILINGS = (0.60, 0.55, 0.50, 0.45, 0.40, 0.35, 0.30, 0.25)

FORMULA = (
    "pages of a request in wholly empty frames: frame_pages * n * p**sets, where n is the number of frames that lie "
    "wholly between the sinks and the recent window, p = C(middle - g, middle_kept) / C(middle, middle_kept), "
    "g = 16 * frame_pages tokens, recent = floor(kept / 2), middle = tokens - sinks - recent and middle_kept = kept "
    "- sinks - recent. random and tree have neither sinks nor recent window. Sets of a union are independent."
)


@dataclass(frozen=True, slots=True)
class Null:
    """Kept tokens at random; `sets` are the independently chosen sets whose union a unit of memory holds."""

    tokens: int
    kept: int
    recent: int
    sinks: int
    sets: int = 1

    @classmethod
    def matched(cls, tokens: int, kept: int, sets: int = 1) -> Null:
        """With H2O's recent window, half of what is kept, and the sinks."""
        return cls(tokens, kept, kept // 2, min(SINKS, kept - kept // 2), sets)

    @classmethod
    def uniform(cls, tokens: int, kept: int) -> Null:
        """Any tokens."""
        return cls(tokens, kept, 0, 0)

    @property
    def middle(self) -> int:
        """Tokens that may be kept or not."""
        return self.tokens - self.sinks - self.recent

    @property
    def middle_kept(self) -> int:
        return self.kept - self.sinks - self.recent

    def runs(self, run_tokens: int) -> int:
        """Aligned runs of so many tokens that lie wholly in the middle."""
        return max((self.tokens - self.recent) // run_tokens - -(-self.sinks // run_tokens), 0)

    def empty_probability(self, run_tokens: int) -> float:
        """That a run in the middle is empty in all sets."""
        from scipy.stats import hypergeom

        return float(hypergeom.pmf(0, self.middle, run_tokens, self.middle_kept)) ** self.sets

    def expected_pages(self, frame_pages: int) -> float:
        """Mean number of a request's pages in wholly empty frames."""
        run = frame_pages * PAGE_TOKENS
        runs = self.runs(run)
        return frame_pages * runs * self.empty_probability(run) if runs else 0.0

    def expected_given(self, frame_pages: int, kept: Kept) -> NDArray[np.float64]:
        """The same for each unit of `kept` [units, tokens], when what it keeps in the middle, the union of all sets,
        lies there at random: this leaves out whatever makes sets alike or keeps them out of sinks."""
        from scipy.stats import hypergeom

        run = frame_pages * PAGE_TOKENS
        in_middle = kept[:, self.sinks : self.tokens - self.recent].sum(axis=1)
        if not self.runs(run):
            return np.zeros(len(kept))
        expected: NDArray[np.float64] = hypergeom.pmf(0, self.middle, run, in_middle) * self.runs(run) * frame_pages
        return expected

    def deviation_pages(self, frame_pages: int) -> float:
        """The standard deviation of that number from request to request."""
        run = frame_pages * PAGE_TOKENS
        runs = self.runs(run)
        if not runs:
            return 0.0
        one, two = self.empty_probability(run), self.empty_probability(2 * run) if runs > 1 else 0.0
        variance = runs * one + runs * (runs - 1) * two - (runs * one) ** 2
        return float(frame_pages * max(variance, 0.0) ** 0.5)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a prediction depends on, all of it known before a model runs."""

    tokens: int = 2048
    layers: int = 30
    query_heads: int = 9
    kv_heads: int = 3
    page_tokens: int = PAGE_TOKENS
    sinks: int = SINKS


def kept_tokens(tokens: int, ceiling: float) -> int:
    """Tokens that a ceiling leaves room for."""
    return int(tokens * ceiling + 1e-9)


def null_of(rule: Rule, shape: Shape, kept: int) -> Null:
    """The null that `rule` is compared with."""
    if rule.strategy in ("random", TREE.strategy):
        return Null.uniform(shape.tokens, kept)
    if rule.strategy == "aligned":
        kept -= kept % PAGE_TOKENS
    return Null.matched(shape.tokens, kept, sets_in_a_unit(rule, shape.layers, shape.query_heads, shape.kv_heads))


def certain_pages(rule: Rule, shape: Shape, kept: int) -> int | None:
    """Pages that `rule` frees for sure, whatever the text says; None where that depends on the text."""
    if rule.strategy in ("aligned", TREE.strategy):
        return shape.tokens // PAGE_TOKENS - kept // PAGE_TOKENS
    if rule.strategy == "streaming":
        return Null(shape.tokens, kept, kept - SINKS, SINKS).runs(PAGE_TOKENS)
    return None


def prediction(
    shape: Shape, ceilings: Iterable[float] = CEILINGS, frames: Iterable[int] = FRAME_PAGES
) -> list[dict[str, Any]]:
    """One row for each rule, ceiling and frame size: what the matched null expects. Reads no model and no text."""
    rows = []
    frames = tuple(frames)
    for rule in (*RULES, TREE):
        for ceiling in ceilings:
            kept = kept_tokens(shape.tokens, ceiling)
            null = null_of(rule, shape, kept)
            certain = certain_pages(rule, shape, kept)
            for frame_pages in frames:
                rows.append(
                    {
                        "strategy": rule.strategy,
                        "aggregation": rule.aggregation,
                        "ceiling": ceiling,
                        "frame_pages": frame_pages,
                        "sets": null.sets,
                        "kept": null.kept,
                        "recent": null.recent,
                        "middle_kept": null.middle_kept,
                        "expected_empty": _rounded(null.expected_pages(frame_pages)),
                        "deviation": _rounded(null.deviation_pages(frame_pages)),
                        "certain": certain if frame_pages == 1 else None,
                    }
                )
    return rows


def _rounded(value: float) -> float:
    """Six digits; what no count of pages could show is nothing."""
    return float(f"{value:.6g}") if value > 1e-12 else 0.0


def write_prediction(path: Path, shape: Shape, provenance: Mapping[str, str]) -> None:
    """Write what is expected, to be committed before any model runs."""
    head = {
        "what": "expected empty pages per request under the matched null; "
        "computed without a model, before the run it is compared with",
        "formula": FORMULA,
        "provenance": {key: value for key, value in provenance.items() if key != "seed"},
        "shape": asdict(shape),
    }
    rows = ",\n  ".join(json.dumps(row) for row in prediction(shape))
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n')


Key = tuple[str, str, float, int]
"""Strategy, aggregation, ceiling, pages a frame."""


def by_key(rows: Sequence[Mapping[str, Any]]) -> dict[Key, float]:
    """Expected empty pages of each row."""
    return {
        (row["strategy"], row["aggregation"], row["ceiling"], row["frame_pages"]): row["expected_empty"]
        for row in rows
    }


def read_prediction(path: Path, shape: Shape) -> dict[Key, float] | None:
    """What `path` expects; None when it was written for another shape. CommandError when it is no prediction."""
    try:
        written = json.loads(path.read_text())
        return by_key(written["rows"]) if written["shape"] == asdict(shape) else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"--expected {path} is no prediction ({error}): write one with --predict {path.name}"
        ) from error
