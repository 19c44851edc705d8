"""What the rows say, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from radix_pages_sglang.experiments.page_accounting.accounting import Account, Row
from radix_pages_sglang.experiments.page_accounting.allocators import OURS, SGLANG_PAGED
from radix_pages_sglang.experiments.page_accounting.chats import OURS_MOVING
from radix_pages_sglang.experiments.page_accounting.null import FRAME_PAGES, Shape
from radix_pages_sglang.experiments.page_accounting.quality import LEVELS, Quality
from radix_pages_sglang.experiments.page_accounting.strategies import PAGE_TOKENS, RULES, Rule
from radix_pages_sglang.experiments.page_accounting.verdict import CHANCE, FEWER, MORE, ZERO

NEXT_TO_NOTHING = 0.05
"""The claim holds where, with 95% confidence, at most this share of the memory that a ceiling asks for comes free."""

CLAIM = (
    "The claim is that evicting scattered tokens frees next to no pages. It is said to hold where the upper end of "
    "the 95% interval of the pages that come free is at most 5% of the pages that the ceiling asks for."
)

REFERENCE = "aligned, shared mask"
"""The rule that others are compared with at equal physical memory."""


def honest(rows: Iterable[Row]) -> list[Row]:
    """The rows of our allocator, which gives back exactly the frames without a held page."""
    return [row for row in rows if row["allocator"] == OURS]


def asked_pages(ceiling: float, shape: Shape) -> float:
    """Pages of a request that a ceiling asks for."""
    return (1 - ceiling) * shape.tokens / PAGE_TOKENS


def holds(row: Row, shape: Shape) -> bool:
    """Whether the claim holds in a row, by CLAIM."""
    upper = row["interval"][1]
    return row["verdict"] == ZERO or (
        upper is not None and upper <= NEXT_TO_NOTHING * asked_pages(row["ceiling"], shape)
    )


def claim_sentences(rows: Sequence[Row], shape: Shape) -> list[str]:
    """Where the claim holds and where not: a sentence for each scattered rule and frame size."""
    sentences = []
    for rule in (rule for rule in RULES if rule.is_scattered):
        for frame_pages in FRAME_PAGES:
            own = [row for row in honest(rows) if is_of(row, rule) and row["frame_pages"] == frame_pages]
            yes = [row for row in own if holds(row, shape)]
            no = [row for row in own if not holds(row, shape)]
            head = f"{rule.name}, {_frame(frame_pages)}: "
            if not no:
                sentences.append(f"{head}holds at every ceiling ({_shares(yes, shape)} of what was asked comes free)")
                continue
            part = f"holds at {_ceilings(yes)} ({_shares(yes, shape)}), " if yes else ""
            sentences.append(
                f"{head}{part}fails at {_ceilings(no)}: {_shares(no, shape)} of what was asked comes free"
            )
    return sentences


def percent(shares: Sequence[float]) -> float:
    """The mean of some shares, in per cent."""
    return round(100 * sum(shares) / len(shares), 2)


def is_of(row: Row, rule: Rule) -> bool:
    """Whether `row` is one of `rule`'s."""
    return bool(row["strategy"] == rule.strategy and row["aggregation"] == rule.aggregation)


def _frame(frame_pages: int) -> str:
    return "single pages" if frame_pages == 1 else f"frames of {frame_pages} pages"


def _ceilings(rows: Sequence[Row]) -> str:
    values = sorted({row["ceiling"] for row in rows}, reverse=True)
    return f"{values[0]:.2f}" if len(values) == 1 else f"{values[0]:.2f} to {values[-1]:.2f}"


def _shares(rows: Sequence[Row], shape: Shape) -> str:
    shares = [100 * row["pages_freed"] / asked_pages(row["ceiling"], shape) for row in rows]
    low, high = min(shares), max(shares)
    return f"{low:.1f}%" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f}% to {high:.1f}%"


def summary(account: Account, shape: Shape, quality: Quality) -> list[str]:
    """What came out, in sentences."""
    rows = account.rows
    counts = Counter(row["verdict"] for row in rows)
    found = [
        CLAIM,
        *(sentence for sentence in claim_sentences(rows, shape) if "single pages" in sentence),
        *_against_chance(rows),
        *_at_large_frames(rows, shape),
        f"Verdicts of all {len(rows)} rows: "
        + ", ".join(f"{name} {counts[name]}" for name in (ZERO, CHANCE, MORE, FEWER))
        + f". Of the rows of random choices, which chance must explain, {_controls(rows)}.",
        _exactness(account),
        _damage(account),
        *_equal_memory(quality),
    ]
    return found


def _against_chance(rows: Sequence[Row]) -> list[str]:
    """How many pages H2O frees beside chance: heavy hitters may stand together."""
    found = []
    for rule in (rule for rule in RULES if rule.is_scattered and rule.aggregation == "shared mask"):
        own = [row for row in honest(rows) if is_of(row, rule) and row["frame_pages"] == 1]
        parts = [
            f"{row['pages_freed']:.2f} at {row['ceiling']:.2f} "
            f"(expected {row['expected_empty']:.3g}: {row['verdict']})"
            for row in own
            if row["ceiling"] in LEVELS
        ]
        found.append(f"Pages that come free of a request with {rule.name}: {', '.join(parts)}.")
    return found


def _at_large_frames(rows: Sequence[Row], shape: Shape) -> list[str]:
    """How the claim fares at larger frames, where scattered rules and windows of one page do alike."""
    found = []
    for frame_pages in FRAME_PAGES[1:]:
        scattered = [
            row
            for row in honest(rows)
            if row["frame_pages"] == frame_pages and any(is_of(row, rule) for rule in RULES if rule.is_scattered)
        ]
        windows = [row for row in honest(rows) if row["frame_pages"] == frame_pages and row["strategy"] == "aligned"]
        moves = [row for row in rows if row["frame_pages"] == frame_pages and row["allocator"] == OURS_MOVING]
        holding = sum(holds(row, shape) for row in scattered)
        found.append(
            f"With {_frame(frame_pages)} the claim holds in {holding} of {len(scattered)} H2O cases; aligned windows "
            f"of one page then free {_shares(windows, shape)} of what was asked, our tree with moves "
            f"{_shares(moves, shape)}."
        )
    return found


def _controls(rows: Sequence[Row]) -> str:
    controls = [row for row in honest(rows) if row["strategy"] in ("random", "matched-random")]
    explained = sum(row["verdict"] in (CHANCE, ZERO) for row in controls)
    return f"{explained} of {len(controls)} are chance or zero"


def _exactness(account: Account) -> str:
    exact = "exactly" if not account.windows_unequal else f"NOT exactly, in {account.windows_unequal} texts,"
    return (
        f"Aligned windows and our tree free {exact} the pages of what they evict. The operating system's count of "
        f"resident memory is at most {account.os_off_frames:.4g} frames away from the ledger's."
    )


def _damage(account: Account) -> str:
    lost = [row for row in account.rows if row["allocator"] == SGLANG_PAGED and row["strategy"] == "h2o"]
    per_request = [row["live_tokens_lost"] for row in lost if row["aggregation"] == "shared mask"]
    return (
        "SGLang's paged pool as it is returns every page that a freed slot is in: with H2O's shared mask "
        f"{min(per_request):.0f} to {max(per_request):.0f} kept tokens of each request are then in pages it hands to "
        f"others, and evicting on to the next ceiling leaves {account.twice} pages twice in its free list. (SGLang "
        "itself never frees scattered slots there; a port of H2O would.)"
    )


def _equal_memory(quality: Quality) -> list[str]:
    """Perplexity at equal physical memory, H2O against aligned windows."""
    found = []
    for level in LEVELS:
        parts = []
        for name in ("h2o, shared mask", "h2o, per head", "h2o, union"):
            ratio = quality.against((name, level), (REFERENCE, level))
            if ratio is None:
                reason = "cannot get down to it" if (name, level) in quality.unreachable else "not measured"
                parts.append(f"{name} {reason}")
                continue
            kept = quality.tokens[name, level]
            parts.append(
                f"{name} keeps {100 * sum(kept) / len(kept):.1f}% of the tokens at {ratio[0]:.3f} times the "
                f"perplexity ({ratio[1]:.3f} to {ratio[2]:.3f})"
            )
        if (REFERENCE, level) in quality.losses:
            found.append(f"At {level:.0%} of the pages, against aligned windows: " + "; ".join(parts) + ".")
    return found


LIMITS = (
    "One model of 135 million weights and English documentation: other models and tasks may scatter differently.",
    "One eviction after the prefill, none during the continuation; H2O as published goes on evicting with every "
    "token. Kept keys keep their positions.",
    "The continuation is the next part of the same document, which leans on its last few hundred tokens: its "
    "perplexity says little about tasks that need what stands far back.",
    "cudaMallocAsync, expandable segments, VMM granules and FasterTransformer are modelled from their documentation "
    "or code, not run: there was no GPU.",
    "Copying the kept tokens together, as H2O's own code does, frees their memory whatever the pattern; serving "
    "engines with shared pools do not do it. Its cost is in `tokens_copied`.",
    "Every request's pages stand in a row: frames that hold pages of several requests free less.",
    "Resident memory is measured on two of the buffers' layers (one for layer pages, one head for head pages), and "
    "for layer and head pages on at most 64 of the units.",
)
