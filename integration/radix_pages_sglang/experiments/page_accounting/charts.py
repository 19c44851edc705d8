"""The pictures of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from radix_pages_sglang.experiments.page_accounting.accounting import Account, Row
from radix_pages_sglang.experiments.page_accounting.findings import honest, is_of, percent
from radix_pages_sglang.experiments.page_accounting.null import Key, Null, Shape, kept_tokens
from radix_pages_sglang.experiments.page_accounting.quality import EQUAL_MEMORY, FULL, LEVELS, Quality
from radix_pages_sglang.experiments.page_accounting.strategies import PAGE_TOKENS, RULES, TREE, Rule
from radix_pages_sglang.experiments.results import Chart, Series


def charts(account: Account, shape: Shape, quality: Quality, expected: Mapping[Key, float]) -> list[Chart]:
    rows = account.rows
    return [
        *(_ceiling_chart(rows, shape, expected, frame_pages) for frame_pages in (1, 4)),
        _perplexity_chart(rows, quality),
        Chart(
            "Attention that goes to what is kept",
            "ceiling on tokens kept",
            "share of the continuation's attention to the prefix",
            [
                _line(honest(rows), rule, lambda row: row["attention_mass"])
                for rule in RULES
                if rule.name in CHARTED or rule.name == "matched-random, shared mask"
            ],
        ),
    ]


CHARTED = (
    "h2o, per head",
    "h2o, union",
    "h2o, shared mask",
    "h2o-mean, shared mask",
    "streaming, shared mask",
    "aligned, shared mask",
)


def _line(rows: Sequence[Row], rule: Rule, value: Callable[[Row], float | None], frame_pages: int = 1) -> Series:
    own = sorted(
        (row for row in rows if is_of(row, rule) and row["frame_pages"] == frame_pages),
        key=lambda row: row["ceiling"],
    )
    return Series(rule.name, [row["ceiling"] for row in own], [value(row) for row in own])


def _ceiling_chart(rows: Sequence[Row], shape: Shape, expected: Mapping[Key, float], frame_pages: int) -> Chart:
    pages = shape.tokens / PAGE_TOKENS
    ceilings = sorted({row["ceiling"] for row in rows})
    union = next(rule for rule in RULES if rule.name == "h2o, union")
    lines = [
        _line(honest(rows), rule, lambda row: 100 * row["pages_freed"] / pages, frame_pages)
        for rule in (*RULES, TREE)
        if rule.name in CHARTED or rule is TREE
    ]
    matched = [Null.matched(shape.tokens, kept_tokens(shape.tokens, ceiling)) for ceiling in ceilings]
    together = [expected[union.strategy, union.aggregation, ceiling, frame_pages] for ceiling in ceilings]
    lines += [
        Series(
            "matched null, one set",
            ceilings,
            [100 * null.expected_pages(frame_pages) / pages for null in matched],
            is_dashed=True,
        ),
        Series("matched null, union", ceilings, [100 * value / pages for value in together], is_dashed=True),
    ]
    size = "pages of 16 tokens" if frame_pages == 1 else f"frames of {frame_pages} pages"
    return Chart(f"Memory that comes free in {size}", "ceiling on tokens kept", "% of the requests' memory", lines)


def _perplexity_chart(rows: Sequence[Row], quality: Quality) -> Chart:
    """Perplexity over physical memory: at equal pages held, and of H2O as it is, which holds nearly all of them."""
    lines = []
    for rule in EQUAL_MEMORY:
        if rule.name in CHARTED:
            variants = [(rule.name, level) for level in sorted(LEVELS)]
            there = [variant for variant in variants if quality.perplexity(variant) is not None]
            lines.append(
                Series(
                    rule.name,
                    [percent(quality.pages[variant]) for variant in there],
                    [quality.perplexity(variant) for variant in there],
                )
            )
    for name in ("h2o, shared mask", "h2o, union"):
        rule = next(rule for rule in RULES if rule.name == name)
        own = [row for row in honest(rows) if is_of(row, rule) and row["frame_pages"] == 1 and row["perplexity"]]
        own.sort(key=lambda row: row["held_percent"])
        held, found = [row["held_percent"] for row in own], [row["perplexity"] for row in own]
        lines.append(Series(f"{name}, at its ceilings", held, found, is_dashed=True))
    lines.append(Series("full cache", [100.0], [quality.perplexity(FULL)]))
    return Chart("What physical memory is worth", "pages held, % of the request's", "perplexity", lines)
