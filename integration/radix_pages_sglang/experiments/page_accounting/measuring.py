"""Reads every text once and keeps what the accounts need of it: scores, attention masses, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radix_pages_sglang.experiments.page_accounting import quality
from radix_pages_sglang.experiments.page_accounting.null import Shape, kept_tokens
from radix_pages_sglang.experiments.page_accounting.quality import Quality, Variant
from radix_pages_sglang.experiments.page_accounting.reading import Prefix, Reader
from radix_pages_sglang.experiments.page_accounting.strategies import CHOOSERS, Attention, Kept
from radix_pages_sglang.experiments.page_accounting.texts import Text


@dataclass(slots=True)
class Measured:
    """All texts, in their order: their tokens, what their keys were worth, and what keeping some of them is worth."""

    tokens: list[Sequence[int]] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    masses: dict[Variant, list[float]] = field(default_factory=dict)
    quality: Quality = field(default_factory=Quality)

    def mass(self, variant: Variant) -> float | None:
        """The mean over texts; None where it was not measured."""
        found = self.masses.get(variant)
        return float(np.mean(found)) if found else None


def read_texts(
    reader: Reader,
    texts: Sequence[Text],
    shape: Shape,
    ceilings: Sequence[float],
    levels: Sequence[float],
    seed: int,
    on_text: Callable[[], None],
) -> Measured:
    """Read `texts`, each of `shape.tokens` tokens and a continuation. Perplexity is measured at `levels`."""
    measured = Measured()
    for index, text in enumerate(texts):
        own, rest = text.tokens[: shape.tokens], text.tokens[shape.tokens :]
        prefix = reader.read(own)
        order = np.random.default_rng((seed, index)).random(shape.tokens, dtype=np.float32)
        attention = Attention(prefix.attention(), shape.kv_heads, order)
        measured.tokens.append(own)
        measured.attentions.append(attention)
        _add_masses(measured, attention, reader.future(prefix, rest), ceilings)
        quality.measure(measured.quality, attention, shape, levels, _losses(reader, prefix, rest))
        on_text()
    return measured


def _add_masses(
    measured: Measured, attention: Attention, future: NDArray[np.float32], ceilings: Sequence[float]
) -> None:
    for ceiling in ceilings:
        for name, choose in CHOOSERS.items():
            kept = choose(attention, kept_tokens(attention.num_tokens, ceiling))
            measured.masses.setdefault((name, ceiling), []).append(quality.attention_mass(future, kept))


def _losses(reader: Reader, prefix: Prefix, rest: Sequence[int]) -> quality.Losses:
    def losses(kept: Sequence[Kept]) -> NDArray[np.float64]:
        return reader.losses(prefix, rest, kept)

    return losses
