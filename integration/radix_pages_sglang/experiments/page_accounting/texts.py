"""Long prose that every installation has: documentation of Python and of installed packages, read at run time."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from radix_pages_sglang.serve import CommandError

Encode = Callable[[str], Sequence[int]]
"""A tokenizer: the token ids of a text."""

SOURCES = (
    "turtle.py",
    "numpy/_core/fromnumeric.py",
    "optparse.py",
    "scipy/stats/_stats_py.py",
    "_pydecimal.py",
    "torch/optim/lr_scheduler.py",
    "unittest/mock.py",
    "torch/nn/modules/loss.py",
    "difflib.py",
    "transformers/generation/configuration_utils.py",
    "doctest.py",
    "fastapi/applications.py",
    "typing.py",
    "scipy/optimize/_minimize.py",
    "statistics.py",
    "scipy/signal/_signaltools.py",
)
"""Files of the standard library and of installed packages whose documentation strings are long prose. What is missing
is left out; Python's own help topics alone are enough for nineteen texts of the default length."""

SHORTEST_STRING = 200
"""A string of a source file that is shorter says something to the program, not to a reader."""

SHORTEST_SHARED = 40
"""A paragraph of so many characters or more may stand in one text only."""


@dataclass(frozen=True, slots=True)
class Prose:
    """A document that a person would read, and where it comes from."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """The first tokens of a document."""

    name: str
    tokens: tuple[int, ...]


def packaged() -> Iterator[Prose]:
    """Documents of this installation in a fixed order: help topics and documentation strings by turns."""
    topics = _help_topics()
    strings = iter([Prose(name, _documentation(path)) for name in SOURCES if (path := _find(name)) is not None])
    for topic in topics:
        yield topic
        following = next(strings, None)
        if following is not None:
            yield following
    yield from strings


def choose(documents: Iterable[Prose], encode: Encode, count: int, num_tokens: int) -> list[Text]:
    """The first `count` texts of `num_tokens` tokens, no two of which share a paragraph.

    A document gives one text; those too short for one are joined in their order until they are long enough. Raises
    CommandError when there is too little.
    """
    found: list[Text] = []
    seen: set[str] = set()
    short: list[Prose] = []
    for document in documents:
        if len(found) == count:
            return found
        fresh = _without(document, seen)
        if text := _text(fresh, encode, num_tokens):
            found.append(text)
            seen |= _shared(fresh)
        else:
            short.append(fresh)
    found += _joined(short, encode, count - len(found), num_tokens, seen)
    if len(found) < count:
        raise CommandError(
            f"this installation has documentation for {len(found)} texts of {num_tokens} tokens, {count} were asked "
            "for: name your own with --text FILE"
        )
    return found


def from_files(paths: Sequence[Path], encode: Encode, num_tokens: int) -> list[Text]:
    """As many texts of `num_tokens` tokens, one after the other, as each of `paths` holds.

    Raises CommandError for a file that cannot be read as text or is too short for one.
    """
    texts = []
    for path in paths:
        try:
            tokens = encode(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"--text {path} cannot be read: {error}") from error
        if len(tokens) < num_tokens:
            raise CommandError(
                f"--text {path} has {len(tokens)} tokens, a text needs {num_tokens}: name a longer one"
            )
        for start in range(0, len(tokens) - num_tokens + 1, num_tokens):
            texts.append(Text(f"{path.name} from token {start}", tuple(tokens[start : start + num_tokens])))
    return texts


def _text(document: Prose, encode: Encode, num_tokens: int) -> Text | None:
    tokens = encode(document.text)
    return Text(document.name, tuple(tokens[:num_tokens])) if len(tokens) >= num_tokens else None


def _joined(short: Sequence[Prose], encode: Encode, count: int, num_tokens: int, seen: set[str]) -> list[Text]:
    """Up to `count` texts of several documents each; what the last of them leaves over is not used."""
    found: list[Text] = []
    group: list[Prose] = []
    for document in short:
        if len(found) >= count:
            break
        group.append(_without(document, seen))
        whole = Prose(" + ".join(part.name for part in group), "\n\n".join(part.text for part in group))
        if text := _text(whole, encode, num_tokens):
            found.append(text)
            seen |= _shared(whole)
            group = []
    return found


def _without(document: Prose, seen: set[str]) -> Prose:
    """`document` without the paragraphs that another text has."""
    kept = [part for part in document.text.split("\n\n") if part.strip() not in seen]
    return Prose(document.name, "\n\n".join(kept))


def _shared(document: Prose) -> set[str]:
    """Paragraphs of `document` that no other text may have."""
    return {part.strip() for part in document.text.split("\n\n") if len(part.strip()) >= SHORTEST_SHARED}


def _help_topics() -> list[Prose]:
    """What Python's help() says about the language, longest first."""
    from pydoc_data.topics import topics

    by_length = sorted(topics, key=lambda name: (-len(topics[name]), name))
    return [Prose(f"help({name!r})", topics[name]) for name in by_length]


def _find(name: str) -> Path | None:
    """Where the source file `name` is, without importing its package."""
    standard = Path(sysconfig.get_path("stdlib")) / name
    if standard.is_file():
        return standard
    package, _, rest = name.partition("/")
    spec = find_spec(package) if rest else None
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () if (path := Path(folder) / rest).is_file()), None)


def _documentation(path: Path) -> str:
    """The long strings of a source file in their order, without their indentation."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    strings = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= SHORTEST_STRING
    ]
    dedented = ("\n".join(line.strip() for line in text.strip().splitlines()) for _, text in sorted(strings))
    return "\n\n".join(dedented)
