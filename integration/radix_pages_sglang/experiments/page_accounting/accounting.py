"""Every rule, ceiling and allocator: one row each, with what chance would free and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radix_pages_sglang.experiments.page_accounting import chats
from radix_pages_sglang.experiments.page_accounting.allocators import (
    MODELLED,
    OURS,
    SLAB,
    Outcome,
    drive,
    modelled,
    pages_freed_twice,
    sample,
)
from radix_pages_sglang.experiments.page_accounting.measuring import Measured
from radix_pages_sglang.experiments.page_accounting.null import FRAME_PAGES, Key, Shape, kept_tokens, null_of
from radix_pages_sglang.experiments.page_accounting.strategies import (
    CHOOSERS,
    PAGE_TOKENS,
    RULES,
    TREE,
    Kept,
    Rule,
    in_empty_frames,
    pages_empty,
    units,
)
from radix_pages_sglang.experiments.page_accounting.verdict import interval, verdict

LLAMA_TOKEN_BYTES = 16 * 8 * 64 * 2 * 2
"""Keys and values of a token in Llama-3.2-1B: 16 layers, 8 KV heads of 64, bfloat16."""

MIB = 1 << 20

Row = dict[str, Any]


class Disagreement(RuntimeError):
    """Two honest accounts of the same memory differ: a bug here or in an allocator."""


@dataclass(frozen=True, slots=True)
class Case:
    """One rule at one ceiling: `kept` is [texts, units of a request, tokens]."""

    rule: Rule
    ceiling: float
    kept: Kept

    def pages_by_text(self, frame_pages: int) -> NDArray[np.float64]:
        """Pages of a request in wholly empty frames, the mean of its units."""
        freed = in_empty_frames(pages_empty(self.kept), frame_pages)
        by_text: NDArray[np.float64] = freed.sum(axis=2).mean(axis=1)
        return by_text


def cases(measured: Measured, shape: Shape, ceilings: Sequence[float], seed: int) -> Iterator[Case]:
    """All of them, our tree's last."""
    for ceiling in ceilings:
        count = kept_tokens(shape.tokens, ceiling)
        chosen: dict[str, list[Kept]] = {}
        for rule in RULES:
            if rule.choice not in chosen:
                chosen[rule.choice] = [CHOOSERS[rule.choice](text, count) for text in measured.attentions]
            kept = [units(each, rule.spans, shape.layers, shape.kv_heads) for each in chosen[rule.choice]]
            yield Case(rule, ceiling, np.stack(kept))
        yield Case(TREE, ceiling, chats.evicted(measured.tokens, count, seed)[:, None])


def outcomes(case: Case, tokens: Sequence[Sequence[int]], shape: Shape, seed: int) -> list[tuple[Outcome, Any]]:
    """What each allocator does in `case`, with the pages it frees in each text.

    Raises Disagreement when ours or the slabs give back anything but the frames without a kept page.
    """
    flat = case.kept.reshape(-1, shape.tokens)
    few = sample(flat)
    found = []
    for outcome in drive(few, case.rule.spans):
        if outcome.allocator in (OURS, SLAB):
            empty = in_empty_frames(pages_empty(few), outcome.frame_pages).sum(axis=1)
            if not np.array_equal(outcome.pages_freed, empty):
                raise Disagreement(f"{outcome.allocator} in {case.rule.name} at {case.ceiling}: not the empty frames")
        # A sample stands for all where a request has units of its own for each layer or head.
        found.append((outcome, case.pages_by_text(outcome.frame_pages) if few is not flat else outcome.pages_freed))
    for outcome in modelled(flat, case.rule.spans):
        found.append((outcome, outcome.pages_freed.reshape(len(case.kept), -1).mean(axis=1)))
    if case.rule is TREE:
        count = kept_tokens(shape.tokens, case.ceiling)
        packed = [chats.moved(tokens, count, seed, frame_pages) for frame_pages in FRAME_PAGES]
        found += [(outcome, outcome.pages_freed) for outcome in packed]
    return found


def rows_of(
    case: Case,
    found: Sequence[tuple[Outcome, Any]],
    shape: Shape,
    expected: Mapping[Key, float],
    measured: Measured,
) -> list[Row]:
    """The rows of one case; counts are means for a request of `shape.tokens` tokens."""
    rule, ceiling = case.rule, case.ceiling
    null = null_of(rule, shape, kept_tokens(shape.tokens, ceiling))
    flat = case.kept.reshape(-1, shape.tokens)
    given = {frame: float(null.expected_given(frame, flat).mean()) for frame in FRAME_PAGES}
    evicted = shape.tokens - float(flat.sum(axis=1).mean())
    rows = []
    for outcome, by_text in found:
        chance = expected[rule.strategy, rule.aggregation, ceiling, outcome.frame_pages]
        lower, upper = interval(by_text)
        freed = float(np.mean(by_text))
        num_driven = len(outcome.pages_freed)
        rows.append(
            {
                "strategy": rule.strategy,
                "aggregation": rule.aggregation,
                "ceiling": ceiling,
                "frame_pages": outcome.frame_pages,
                "allocator": outcome.allocator,
                "is_modelled": outcome.allocator in MODELLED,
                "tokens_evicted": round(evicted, 2),
                "pages_freed": round(freed, 4),
                "held_percent": round(outcome.held_percent, 3),
                "os_resident_percent": _rounded(outcome.os_resident_percent, 3),
                "live_tokens_lost": round(outcome.live_tokens_lost / num_driven, 2),
                "tokens_copied": round(outcome.tokens_copied / num_driven, 2),
                "llama_mib_returned": round(freed * PAGE_TOKENS * LLAMA_TOKEN_BYTES / MIB, 3),
                "expected_empty": chance,
                "expected_given_kept": float(f"{given[outcome.frame_pages]:.4g}"),
                "interval": [round(lower, 4), _rounded(upper if np.isfinite(upper) else None, 4)],
                "verdict": verdict(by_text, chance),
                "perplexity": _rounded(measured.quality.perplexity((rule.choice, ceiling)), 4),
                "attention_mass": _rounded(measured.mass((rule.choice, ceiling)), 4),
            }
        )
    return rows


def _rounded(value: float | None, places: int) -> float | None:
    return None if value is None else round(value, places)


@dataclass(slots=True)
class Account:
    """All rows, and what was checked on the way.

    `os_off_frames` is the furthest that the operating system's count was from the ledger, in frames.
    `windows_unequal` counts texts and ceilings in which an aligned window or our tree freed other than exactly what
    it evicted. `twice` are pages that stock's paged pool holds free more than once when a shared mask evicts again.
    """

    rows: list[Row]
    os_off_frames: float = 0.0
    windows_unequal: int = 0
    twice: int = 0


def account(
    measured: Measured,
    shape: Shape,
    ceilings: Sequence[float],
    expected: Mapping[Key, float],
    seed: int,
    on_case: Callable[[], None],
) -> Account:
    """Drive everything; `on_case` is called after each rule at each ceiling."""
    result = Account([])
    shared: list[Kept] = []
    for case in cases(measured, shape, ceilings, seed):
        found = outcomes(case, measured.tokens, shape, seed)
        result.rows += rows_of(case, found, shape, expected, measured)
        far = [outcome.os_off_frames for outcome, _ in found if outcome.os_off_frames is not None]
        result.os_off_frames = max(result.os_off_frames, *far)
        if case.rule.strategy in ("aligned", TREE.strategy):
            by_text = case.pages_by_text(1) * PAGE_TOKENS
            result.windows_unequal += int((by_text != (~case.kept).sum(axis=2).mean(axis=1)).sum())
        if case.rule.name == "h2o, shared mask":
            shared.append(case.kept[:, 0])
        on_case()
    if len(shared) > 1:
        result.twice = pages_freed_twice(shared[0], shared[1])
    return result
