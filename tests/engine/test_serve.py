"""`radix-pages serve`, from the command line to a reply."""

import pytest

from radix_pages_sglang.cpu_engine.checkpoints import smollm2_checkpoint, tiny_llama
from radix_pages_sglang.local_server import reply, serving, wait_until_gone

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TINY = ("--load-format", "dummy", "--dtype", "float32", "--max-total-tokens", "8192")


def test_a_server_answers_remembers_the_prompt_and_ends_wholly_when_the_command_is_told_to():
    with serving(tiny_llama(), *TINY) as server:
        first, second = server.chat("hello", max_tokens=8), server.chat("hello", max_tokens=8)
        cached = [server.generate(list(range(100, 164)), max_tokens=1) for _ in range(2)]
        assert len(server.processes()) > 1
        server.process.terminate()
        wait_until_gone(server, seconds=60)
    assert server.process.returncode == 0
    assert first["usage"]["completion_tokens"] == 8
    assert reply(first).strip()
    assert reply(first) == reply(second)
    # The last token of a prompt is always computed.
    assert [answer["meta_info"]["cached_tokens"] for answer in cached] == [0, 63]


def test_two_ranks_answer_as_one():
    with serving(tiny_llama(), *TINY, "--page-size", "16", "--tp", "2") as server:
        assert server.chat("hello", max_tokens=8)["usage"]["completion_tokens"] == 8


def test_a_real_model_knows_the_capital_of_france():
    """In bfloat16; tests/engine/test_move.py serves it in float32."""
    arguments = ("--dtype", "bfloat16", "--page-size", "16", "--max-total-tokens", "8192")
    with serving(smollm2_checkpoint(), *arguments) as server:
        assert reply(server.chat("What is the capital of France?")) == "The capital of France is Paris."
