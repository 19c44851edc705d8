"""A chat load for servers with random weights: many short conversations at once, more KV than the pool holds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from radix_pages_sglang.local_server import Server, reply

SYSTEM_PROMPTS = [f"You are assistant number {i}. " + "Be brief, be kind, be exact. " * 6 for i in range(4)]


def talk(server: Server, seed: int, turns: int, max_tokens: int) -> list[str]:
    """One conversation; what it says depends on `seed` alone, until the server's replies are part of it."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]
    replies = []
    for _ in range(turns):
        messages.append({"role": "user", "content": " ".join(str(rng.randrange(10_000)) for _ in range(12))})
        replies.append(reply(server.chat(messages, max_tokens)))
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


def chat_load(server: Server, talks: int, concurrency: int = 16, turns: int = 4, max_tokens: int = 12) -> list[Any]:
    """`talks` conversations, `concurrency` at a time; the replies of each. An HTTP error raises."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda seed: talk(server, seed, turns, max_tokens), range(talks)))


def wait_until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    """Look again and again until `holds` is true; an AssertionError when it never is."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.2)


def chat_loads(server: Server, talks: int, until: Callable[[], bool], seconds: float = 120.0) -> list[Any]:
    """`chat_load` again and again until something holds: how long one takes hangs on the machine.

    The replies of all; an AssertionError when it never comes to hold.
    """
    deadline = time.monotonic() + seconds
    replies = chat_load(server, talks)
    while not until():
        assert time.monotonic() < deadline, "it never came to hold under the load"
        replies += chat_load(server, talks)
    return replies


@contextmanager
def chatting(server: Server, talks: int) -> Iterator[None]:
    """`chat_load` again and again while the block runs, at least once; ended when it is left."""
    is_over: list[bool] = []
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(chat_loads, server, talks, lambda: bool(is_over))
        try:
            yield
        finally:
            is_over.append(True)
        assert {len(turns) for turns in load.result()} == {4}
