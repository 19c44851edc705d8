"""A real model reads a text: how much attention each key gets, and what is lost when keys are cut out.

The model runs in transformers; its attention is replaced by the same arithmetic that also adds up what it sees. Keys
keep the positions they had (the rotation is applied before caching), as in H2O's and transformers' code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radix_pages_sglang.experiments.page_accounting.null import Shape
from radix_pages_sglang.experiments.page_accounting.strategies import Kept
from radix_pages_sglang.serve import CommandError

NAME = "radix_pages_accounting"
"""Under which transformers knows the attention below. One Reader is in use at a time."""

QUERIES_AT_ONCE = 512
VARIANTS_AT_ONCE = 8


@dataclass(slots=True)
class Prefix:
    """One text that was read: `keys` and `values` [KV heads, tokens, head size] and `scores` [query heads, tokens] of
    each layer."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)

    def attention(self) -> NDArray[np.float32]:
        """Running sums of post-softmax attention, [layers, query heads, tokens]."""
        scores: NDArray[np.float32] = torch.stack(self.scores).numpy()
        return scores


@dataclass(slots=True)
class _Continuation:
    """What the attention needs while a text goes on: for each variant which of the prefix's tokens it has.

    `places` are as `_places` makes them. `future` gets what the first variant's queries pay to each key of the
    prefix, when it is asked for.
    """

    prefix: Prefix
    places: Sequence[torch.Tensor]
    future: list[torch.Tensor] | None


class Reader:
    """A checkpoint loaded for reading. Raises CommandError for a folder that is none."""

    def __init__(self, folder: Path) -> None:
        check_checkpoint(folder)
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        transformers.AttentionInterface.register(NAME, self._attend)
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation=NAME, dtype=torch.float32, local_files_only=True
            ).eval()
        except Exception as error:  # transformers has no common error for a checkpoint it cannot use
            raise CommandError(f"--model {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        self._act: Prefix | _Continuation = Prefix()
        self.name = folder.name
        self.head_size, self.shape = _shape(self._model.config)

    def encode(self, text: str) -> list[int]:
        """Token ids, without special ones."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Prefix:
        """Prefill `tokens` with full attention."""
        self._act = prefix = Prefix()
        self._model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=1)
        if not prefix.keys:
            raise CommandError("--model: this kind of model does not let its attention be replaced; use a Llama")
        return prefix

    @torch.inference_mode()
    def losses(self, prefix: Prefix, tokens: Sequence[int], kept: Sequence[Kept]) -> NDArray[np.float64]:
        """Negative log-likelihoods [variants, tokens - 1] of `tokens`, which follow the prefix, each given the one
        before, when of the prefix only what `kept` says can be seen."""
        rows = [self._continue(prefix, tokens, kept[i : i + VARIANTS_AT_ONCE]) for i in _steps(len(kept))]
        return np.concatenate(rows) if rows else np.zeros((0, len(tokens) - 1))

    @torch.inference_mode()
    def future(self, prefix: Prefix, tokens: Sequence[int]) -> NDArray[np.float32]:
        """How much attention the queries of `tokens` pay to each key of the full prefix, [layers, heads, tokens]."""
        sums: list[torch.Tensor] = []
        self._continue(prefix, tokens, [np.ones((1, 1, prefix.keys[0].shape[1]), dtype=np.bool_)], sums)
        future: NDArray[np.float32] = torch.stack(sums).numpy()
        return future

    def _continue(
        self, prefix: Prefix, tokens: Sequence[int], kept: Sequence[Kept], future: list[torch.Tensor] | None = None
    ) -> NDArray[np.float64]:
        start = prefix.keys[0].shape[1]
        self._act = _Continuation(prefix, [_places(each, self.shape) for each in kept], future)
        given = torch.tensor([list(tokens[:-1])] * len(kept))
        positions = torch.arange(start, start + given.shape[1])[None]
        logits = self._model(given, position_ids=positions, use_cache=False).logits
        chosen = torch.tensor(list(tokens[1:]))[None, :, None].expand(len(kept), -1, 1)
        losses = torch.logsumexp(logits, dim=-1) - logits.gather(-1, chosen)[..., 0]
        return losses.double().numpy()

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls in each layer: [batch, heads, tokens, head size]; returns [batch, tokens, heads,
        head size]."""
        query = query * options["scaling"]
        act = self._act
        if isinstance(act, Prefix):
            out = _read_layer(act, query, key, value)
        else:
            out = _continue_layer(act, module.layer_idx, query, key, value)
        return out.transpose(1, 2).contiguous(), None


def check_checkpoint(folder: Path) -> None:
    """Raise a CommandError where `folder` cannot be a checkpoint: known before torch is loaded."""
    if not folder.is_dir():
        raise CommandError(f"--model {folder} is no folder: name one with a model's config.json and weights")
    if not (folder / "config.json").is_file():
        raise CommandError(f"--model {folder} has no config.json: name the folder of a checkpoint")
    if not any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir()):
        raise CommandError(f"--model {folder} has no weights (*.safetensors, *.bin): name the folder of a checkpoint")
    config = json.loads((folder / "config.json").read_text())
    if config.get("sliding_window"):
        raise CommandError(f"--model {folder} uses sliding windows, which keep no key for long: use another model")


def _shape(config: Any) -> tuple[int, Shape]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return head_size, Shape(layers=config.num_hidden_layers, query_heads=heads, kv_heads=kv_heads)


def _read_layer(prefix: Prefix, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of a prefill, some queries and one KV head at a time: all weights at once would take
    gigabytes."""
    _, heads, tokens, _ = query.shape
    group = heads // key.shape[1]
    scores, out = torch.zeros(heads, tokens), torch.empty_like(query)
    for start in range(0, tokens, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, tokens)
        is_later = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        for kv_head in range(key.shape[1]):
            own = slice(kv_head * group, (kv_head + 1) * group)
            weights = query[0, own, start:stop] @ key[0, kv_head, :stop].T
            weights[..., start:].masked_fill_(is_later, -torch.inf)
            weights = torch.softmax(weights, dim=-1)
            scores[own, :stop] += weights.sum(dim=1)
            out[0, own, start:stop] = weights @ value[0, kv_head, :stop]
    prefix.keys.append(key[0])
    prefix.values.append(value[0])
    prefix.scores.append(scores)
    return out


def _continue_layer(
    act: _Continuation, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of new tokens to what is kept of the prefix and, causally, to each other."""
    group = query.shape[1] // key.shape[1]
    is_later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    out = torch.empty_like(query)
    for variant, places in enumerate(act.places):
        own = places[layer if places.shape[0] > 1 else 0]
        old_keys, old_values = (_gathered(part[layer], own, group) for part in (act.prefix.keys, act.prefix.values))
        new_keys, new_values = (part[variant].repeat_interleave(group, dim=0) for part in (key, value))
        among = (query[variant] @ new_keys.transpose(1, 2)).masked_fill_(is_later, -torch.inf)
        before = query[variant] @ old_keys.transpose(1, 2)
        weights = torch.softmax(torch.cat((before, among), dim=-1), dim=-1)
        kept = before.shape[-1]
        out[variant] = weights[..., :kept] @ old_values + weights[..., kept:] @ new_values
        if act.future is not None and not variant:
            act.future.append(weights[..., :kept].sum(dim=1))
    return out


def _gathered(part: torch.Tensor, places: torch.Tensor, group: int) -> torch.Tensor:
    """Rows `places` [query heads or 1, kept] of each KV head's `part` [KV heads, tokens, size], a copy for each query
    head."""
    if len(places) == 1:
        return part[:, places[0]].repeat_interleave(group, dim=0)
    return part[torch.arange(len(places)).div(group, rounding_mode="floor")[:, None], places]


def _places(kept: Kept, shape: Shape) -> torch.Tensor:
    """Where `kept` is true, [layers, query heads, number], the first two axes of length 1 where all are alike.

    Every head of a choice keeps equally many.
    """
    if kept.shape[1] == shape.kv_heads != shape.query_heads:
        kept = np.repeat(kept, shape.query_heads // shape.kv_heads, axis=1)
    places = np.nonzero(kept)[-1].reshape(*kept.shape[:2], int(kept[0, 0].sum()))
    return torch.from_numpy(places)


def _steps(count: int) -> range:
    return range(0, count, VARIANTS_AT_ONCE)
