"""A chat load for servers with random weights: many short conversations at once, more KV than the pool holds."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
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
