"""What the kept memory is worth: perplexity and attention, at equal budgets and at equal physical memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radix_pages_sglang.experiments.page_accounting.null import Shape, kept_tokens
from radix_pages_sglang.experiments.page_accounting.strategies import (
    CHOOSERS,
    RULES,
    SINKS,
    Attention,
    Kept,
    Rule,
    pages_empty,
    units,
)
from radix_pages_sglang.experiments.page_accounting.verdict import mean_interval

LEVELS = (0.60, 0.40, 0.25)
"""Ceilings at which perplexity is measured."""

FULL = ("full", 1.0)

Variant = tuple[str, float]
"""A chooser's name and a ceiling on tokens, or a rule's name and one on physical memory; FULL is the whole cache."""

EQUAL_MEMORY = tuple(
    rule
    for rule in RULES
    if rule.name
    in {
        "h2o, per head",
        "h2o, union",
        "h2o, shared mask",
        "h2o-mean, shared mask",
        "random, shared mask",
        "streaming, shared mask",
        "aligned, per head",
        "aligned, shared mask",
    }
)
"""Rules that are also given just so many tokens that the pages they hold stay below the ceiling."""


@dataclass(slots=True)
class Quality:
    """What was measured over all texts.

    `losses` are mean negative log-likelihoods by variant, one for each text; a variant that no budget can reach in
    some text is missing. `tokens` are the tokens kept (of `EQUAL_MEMORY`) and `pages` the share of pages then held.
    """

    losses: dict[Variant, list[float]] = field(default_factory=dict)
    tokens: dict[Variant, list[float]] = field(default_factory=dict)
    pages: dict[Variant, list[float]] = field(default_factory=dict)
    unreachable: set[Variant] = field(default_factory=set)

    def perplexity(self, variant: Variant) -> float | None:
        losses = self.losses.get(variant)
        if not losses or variant in self.unreachable:
            return None
        return float(np.exp(np.mean(losses)))

    def against(self, variant: Variant, other: Variant) -> tuple[float, float, float] | None:
        """Perplexity of `variant` over that of `other`: the ratio and its 95% interval, paired by text."""
        if self.perplexity(variant) is None or self.perplexity(other) is None:
            return None
        logs = np.array(self.losses[variant]) - np.array(self.losses[other])
        low, high = mean_interval(logs)
        return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


Losses = Callable[[Sequence[Kept]], NDArray[np.float64]]
"""Losses [variants, tokens] of one text's continuation, for what each variant keeps."""


def measure(quality: Quality, text: Attention, shape: Shape, levels: Sequence[float], losses: Losses) -> None:
    """Add one text to `quality`."""
    variants: dict[Variant, Kept] = {FULL: np.ones((1, 1, text.num_tokens), dtype=np.bool_)}
    for level in levels:
        for name, choose in CHOOSERS.items():
            variants[name, level] = choose(text, kept_tokens(text.num_tokens, level))
        for rule in EQUAL_MEMORY:
            variant = (rule.name, level)
            count = tokens_within(rule, text, shape, level)
            if count is None:
                quality.unreachable.add(variant)
                continue
            variants[variant] = CHOOSERS[rule.choice](text, count)
            quality.tokens.setdefault(variant, []).append(float(variants[variant].mean()))
            quality.pages.setdefault(variant, []).append(held_pages(rule, variants[variant], shape))
    for variant, row in zip(variants, losses(list(variants.values())), strict=True):
        quality.losses.setdefault(variant, []).append(float(row.mean()))


def held_pages(rule: Rule, kept: Kept, shape: Shape) -> float:
    """The share of pages that `rule` holds for what is kept."""
    return 1.0 - float(pages_empty(units(kept, rule.spans, shape.layers, shape.kv_heads)).mean())


def tokens_within(rule: Rule, text: Attention, shape: Shape, memory: float) -> int | None:
    """The most tokens that `rule` may keep (of each set) for its pages to stay within `memory` of all; None when even
    the fewest do not. More tokens never hold fewer pages, so halving finds it."""
    choose = CHOOSERS[rule.choice]
    fewest, too_many = SINKS + 2, text.num_tokens + 1
    if held_pages(rule, choose(text, fewest), shape) > memory:
        return None
    while too_many - fewest > 1:
        middle = (fewest + too_many) // 2
        if held_pages(rule, choose(text, middle), shape) <= memory:
            fewest = middle
        else:
            too_many = middle
    return fewest


def attention_mass(future: NDArray[np.float32], kept: Kept) -> float:
    """Of the attention that the continuation pays to the whole prefix, the share that goes to what is kept.

    `future` is [layers, query heads, tokens]; the mean is over layers and heads.
    """
    layers, heads, tokens = future.shape
    if 1 < kept.shape[1] < heads:
        kept = np.repeat(kept, heads // kept.shape[1], axis=1)
    mask = np.broadcast_to(kept, (layers, heads, tokens))
    return float((np.where(mask, future, 0).sum(axis=-1) / future.sum(axis=-1)).mean())
