"""The command `radix-pages experiment page-accounting`. Loads no torch before it runs."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from radix_pages_sglang.experiments.provenance import RESULTS, ROOT, provenance
from radix_pages_sglang.experiments.report import finish
from radix_pages_sglang.serve import CommandError

if TYPE_CHECKING:
    from radix_pages_sglang.experiments.page_accounting.accounting import Account
    from radix_pages_sglang.experiments.page_accounting.null import Key, Shape
    from radix_pages_sglang.experiments.page_accounting.quality import Quality
    from radix_pages_sglang.experiments.page_accounting.reading import Reader
    from radix_pages_sglang.experiments.page_accounting.texts import Text
    from radix_pages_sglang.experiments.results import Result

EXPECTED = RESULTS / "page-accounting" / "expected.json"
"""What was expected before any model ran, in a checkout."""

QUICK_TEXTS, QUICK_CEILINGS, QUICK_LEVELS = 3, (0.60, 0.40, 0.25), (0.40,)


def page_accounting(
    model: Annotated[
        Path | None, typer.Option(help="A local checkpoint; default the packaged SmolLM2-135M-Instruct.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Read this file instead of packaged documentation; may be repeated.")
    ] = None,
    texts: Annotated[int, typer.Option(min=1, max=64, help="How many texts; verdicts want 20.")] = 24,
    tokens: Annotated[int, typer.Option(min=2048, help="Tokens of a request, a multiple of 2,048.")] = 2048,
    continuation: Annotated[int, typer.Option(min=2, help="Tokens whose perplexity is measured.")] = 128,
    expected: Annotated[
        Path | None, typer.Option(help="The prediction; default the one committed with this project.")
    ] = None,
    predict: Annotated[Path | None, typer.Option(help="Write the prediction here and end: no model runs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report into this directory.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three texts and ceilings: two minutes on two cores.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
) -> None:
    """Does evicting scattered tokens free pages? The claim, checked on real allocators.

    A real model reads real texts; H2O (heavy hitters by summed attention + recent tokens, half and half), random
    tokens, StreamingLLM's window, page-aligned windows and our tree each keep what a ceiling of 0.60 to 0.25 leaves
    room for. What comes free is compared with the matched null: the same number of tokens at random places.

    \b
    JSON keys: `rows`, `claim_holds_where` (sentences), `texts` (names), `os_agrees_frames` (furthest that the
    system's count is from the ledger's), `windows_exact`, `pages_freed_twice`, `expected_from`. A row has
      strategy aggregation ceiling frame_pages allocator is_modelled
      tokens_evicted pages_freed live_tokens_lost tokens_copied llama_mib_returned   for a request, means over texts
      held_percent os_resident_percent                            memory that stays, by the books and by the system
      expected_empty expected_given_kept interval verdict         pages; zero, chance, more or fewer than chance
      perplexity attention_mass                                   of what was kept; null where not measured
    """
    from radix_pages_sglang.experiments.page_accounting.null import Shape, write_prediction

    if tokens % 2048:
        raise CommandError(f"--tokens {tokens} is no multiple of 2,048: the largest frame holds so many")
    if predict is not None:
        if not predict.parent.is_dir():
            raise CommandError(f"--predict {predict}: there is no directory {predict.parent}, make it first")
        write_prediction(predict, Shape(tokens=tokens), provenance())
        typer.echo(f"prediction written to {predict}; commit it before the run")
        return
    if expected is not None and not expected.is_file():
        raise CommandError(f"--expected {expected} is no file: write one with --predict")
    reader = _reader(model)
    shape = replace(reader.shape, tokens=tokens)
    chosen = _texts(reader, text, QUICK_TEXTS if quick else texts, tokens + continuation + 1)
    chance, source = _expected(expected, shape)
    result = run(reader, chosen, shape, chance, source, seed, quick)
    finish(result, out, json_file)


def _reader(model: Path | None) -> Reader:
    from radix_pages_sglang.cpu_engine import checkpoints
    from radix_pages_sglang.experiments.page_accounting.reading import Reader

    if model is None:
        try:
            model = checkpoints.smollm2_checkpoint()
        except checkpoints.CheckpointError as error:
            raise CommandError(f"{error}, or name a checkpoint with --model") from error
    return Reader(model)


def _texts(reader: Reader, files: list[Path] | None, count: int, num_tokens: int) -> list[Text]:
    from radix_pages_sglang.experiments.page_accounting import texts

    if files:
        return texts.from_files(files, reader.encode, num_tokens)[:count]
    return texts.choose(texts.packaged(), reader.encode, count, num_tokens)


def _expected(path: Path | None, shape: Shape) -> tuple[dict[Key, float], str]:
    """What chance should free, and where that stands in words."""
    from radix_pages_sglang.experiments.page_accounting.null import by_key, prediction, read_prediction

    place = path or (EXPECTED if EXPECTED.is_file() else None)
    if place is not None and (found := read_prediction(place, shape)) is not None:
        return found, f"{place.name}, {_committed(place)}"
    why = "no file has it" if place is None else f"{place.name} is for another model or length"
    return by_key(prediction(shape)), f"computed in this run by the same formula, because {why}"


def _committed(path: Path) -> str:
    """Since when the file stands in the checkout's history as it is."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=committed as %h", "--", str(path.resolve())]
    changed = ["git", "-C", str(ROOT), "status", "--porcelain", "--", str(path.resolve())]
    try:
        done = [subprocess.run(each, capture_output=True, text=True).stdout.strip() for each in (command, changed)]
    except OSError:
        return "not known to be committed"
    return done[0] if done[0] and not done[1] else "not committed"


def run(
    reader: Reader, chosen: list[Text], shape: Shape, chance: dict[Key, float], source: str, seed: int, quick: bool
) -> Result:
    """Read all texts, drive all allocators, and say what came out."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from radix_pages_sglang.experiments.page_accounting import measuring, quality
    from radix_pages_sglang.experiments.page_accounting.null import CEILINGS
    from radix_pages_sglang.experiments.page_accounting.strategies import RULES

    ceilings, levels = (QUICK_CEILINGS, QUICK_LEVELS) if quick else (CEILINGS, quality.LEVELS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        reading = progress.add_task("reading texts", total=len(chosen))
        driving = progress.add_task("driving allocators", total=len(ceilings) * (len(RULES) + 1))
        measured = measuring.read_texts(
            reader, chosen, shape, ceilings, levels, seed, lambda: progress.advance(reading)
        )
        # SGLang's allocators are loaded only now: that takes seconds.
        from radix_pages_sglang.experiments.page_accounting.accounting import account

        accounts = account(measured, shape, ceilings, chance, seed, lambda: progress.advance(driving))
    return _result(reader, chosen, shape, chance, source, seed, accounts, measured.quality)


def _result(
    reader: Reader,
    chosen: list[Text],
    shape: Shape,
    chance: dict[Key, float],
    source: str,
    seed: int,
    accounts: Account,
    found: Quality,
) -> Result:
    from radix_pages_sglang.experiments.page_accounting import charts, findings, tables
    from radix_pages_sglang.experiments.page_accounting.allocators import MODELLED
    from radix_pages_sglang.experiments.page_accounting.null import FORMULA
    from radix_pages_sglang.experiments.page_accounting.strategies import AGGREGATIONS
    from radix_pages_sglang.experiments.page_accounting.verdict import FEWEST_TEXTS, RULE
    from radix_pages_sglang.experiments.results import Result

    token_bytes = shape.layers * shape.kv_heads * reader.head_size * 2 * 4
    few = [f"Only {len(chosen)} texts: verdicts want {FEWEST_TEXTS}."] if len(chosen) < FEWEST_TEXTS else []
    return Result(
        experiment="page-accounting",
        title="Does evicting scattered tokens free pages?",
        provenance=provenance(seed),
        parameters={
            "model": reader.name,
            "texts": len(chosen),
            "continuation tokens": len(chosen[0].tokens) - shape.tokens - 1,
            **asdict(shape),
            "expected empty pages": source,
            "null": FORMULA,
            "verdict": RULE,
            **{f"aggregation {name}": meaning for name, meaning in AGGREGATIONS.items()},
            **{f"modelled: {name}": meaning for name, meaning in MODELLED.items()},
        },
        summary=[*few, *findings.summary(accounts, shape, found)],
        tables=tables.tables(accounts, shape, found, token_bytes),
        charts=charts.charts(accounts, shape, found, chance),
        limits=findings.LIMITS,
        values={
            "rows": accounts.rows,
            "claim_holds_where": findings.claim_sentences(accounts.rows, shape),
            "texts": [text.name for text in chosen],
            "os_agrees_frames": round(accounts.os_off_frames, 4),
            "windows_exact": not accounts.windows_unequal,
            "pages_freed_twice": accounts.twice,
            "expected_from": source,
        },
    )
