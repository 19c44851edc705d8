"""Reads the arguments of `sglang serve` without importing SGLang's parser, which takes seconds."""

from collections.abc import Sequence
from pathlib import Path

RANK_FLAGS = (
    ("tp", "tp-size", "tensor-parallel-size"),
    ("pp", "pp-size", "pipeline-parallel-size"),
    ("dp", "dp-size", "data-parallel-size"),
)
"""Spellings of the flags whose product is the number of processes; SGLang takes the short ones as abbreviations."""


def options(argv: Sequence[str]) -> dict[str, str | None]:
    """The flags in `argv` without their dashes, each with the text that follows it, or None if nothing does.

    Reads `--flag value` and `--flag=value`; the last one counts. Flags in the YAML file of `--config FILE` are
    included, below those of the command line, as in SGLang. A value that begins with "--" needs the "=" form.
    """
    found: dict[str, str | None] = {}
    for position, argument in enumerate(argv):
        if not argument.startswith("--"):
            continue
        flag, separator, text = argument[2:].partition("=")
        following = argv[position + 1] if position + 1 < len(argv) else "--"
        found[flag] = text if separator else (None if following.startswith("--") else following)
    config = found.get("config")
    return found if config is None else {**config_options(Path(config)), **found}


def config_options(path: Path) -> dict[str, str | None]:
    """The flags that a configuration file of SGLang sets. An unreadable file sets none: SGLang reports it."""
    import yaml  # comes with SGLang; an import costs more than most commands here

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {str(key).replace("_", "-"): str(value) for key, value in content.items() if value is not False}


def has_model(argv: Sequence[str]) -> bool:
    """Whether `argv` names a model: in first place, by flag, or in a configuration file."""
    if argv and not argv[0].startswith("-"):
        return True
    return not options(argv).keys().isdisjoint({"model", "model-path"})


def num_ranks(argv: Sequence[str]) -> int:
    """How many processes `argv` has SGLang split the machine among. Not a number counts as 1: SGLang reports it."""
    given = options(argv)
    ranks = 1
    for spellings in RANK_FLAGS:
        text = next((given[flag] for flag in spellings if given.get(flag)), "1")
        ranks *= int(text) if text.isdecimal() and int(text) else 1
    return ranks
