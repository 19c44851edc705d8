"""What a request keeps when its memory has a ceiling: one function for each way to choose.

A choice is a boolean array, True for what is kept. Its last axis are tokens; the axes before it are layers and heads,
of length 1 where they all keep the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Kept: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float32]

PAGE_TOKENS = 16
SINKS = 4
"""First tokens that StreamingLLM and the matched null always keep."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What one text's keys were worth: `scores` [layers, query heads, tokens] are running sums of post-softmax
    attention over the queries of the prefill. `order` is a fixed random number for each token."""

    scores: Floats
    num_kv_heads: int
    order: Floats

    @property
    def num_tokens(self) -> int:
        return int(self.scores.shape[-1])

    def per_head(self) -> Floats:
        """Summed over the query heads that share a KV head."""
        layers, heads, tokens = self.scores.shape
        grouped = self.scores.reshape(layers, self.num_kv_heads, heads // self.num_kv_heads, tokens)
        return grouped.sum(axis=2, dtype=np.float32)

    def per_layer(self) -> Floats:
        return self.scores.sum(axis=1, keepdims=True, dtype=np.float32)

    def shared(self) -> Floats:
        return self.scores.sum(axis=(0, 1), keepdims=True, dtype=np.float64).astype(np.float32)

    def averaged(self) -> Attention:
        """Means instead of sums: each key's score over the number of queries that came after it, itself included."""
        queries = np.arange(self.num_tokens, 0, -1, dtype=np.float32)
        return Attention(self.scores / queries, self.num_kv_heads, self.order)


def most(scores: Floats, count: int) -> Kept:
    """The `count` best along the last axis; of equal ones the first."""
    kept = np.zeros(scores.shape, dtype=np.bool_)
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    np.put_along_axis(kept, best, True, axis=-1)
    return kept


def heavy_hitters(scores: Floats, count: int) -> Kept:
    """H2O: half of `count` for the last tokens, the rest for the best of those before."""
    recent = count // 2
    before = scores.shape[-1] - recent
    kept = np.ones(scores.shape, dtype=np.bool_)
    kept[..., :before] = most(scores[..., :before], count - recent)
    return kept


def aligned_windows(scores: Floats, count: int) -> Kept:
    """The same rule over whole pages, a page's score the sum of its tokens'; at most `count` tokens."""
    pages = scores.reshape(*scores.shape[:-1], -1, PAGE_TOKENS).sum(axis=-1)
    return np.repeat(heavy_hitters(pages, count // PAGE_TOKENS), PAGE_TOKENS, axis=-1)


def streaming_window(num_tokens: int, count: int) -> Kept:
    """StreamingLLM: the first SINKS tokens and the last ones."""
    kept = np.zeros((1, 1, num_tokens), dtype=np.bool_)
    kept[..., : min(SINKS, count)] = True
    kept[..., num_tokens - max(count - SINKS, 0) :] = True
    return kept


def at_random(order: Floats, count: int) -> Kept:
    """Any `count` tokens."""
    return most(order[None, None], count)


def matched_at_random(order: Floats, count: int) -> Kept:
    """The first SINKS tokens, a recent window as long as H2O's, and any of the tokens between."""
    scores = order.copy()
    scores[:SINKS] = np.inf
    return heavy_hitters(scores[None, None], count)


Spans: TypeAlias = Literal["request", "layer", "head"]
"""What one page holds of its tokens: all layers and heads (SGLang's pool), one layer, one KV head of one layer."""

Chooser: TypeAlias = Callable[[Attention, int], Kept]


@dataclass(frozen=True, slots=True)
class Rule:
    """How to choose, and what a page spans where that is done.

    `choice` names the chooser: rules that differ only in memory share one, and with it their perplexity.
    `is_scattered` says whether it picks single tokens by score, which the claim is about.
    """

    strategy: str
    aggregation: str
    spans: Spans
    choice: str
    is_scattered: bool = False

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.aggregation}"


CHOOSERS: dict[str, Chooser] = {
    "h2o per head": lambda text, count: heavy_hitters(text.per_head(), count),
    "h2o per query head": lambda text, count: heavy_hitters(text.scores, count),
    "h2o per layer": lambda text, count: heavy_hitters(text.per_layer(), count),
    "h2o shared": lambda text, count: heavy_hitters(text.shared(), count),
    "h2o-mean per head": lambda text, count: heavy_hitters(text.averaged().per_head(), count),
    "h2o-mean shared": lambda text, count: heavy_hitters(text.averaged().shared(), count),
    "random": lambda text, count: at_random(text.order, count),
    "matched-random": lambda text, count: matched_at_random(text.order, count),
    "streaming": lambda text, count: streaming_window(text.num_tokens, count),
    "aligned shared": lambda text, count: aligned_windows(text.shared(), count),
    "aligned per head": lambda text, count: aligned_windows(text.per_head(), count),
}

RULES = (
    Rule("h2o", "per head", "head", "h2o per head", True),
    Rule("h2o", "per query head", "head", "h2o per query head", True),
    Rule("h2o", "layer mask", "layer", "h2o per layer", True),
    Rule("h2o", "per head, union of a layer", "layer", "h2o per head", True),
    Rule("h2o", "union", "request", "h2o per head", True),
    Rule("h2o", "shared mask", "request", "h2o shared", True),
    Rule("h2o-mean", "per head", "head", "h2o-mean per head", True),
    Rule("h2o-mean", "shared mask", "request", "h2o-mean shared", True),
    Rule("random", "shared mask", "request", "random"),
    Rule("matched-random", "shared mask", "request", "matched-random"),
    Rule("streaming", "shared mask", "request", "streaming"),
    Rule("aligned", "per head", "head", "aligned per head"),
    Rule("aligned", "shared mask", "request", "aligned shared"),
)
"""All but our tree, which evicts what no request uses (`chats.py`)."""

TREE = Rule("tree", "shared prefixes", "request", "tree")

AGGREGATIONS = {
    "per head": "each KV head of each layer keeps its own tokens (scores summed over its query heads) in its own "
    "pages: a layout that no engine here has",
    "per query head": "each query head chooses; a KV head keeps what any of its query heads wants, in its own pages",
    "layer mask": "scores summed over the heads of a layer, one set a layer, pages of its own for each layer",
    "per head, union of a layer": "each KV head chooses; a layer's page goes when no head keeps one of its tokens",
    "union": "each KV head of each layer chooses; SGLang's slot spans all of them and goes when none keeps the token",
    "shared mask": "scores summed over all layers and heads, one set a request: what SGLang's slots could follow",
    "shared prefixes": "chats on a common prefix; whole pages at the ends of unused branches go, oldest first",
}


def units(kept: Kept, spans: Spans, num_layers: int, num_kv_heads: int) -> Kept:
    """What stays in memory: [units, tokens], a unit being what has pages of its own.

    A token stays in a unit when any layer or head that the unit spans keeps it.
    """
    layers, heads, tokens = kept.shape
    if spans == "request":
        return _any(kept.reshape(1, layers * heads, tokens))
    if spans == "layer":
        return np.broadcast_to(_any(kept), (num_layers, tokens))
    if heads > num_kv_heads:
        kept = _any(kept.reshape(layers, num_kv_heads, -1, tokens))
    return np.broadcast_to(kept, (num_layers, num_kv_heads, tokens)).reshape(-1, tokens)


def _any(kept: Kept) -> Kept:
    """The union over the axis before the tokens."""
    union: Kept = np.any(kept, axis=-2)
    return union


def sets_in_a_unit(rule: Rule, num_layers: int, num_query_heads: int, num_kv_heads: int) -> int:
    """How many independently chosen sets share the pages of one unit."""
    if rule.choice.endswith("per query head"):
        return num_query_heads // num_kv_heads
    if rule.choice.endswith("per head"):
        return {"head": 1, "layer": num_kv_heads, "request": num_layers * num_kv_heads}[rule.spans]
    return 1


def pages_empty(kept: Kept) -> Kept:
    """Which pages nothing keeps a token of: the last axis becomes pages."""
    held: Kept = np.any(kept.reshape(*kept.shape[:-1], -1, PAGE_TOKENS), axis=-1)
    return ~held


def in_empty_frames(is_empty: Kept, frame_pages: int) -> Kept:
    """Which pages are in frames without a kept page, for units that begin on a frame; the shape stays."""
    frames = is_empty.reshape(*is_empty.shape[:-1], -1, frame_pages).all(axis=-1)
    return np.repeat(frames, frame_pages, axis=-1)
