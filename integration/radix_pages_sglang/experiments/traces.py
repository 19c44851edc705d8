"""Request traces, streamed: Mooncake's, Qwen-Bailian's and a plain one of tokens, one JSON object a line each.

    Mooncake      timestamp (ms), input_length, output_length, hash_ids; blocks of 512 tokens. Equal ids are the same
                  block after the same prefix
    Qwen-Bailian  the same with timestamp in seconds, and chat_id, parent_chat_id, turn, type; blocks of 16 tokens.
                  Its ids name a block's contents alone, so blocks are numbered anew here, with what is before them
    tokens        tokens: token ids; timestamp (seconds) and output_length may be left out. Cut into blocks of 16
                  tokens unless told otherwise

A prompt's last block may be partly full; it is a block like the others, as in the Mooncake release. Imports the
standard library alone.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from radix_pages_sglang.serve import CommandError

FORMATS = (
    "a Mooncake trace (timestamp, input_length, output_length, hash_ids), a Qwen-Bailian one (the same with chat_id, "
    "parent_chat_id, turn) or lines of tokens ({'tokens': [...]}), one JSON object a line"
)
"""What `open_trace` reads, for messages."""

MOONCAKE_BLOCK, BAILIAN_BLOCK, TOKENS_BLOCK = 512, 16, 16
_LARGEST_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: `blocks` are ids of its prompt's blocks (equal ids: the same block after the same prefix)."""

    seconds: float
    """Arrival, from that of the trace's first request."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """The prompt's blocks of `Trace.block_tokens` tokens; the last may be partly full."""


class BadLine(ValueError):
    """Why a line is not a request, in a sentence."""


class Format(NamedTuple):
    """How to read one kind of trace: its fields' units and its blocks."""

    name: str
    block_tokens: int
    seconds_per_timestamp: float
    blocks_of: Callable[[dict[str, Any], int], tuple[int, ...]]


class Trace:
    """The requests of one file, in its order. Each iteration reads the file anew and keeps one line in memory."""

    def __init__(self, path: Path, format: Format, block_tokens: int, *, skip_bad: bool) -> None:
        self.path = path
        self.format = format.name
        self.block_tokens = block_tokens
        self.skipped = 0
        """Bad lines that the latest iteration has passed over so far."""
        self.bytes_read = 0
        """How far into the file the latest iteration is, for progress bars."""
        self._format = format
        self._skip_bad = skip_bad

    def __iter__(self) -> Iterator[TraceRequest]:
        """Raises CommandError at a bad line unless such lines are skipped, and at the end of a file of none."""
        self.skipped = self.bytes_read = 0
        first: float | None = None
        for number, line in self._lines():
            try:
                record = _object(line)
                if _format_of(record) is not self._format:
                    raise BadLine(f"it is not of the format of the lines before it, {self.format}")
                request = _request(record, self._format, self.block_tokens, since=first or 0.0)
            except BadLine as bad:
                if not self._skip_bad:
                    raise _complaint(self.path, number, bad) from None
                self.skipped += 1
                continue
            if first is None:
                first = request.seconds
                request = replace(request, seconds=0.0)
            yield request
        if first is None:
            raise CommandError(f"{self.path} has no requests: give a trace of at least one line")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not blank, with their numbers."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                self.bytes_read += len(line)
                if not line.isspace():
                    yield number, line


def open_trace(path: Path, *, skip_bad: bool = False, block_tokens: int | None = None) -> Trace:
    """The trace in `path`, whose kind its first request tells.

    `block_tokens` is the size of a block: for tokens how they are cut, for the others what one id stands for, where
    that is not the release's 512 or 16. Raises CommandError for a file that cannot be read, an empty one, and a first
    line of no known kind (with `skip_bad`, if no line is of one).
    """
    if block_tokens is not None and block_tokens < 1:
        raise CommandError(f"a block has at least one token, not {block_tokens}")
    try:
        with path.open("rb") as file:
            return _recognised(path, enumerate(file, 1), skip_bad, block_tokens)
    except OSError as error:
        raise CommandError(f"cannot read the trace {path}: {error.strerror}; name {FORMATS}") from None


def _recognised(path: Path, lines: Iterator[tuple[int, bytes]], skip_bad: bool, block_tokens: int | None) -> Trace:
    first_complaint = None
    for number, line in lines:
        if line.isspace():
            continue
        try:
            format = _format_of(_object(line))
            if format is None:
                raise BadLine(f"its fields are those of no known trace: {FORMATS}")
        except BadLine as bad:
            first_complaint = first_complaint or _complaint(path, number, bad)
            if skip_bad:
                continue
            raise first_complaint from None
        return Trace(path, format, block_tokens or format.block_tokens, skip_bad=skip_bad)
    if first_complaint is None:
        raise CommandError(f"{path} is empty: give {FORMATS}")
    raise CommandError(f"{path} has no line that is a request; its first: {first_complaint}") from None


def _complaint(path: Path, number: int, bad: BadLine) -> CommandError:
    return CommandError(f"{path}, line {number}: {bad}; correct it, or pass over such lines with --skip-bad")


# -- lines --


def _object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.rstrip())  # else a line that ends early is told as the next one
    except json.JSONDecodeError as error:
        raise BadLine(f"it is not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, numbers of thousands of digits, nesting without end
        raise BadLine(f"it is not JSON ({type(error).__name__})") from None
    if not isinstance(record, dict):
        raise BadLine(f"it is a JSON {type(record).__name__}, not an object")
    return record


def _format_of(record: dict[str, Any]) -> Format | None:
    if "hash_ids" in record:
        return BAILIAN if "chat_id" in record or "parent_chat_id" in record else MOONCAKE
    return TOKENS if "tokens" in record else None


def _request(record: dict[str, Any], format: Format, block_tokens: int, since: float) -> TraceRequest:
    """The request in a line; its arrival is counted from `since`, in seconds. Raises BadLine."""
    is_hashed = format is not TOKENS
    timestamp = _number(record, "timestamp") if is_hashed or "timestamp" in record else 0.0
    output = _count(record, "output_length") if is_hashed or "output_length" in record else 0
    tokens = _count(record, "input_length") if is_hashed else len(_ids(record, "tokens"))
    seconds = timestamp * format.seconds_per_timestamp - since
    return TraceRequest(seconds, tokens, output, format.blocks_of(record, block_tokens))


def _value(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise BadLine(f"it has no {name}")
    return record[name]


def _number(record: dict[str, Any], name: str) -> float:
    value = _value(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadLine(f"its {name} is {_shown(value)}, not a number")
    return float(value)


def _count(record: dict[str, Any], name: str) -> int:
    value = _value(record, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadLine(f"its {name} is {_shown(value)}, not a whole number from 0")
    return value


def _ids(record: dict[str, Any], name: str) -> list[int]:
    """A list of ids of 64 bits."""
    value = _value(record, name)
    if not isinstance(value, list):
        raise BadLine(f"its {name} is {_shown(value)}, not a list")
    for each in value:
        if type(each) is not int or not -_LARGEST_ID <= each <= _LARGEST_ID:
            raise BadLine(f"its {name} hold {_shown(each)}, which is not an integer of 64 bits")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# -- blocks --


def _prefix_ids(record: dict[str, Any], block_tokens: int) -> tuple[int, ...]:
    return tuple(_ids(record, "hash_ids"))


def _content_ids(record: dict[str, Any], block_tokens: int) -> tuple[int, ...]:
    return _numbered([each.to_bytes(8, "little", signed=True) for each in _ids(record, "hash_ids")])


def _token_blocks(record: dict[str, Any], block_tokens: int) -> tuple[int, ...]:
    raw = array("q", _ids(record, "tokens")).tobytes()
    size = 8 * block_tokens
    return _numbered([raw[start : start + size] for start in range(0, len(raw), size)])


def _numbered(contents: list[bytes]) -> tuple[int, ...]:
    """An id for each block that stands for its contents and all before it: 63 bits of a hash of both."""
    ids, before = [], b""
    for content in contents:
        before = blake2b(content, digest_size=8, key=before).digest()
        ids.append(int.from_bytes(before, "little") >> 1)
    return tuple(ids)


MOONCAKE = Format("Mooncake", MOONCAKE_BLOCK, 0.001, _prefix_ids)
BAILIAN = Format("Qwen-Bailian", BAILIAN_BLOCK, 1.0, _content_ids)
TOKENS = Format("tokens", TOKENS_BLOCK, 1.0, _token_blocks)
