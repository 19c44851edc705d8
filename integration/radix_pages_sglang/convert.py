"""Between SGLang's RadixKey and tensors and the core's bytes and payloads.

The only place that may make a device wait for the host, and only in the functions that say so.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_pages.units import Geometry

if TYPE_CHECKING:
    from radix_pages.node import Namespace

_TOKEN_BYTES = 8


def geometry(page_size: int, is_bigram: bool) -> Geometry:
    """Tree geometry for a page size in slots; a bigram tree keys each position by two tokens."""
    return Geometry(page_size, token_bytes=2 * _TOKEN_BYTES if is_bigram else _TOKEN_BYTES)


def key_bytes(key: RadixKey, is_bigram: bool) -> bytes:
    """The key's tokens as the tree compares them; honours `key.limit`. Host only.

    A bigram key over N + 1 raw tokens becomes N pairs (t[i], t[i+1]), so that the tree needs to know nothing of
    bigrams and a page of N pairs is N slots.
    """
    tokens = key.token_ids
    limit = key.limit
    if limit is not None and limit < len(tokens):
        raw = memoryview(tokens)[:limit].tobytes()
    else:
        raw = tokens.tobytes()
    if not is_bigram:
        return raw
    if len(raw) <= _TOKEN_BYTES:
        return b""
    flat = np.frombuffer(raw, dtype=np.int64)
    return np.stack((flat[:-1], flat[1:]), axis=1).tobytes()


def namespace_of(key: RadixKey) -> Namespace | None:
    """What keeps this key's tokens apart from equal ones; None for a key without extra_key and cache_salt."""
    if key.extra_key is None and key.cache_salt is None:
        return None
    return (key.extra_key, key.cache_salt)


def radix_key(tokens: bytes, namespace: Namespace | None, is_bigram: bool) -> RadixKey:
    """The inverse of `key_bytes` and `namespace_of` for a run of tokens in the tree."""
    flat = np.frombuffer(tokens, dtype=np.int64)
    if is_bigram and flat.size:
        flat = np.append(flat[::2], flat[-1])
    extra_key, cache_salt = namespace or (None, None)
    return RadixKey(array("q", flat.tobytes()), extra_key, is_bigram=is_bigram, cache_salt=cache_salt)


def concatenated(payloads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One int64 tensor of slots from the tensors of several nodes; stays on the device."""
    if not payloads:
        return torch.empty((0,), dtype=torch.int64, device=device)
    return payloads[0] if len(payloads) == 1 else torch.cat(payloads)


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array; shares memory on a CPU, waits for a device."""
    return tensor.detach().cpu().numpy()


def cpu_array(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as an array over the same memory; raises TypeError for a device's. Four times as fast."""
    return tensor.numpy()


def host_ints(tensor: torch.Tensor) -> list[int]:
    """The tensor as Python ints; waits for a device."""
    return tensor.tolist()


def whole_pages(slots: np.ndarray, geometry: Geometry) -> tuple[np.ndarray, list[int]]:
    """The pages that `slots` consist of, and the slots that break the rule: whole pages, their slots in order."""
    rows = slots.reshape(-1, geometry.page_size)
    pages = geometry.page_of(rows[:, 0])
    expected = geometry.slots_of(pages).reshape(rows.shape)
    return pages, rows[rows != expected].tolist()


def repeated(ids: np.ndarray) -> list[int]:
    """Ids that occur more than once, ascending."""
    each, counts = np.unique(ids, return_counts=True)
    return each[counts > 1].tolist()


def distinct_pages(slots: torch.Tensor, geometry: Geometry) -> np.ndarray:
    """The pages of any run of slots, each once. Waits for a device."""
    return np.unique(geometry.page_of(host_array(slots).astype(np.int64)))


def same_slots(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two runs name the same slots; waits for a device."""
    return torch.equal(one, other)


def all_agree(succeeded: bool, group: torch.distributed.ProcessGroup | None) -> bool:
    """Whether every rank of `group` succeeded; each of them has to ask. Waits for the others."""
    return bool(least(int(succeeded), group))


def least(number: int, group: torch.distributed.ProcessGroup | None) -> int:
    """The least `number` of all ranks of `group`; each of them has to ask. Waits for the others."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return number
    value = torch.tensor([number], dtype=torch.int64)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(value.item())
