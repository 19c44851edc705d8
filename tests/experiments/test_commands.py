"""The commands of the experiments: what their help promises, and what is refused before any work."""

import json
import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from radix_pages_sglang import cli
from radix_pages_sglang.experiments.provenance import RESULTS

KEYS = {
    "page-accounting": {
        *("rows", "strategy", "aggregation", "ceiling", "frame_pages", "allocator", "is_modelled", "tokens_evicted"),
        *("pages_freed", "live_tokens_lost", "held_percent", "os_resident_percent", "expected_empty", "interval"),
        *("verdict", "perplexity", "attention_mass", "claim_holds_where", "os_agrees_frames", "windows_exact"),
    },
    "chat": {
        *("pairs", "hit_rate", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "itl_p50_ms", "throughput", "stalls"),
        *("asked_tokens", "evicted_tokens", "over_eviction", "eviction_ms", "reclaimed_pages", "reclaimed_bytes"),
        *("emptied_frames", "resident_bytes", "ours", "stock", "difference_percent", "low", "high", "bursts"),
    },
    "prefix-sharing": {
        *("rows", "trace", "blocks", "policy", "core", "ms_per_token", "hit_rate", "frames_held", "reclaimed_frames"),
        *("infeasible", "frontier", "cap_blocks", "returned_bytes"),
    },
    "colocate": {
        *("rows", "rule", "kind", "split", "joint_hit_rate", "low", "high", "goodput", "bytes_lent", "lend_seconds"),
        *("failed_commits", "failed_requests", "best_static_split", "gain_points", "gain_low", "gain_high"),
    },
}
"""What scripts read from `--json FILE` of each experiment; names that are gone from here break somebody's script."""

HEAVY = ("torch", "sglang", "matplotlib", "scipy", "transformers", "pandas", "aiohttp")


def words_of_help(*argv):
    """The words of a command's help, punctuation and line breaks aside."""
    told = CliRunner().invoke(cli.app, [*argv, "--help"], env={"COLUMNS": "118"})
    assert told.exit_code == 0
    return set(re.findall(r"[\w-]+", told.stdout))


def test_every_experiment_is_a_command():
    assert set(get_command(cli.app).commands["experiment"].commands) == set(KEYS)


@pytest.mark.parametrize("name", KEYS)
def test_help_names_the_keys_that_scripts_read(name):
    assert KEYS[name] - words_of_help("experiment", name) == set()


@pytest.mark.parametrize("name", KEYS)
def test_committed_results_have_the_keys_that_help_names(name):
    written = json.loads((RESULTS / name / "report.json").read_text())
    found = set(keys_of({key: value for key, value in written.items() if key != "report"}))
    assert KEYS[name] - found == set()
    assert set(written) - {"report"} - words_of_help("experiment", name) == set()


def keys_of(value):
    """Every key in `value`, at any depth."""
    if isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(part)


@pytest.mark.parametrize("name", KEYS)
def test_every_experiment_can_be_quick_seeded_and_written(name):
    assert {"--quick", "--seed", "--out", "--json"} - words_of_help("experiment", name) == set()


@pytest.mark.parametrize("name", KEYS)
def test_a_place_for_the_report_that_is_a_file_is_refused_before_any_work(name, tmp_path):
    file = tmp_path / "file"
    file.touch()
    done = CliRunner().invoke(cli.app, ["experiment", name, "--quick", "--out", str(file)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"radix-pages: --out {file} is a file: name a directory for the report\n"


ASK_ALL = f"""
import sys
from typer.main import get_command
from typer.testing import CliRunner
from radix_pages_sglang import cli

def ask(command, *path):
    assert CliRunner().invoke(cli.app, [*path, "--help"]).exit_code == 0, path
    print(" ".join(path))
    for name, below in getattr(command, "commands", {{}}).items():
        ask(below, *path, name)

ask(get_command(cli.app))
print("loaded:", *(name for name in {HEAVY} if name in sys.modules))
"""


def test_help_of_every_command_comes_without_loading_heavy_packages():
    done = subprocess.run(
        [sys.executable, "-c", ASK_ALL], capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    *asked, loaded = done.stdout.splitlines()
    assert loaded == "loaded:"
    assert {f"experiment {name}" for name in KEYS} | {"report", "watch", "ctl trim"} <= set(asked)
