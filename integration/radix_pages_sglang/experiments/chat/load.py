"""The load: bursts of SGLang's bench_serving, the same prompts for both sides, and what one burst says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from radix_pages_sglang.experiments.traces import MOONCAKE, open_trace
from radix_pages_sglang.serve import CommandError

BLOCK_PROMPT_TOKENS = 136
"""A trace's block of 512 tokens becomes so many at most: bench_serving writes its id and 128 short words for it."""

PROMPT_ENDS_TOKENS = 64
"""What bench_serving adds to a prompt made from a trace: chat template, question."""


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations with system prompts that several share, in random words (dataset generated-shared-prefix).

    `rate` is in conversations a second and None is no bound. Lengths are in tokens, drawn between half and all of
    what is given, before the words are cut into tokens anew, which makes some more of them.
    """

    conversations: int
    system_prompts: int
    turns: int
    system_tokens: int
    question_tokens: int
    answer_tokens: int
    concurrency: int
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.conversations % self.system_prompts:
            raise CommandError(
                f"--conversations {self.conversations} cannot share --system-prompts {self.system_prompts} evenly: "
                "give a multiple"
            )

    def arguments(self, pair: int, folder: Path, share: int = 1) -> list[str]:
        """Arguments of bench_serving for one `share`-th of the conversations of a pair."""
        each = max(self.conversations // self.system_prompts // share, 1)
        return [
            *("--backend", "sglang-oai-chat", "--dataset-name", "generated-shared-prefix"),
            *("--gsp-num-groups", str(self.system_prompts), "--gsp-prompts-per-group", str(each)),
            *("--gsp-num-turns", str(self.turns), "--gsp-range-ratio", "0.5", "--gsp-fast-prepare"),
            *("--gsp-system-prompt-len", str(self.system_tokens), "--gsp-question-len", str(self.question_tokens)),
            *("--gsp-output-len", str(self.answer_tokens), "--max-concurrency", str(self.concurrency)),
            *(() if self.rate is None else ("--request-rate", str(self.rate))),
        ]


class Replay:
    """Requests of a Mooncake trace, `requests` of them a pair, one stretch of the trace after the other.

    Requests that could not fit into `room_tokens` are left out and counted in `left_out`; answers end after
    `answer_tokens`. `rate` is in requests a second, by which the trace's own pace is scaled; None is no bound.
    Raises CommandError for traces that bench_serving cannot replay.
    """

    def __init__(
        self,
        path: Path,
        requests: int,
        pairs: int,
        *,
        answer_tokens: int,
        room_tokens: int,
        concurrency: int,
        rate: float | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.path = path
        self.requests = requests
        self.answer_tokens = answer_tokens
        self.concurrency = concurrency
        self.rate = rate
        self.left_out = 0
        trace = open_trace(path, skip_bad=skip_bad)
        if trace.format != MOONCAKE.name:
            raise CommandError(
                f"{path} is a trace of {trace.format}, and bench_serving replays Mooncake's alone: give one of "
                "those, or replay this one without a model by radix-pages experiment prefix-sharing"
            )
        self._records: list[dict[str, Any]] = []
        for request in trace:
            output = max(min(request.output_tokens, answer_tokens), 1)
            if len(request.blocks) * BLOCK_PROMPT_TOKENS + PROMPT_ENDS_TOKENS + output > room_tokens:
                self.left_out += 1
                continue
            ids = list(request.blocks)
            self._records.append({"timestamp": request.seconds * 1e3, "hash_ids": ids, "output_length": output})
            if len(self._records) == requests * pairs:
                break
        self.skipped = trace.skipped
        if not self._records:
            raise CommandError(f"no request of {path} fits into {room_tokens} tokens: give more with --pool-tokens")

    def arguments(self, pair: int, folder: Path, share: int = 1) -> list[str]:
        """Arguments of bench_serving for one `share`-th of the requests of a pair; writes them to `folder`."""
        number = max(self.requests // share, 1)
        start = pair * self.requests % len(self._records)
        records = list(chain(self._records[start:], self._records))[:number]
        if start + number > len(self._records):  # the trace begins anew, and time with it
            records = [{**record, "timestamp": 0} for record in records]
        part = folder / "trace.jsonl"
        part.write_text("".join(json.dumps(record) + "\n" for record in records))
        return [
            *("--backend", "sglang", "--dataset-name", "mooncake", "--dataset-path", str(part)),
            *("--num-prompts", str(number), "--max-concurrency", str(self.concurrency)),
            *("--mooncake-slowdown-factor", str(self._slowdown(records))),
        ]

    def _slowdown(self, records: list[dict[str, Any]]) -> float:
        """By which the trace's pauses are multiplied so that requests come at `rate`; 0 for all at once."""
        seconds = (records[-1]["timestamp"] - records[0]["timestamp"]) / 1e3
        return 0.0 if self.rate is None or not seconds else len(records) / self.rate / seconds


Load = Chats | Replay


@dataclass(frozen=True, slots=True)
class Measured:
    """What one burst was to the clients. Times in milliseconds; `throughput` is output tokens a second.

    `longest_gap_ms` is the longest wait between two tokens of one answer, of all answers; `gaps` counts the waits of
    more than `stall_ms`. `failed` requests are in no other figure.
    """

    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    throughput: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    longest_gap_ms: float
    gaps: int
    answers: tuple[str, ...]
    prompt_lengths: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def measured(found: dict[str, Any], stall_ms: float) -> Measured:
    """What bench_serving wrote about a burst, with --output-details and --cache-report."""
    gaps = [1e3 * gap for answer in found["itls"] for gap in answer]
    return Measured(
        requests=len(found["errors"]),
        failed=len(found["errors"]) - found["completed"],
        prompt_tokens=found["cache_report"]["total_prompt_tokens"],
        cached_tokens=found["cache_report"]["total_cached_tokens"],
        output_tokens=found["total_output_tokens"],
        seconds=found["duration"],
        throughput=found["output_throughput"],
        ttft_p50_ms=found["median_ttft_ms"],
        ttft_p90_ms=found["p90_ttft_ms"],
        ttft_p99_ms=found["p99_ttft_ms"],
        itl_p50_ms=found["median_itl_ms"],
        itl_p99_ms=found["p99_itl_ms"],
        longest_gap_ms=max(gaps, default=0.0),
        gaps=sum(gap > stall_ms for gap in gaps),
        answers=tuple(found["generated_texts"]),
        prompt_lengths=tuple(found["input_lens"]),
    )


class Bench:
    """A process that runs bench_serving; `folder` is its scratch folder."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.folder = folder
        self._process = process

    def wait(self) -> None:
        """Return once the process has done what it was told. Raises CommandError if that failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        error = json.loads(line) if line else f"its process ended with status {self._process.wait()}"
        if error:
            raise CommandError(f"bench_serving failed: {' '.join(str(error).split())[:300]}")

    def burst(self, url: str, load: Load, pair: int, seed: int, share: int = 1) -> dict[str, Any]:
        """Send the load of a pair, or one `share`-th of it, to the server at `url`; what bench_serving wrote."""
        assert self._process.stdin is not None
        output = self.folder / "burst.jsonl"
        output.unlink(missing_ok=True)
        arguments = [
            *load.arguments(pair, self.folder, share),
            *("--base-url", url, "--seed", str(seed), "--warmup-requests", "0", "--disable-tqdm"),
            *("--cache-report", "--output-details", "--output-file", str(output)),
        ]
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        self.wait()
        found: dict[str, Any] = json.loads(output.read_text())
        if not found["completed"]:
            raise CommandError(f"all requests failed: {' '.join(found['errors'][0].split())[:300]}")
        return found


@contextmanager
def bench() -> Iterator[Bench]:
    """bench_serving in a process of its own, which has not finished its imports yet: `wait` for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="radix-pages-chat-") as scratch:
        folder = Path(scratch)
        with (folder / "bench_serving.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "radix_pages_sglang.experiments.chat.bench_process"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        with process:
            try:
                yield Bench(process, folder)
            finally:
                process.kill()
