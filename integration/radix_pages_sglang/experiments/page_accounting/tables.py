"""The tables of the report."""

from __future__ import annotations

from collections.abc import Sequence

from radix_pages_sglang.experiments.page_accounting.accounting import LLAMA_TOKEN_BYTES, MIB, Account, Row
from radix_pages_sglang.experiments.page_accounting.allocators import OURS, SGLANG_TOKEN
from radix_pages_sglang.experiments.page_accounting.chats import OURS_MOVING
from radix_pages_sglang.experiments.page_accounting.findings import REFERENCE, asked_pages, honest, is_of, percent
from radix_pages_sglang.experiments.page_accounting.null import FRAME_PAGES, Shape
from radix_pages_sglang.experiments.page_accounting.quality import EQUAL_MEMORY, FULL, LEVELS, Quality
from radix_pages_sglang.experiments.page_accounting.strategies import PAGE_TOKENS, RULES, TREE
from radix_pages_sglang.experiments.results import Table, Value


def tables(account: Account, shape: Shape, quality: Quality, model_token_bytes: int) -> list[Table]:
    rows = account.rows
    return [
        _pages_table(rows, shape),
        _frames_table(rows),
        *(_allocators_table(rows, level) for level in LEVELS if any(row["ceiling"] == level for row in rows)),
        _memory_table(quality),
        _quality_table(rows, quality),
        _bytes_table(rows, shape, model_token_bytes),
    ]


def _pages_table(rows: Sequence[Row], shape: Shape) -> Table:
    pages = shape.tokens // PAGE_TOKENS
    found: list[list[Value]] = []
    for row in honest(rows):
        if row["frame_pages"] == 1:
            lower, upper = row["interval"]
            found.append(
                [
                    *(row["strategy"], row["aggregation"], row["ceiling"]),
                    *(row["tokens_evicted"], row["pages_freed"], lower, upper),
                    *(row["expected_empty"], row["expected_given_kept"], row["verdict"]),
                    round(100 * row["pages_freed"] / asked_pages(row["ceiling"], shape), 2),
                ]
            )
    return Table(
        f"Pages that come free, of the {pages} of a request",
        (
            *("strategy", "aggregation", "ceiling", "tokens evicted", "pages freed", "from", "to"),
            *("null", "null given kept", "verdict", "% of what was asked"),
        ),
        sorted(found, key=lambda row: _order(str(row[0]), str(row[1]))),
        "Means over texts for a request, in pages of 16 tokens; where a request has pages for each layer or head, "
        "means over those. from, to: 95% t-interval. null: the committed expectation; null given kept: the same when "
        "what each unit keeps between sinks and recent window is known and only its places are chance. Last column: "
        "pages freed over pages that the ceiling asks for.",
    )


def _order(strategy: str, aggregation: str) -> int:
    names = [(rule.strategy, rule.aggregation) for rule in (*RULES, TREE)]
    return names.index((strategy, aggregation))


def _frames_table(rows: Sequence[Row]) -> Table:
    found: list[list[Value]] = []
    for rule in (*RULES, TREE):
        allocators = (OURS, OURS_MOVING) if rule is TREE else (OURS,)
        for allocator in allocators:
            own = [row for row in rows if is_of(row, rule) and row["allocator"] == allocator]
            for ceiling in [level for level in LEVELS if any(row["ceiling"] == level for row in own)]:
                by_frame = {row["frame_pages"]: row for row in own if row["ceiling"] == ceiling}
                found.append(
                    [
                        rule.strategy,
                        rule.aggregation + (", moved together" if allocator == OURS_MOVING else ""),
                        ceiling,
                        *(round(100 - by_frame[frame]["held_percent"], 2) for frame in FRAME_PAGES),
                        *(by_frame[frame]["verdict"] for frame in FRAME_PAGES),
                    ]
                )
    frames = [str(frame) for frame in FRAME_PAGES]
    return Table(
        "Memory that can be given back, by frame size",
        (
            *("strategy", "aggregation", "ceiling"),
            *(f"% at {frame}" for frame in frames),
            *(f"verdict at {frame}" for frame in frames),
        ),
        found,
        "Per cent of the requests' memory in frames of 1, 4, 64 or 128 pages without a held page. 2 MiB are 1 page "
        "of Llama-3-8B and 4 of Llama-3.2-1B if all layers of a page stand together, 64 and 128 pages if each layer "
        "has its own buffers (as in SGLang). A frame of 128 pages is a whole request here. Every request begins on a "
        "frame of 128: the best case. Our tree without moves is a tree for each text, with moves one for all.",
    )


def _allocators_table(rows: Sequence[Row], ceiling: float) -> Table:
    shown = ("h2o, shared mask", "h2o, union", "streaming, shared mask", "aligned, shared mask", TREE.name)
    found: list[list[Value]] = []
    for row in rows:
        if row["ceiling"] == ceiling and f"{row['strategy']}, {row['aggregation']}" in shown:
            found.append(
                [
                    *(row["strategy"], row["aggregation"]),
                    row["allocator"] + (" (modelled)" if row["is_modelled"] else ""),
                    *(row["frame_pages"], row["tokens_evicted"], row["pages_freed"]),
                    *(row["held_percent"], row["os_resident_percent"]),
                    *(row["live_tokens_lost"], row["tokens_copied"], row["verdict"]),
                ]
            )
    return Table(
        f"The same evictions in every allocator, ceiling {ceiling:.2f}",
        (
            *("strategy", "aggregation", "allocator", "pages a frame", "tokens evicted", "pages freed", "held %"),
            *("OS resident %", "live tokens lost", "tokens copied", "verdict"),
        ),
        sorted(found, key=lambda row: (_order(str(row[0]), str(row[1])), str(row[2]))),
        f"For a request. {SGLANG_TOKEN} counts freed slots, of which other requests can use every one; pages freed "
        "are then whole runs of 16. Neither of SGLang's pools gives memory back to the system. held is by the "
        "allocator's own books. Live tokens lost are kept tokens in a page that is handed to others.",
    )


def _memory_table(quality: Quality) -> Table:
    found: list[list[Value]] = [["full cache", None, 100.0, 100.0, quality.perplexity(FULL), None, None, None]]
    for level in LEVELS:
        for rule in EQUAL_MEMORY:
            variant = (rule.name, level)
            if variant in quality.unreachable:
                found.append([rule.name, level, None, None, None, None, None, None])
            elif variant in quality.losses:
                ratio = quality.against(variant, (REFERENCE, level)) or (None, None, None)
                found.append(
                    [
                        *(rule.name, level, percent(quality.tokens[variant]), percent(quality.pages[variant])),
                        *(quality.perplexity(variant), *ratio),
                    ]
                )
    return Table(
        "What physical memory is worth: perplexity at equal pages held",
        (
            *("rule", "pages allowed", "tokens kept %", "pages held %", "perplexity"),
            *("over aligned windows", "from", "to"),
        ),
        found,
        "Each rule may keep so many tokens that its held pages (single pages of 16 tokens) stay within what is "
        "allowed, text by text. Empty cells: in some text even six tokens of each set hold more. Perplexity of the "
        "continuation; its ratio to that of aligned windows (shared mask) with a 95% interval, paired by text.",
    )


def _quality_table(rows: Sequence[Row], quality: Quality) -> Table:
    found: list[list[Value]] = []
    held = {
        (row["strategy"], row["aggregation"], row["ceiling"]): row
        for row in honest(rows)
        if row["frame_pages"] == 1 and row["strategy"] != TREE.strategy
    }
    for (strategy, aggregation, ceiling), row in held.items():
        choice = next(rule.choice for rule in RULES if is_of(row, rule))
        ratio = quality.against((choice, ceiling), FULL) or (None, None, None)
        found.append(
            [
                *(strategy, aggregation, ceiling, row["held_percent"], row["attention_mass"]),
                *(quality.perplexity((choice, ceiling)), *ratio),
            ]
        )
    return Table(
        "What the kept tokens are worth at equal budgets",
        (
            *("strategy", "aggregation", "ceiling", "pages held %", "attention mass", "perplexity"),
            *("over full cache", "from", "to"),
        ),
        sorted(found, key=lambda row: _order(str(row[0]), str(row[1]))),
        "attention mass: of the attention that the continuation pays to the whole prefix, the share that goes to "
        "kept tokens. Perplexity at some ceilings; where memory keeps the union of several sets, each head sees its "
        "own. Our tree loses nothing but time: what it evicted is computed again when a request needs it.",
    )


def _bytes_table(rows: Sequence[Row], shape: Shape, model_token_bytes: int) -> Table:
    llama, model = (size * shape.tokens / MIB for size in (LLAMA_TOKEN_BYTES, model_token_bytes))
    found: list[list[Value]] = []
    for row in honest(rows):
        if row["ceiling"] in LEVELS and row["frame_pages"] in (1, 4):
            share, asked = row["pages_freed"] * PAGE_TOKENS / shape.tokens, 1 - row["ceiling"]
            found.append(
                [
                    *(row["strategy"], row["aggregation"], row["ceiling"], row["frame_pages"]),
                    *(round(llama * asked, 2), round(llama * share, 2)),
                    *(round(model * asked, 2), round(model * share, 2)),
                ]
            )
    return Table(
        f"In bytes: MiB of a request of {shape.tokens} tokens",
        (
            *("strategy", "aggregation", "ceiling", "pages a frame", "Llama-3.2-1B asked", "Llama-3.2-1B freed"),
            *("this model asked", "this model freed"),
        ),
        sorted(found, key=lambda row: _order(str(row[0]), str(row[1]))),
        f"Llama-3.2-1B in bfloat16: {LLAMA_TOKEN_BYTES // 1024} KiB a token, its geometry only (the choices are "
        f"those of the model that was run). This model in float32: {model_token_bytes / 1024:.1f} KiB a token.",
    )
