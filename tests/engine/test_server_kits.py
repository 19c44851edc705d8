"""SGLang's own server tests (`sglang/test/kits/`) against servers with our cache, with its strictest checks on.

The kits bring the test bodies; the servers are ours, and so are sizes that two CPU cores can take: the radix kit
sends 150 prompts instead of 400, the KL kit reads prompts made here instead of LongBench, the cache-hit kit texts
made here instead of ShareGPT.

Left out, of the kits that a text model could meet:
  anthropic_messages, json_mode, json_constrained, ebnf_constrained    forms of requests and replies, not the cache
  test_concurrent_requests, test_basic_math, test_color_completion,
    test_finish_stop_str, two open-ended tests of regex_constrained    want words that small models do not find
  WaitingTimeoutMixin                                                  one request at a time
  prefix_cache_branching                                               wants a miss where only Mamba states miss
  lm_eval, eval_accuracy, reasoning                                    want models and data sets of another size
  fwd_occupancy, perf_bench                                            measure a GPU
and of the others: dsa_metadata, pd_parity, spec_decoding, spec_server, mmmu_vlm, vlm_perf (models, servers and
hardware that are not here); unified_radix_cache is run in tests/adapter/test_kits.py.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from unittest import TestCase

import pytest
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from sglang.test import kl_test_utils
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin, StreamingSessionKitMixin

from radix_pages_sglang.cpu_engine.checkpoints import smollm2_checkpoint, tiny_llama
from radix_pages_sglang.local_server import Server, serving
from tests.engine.test_frames import STRICT, complaints, state

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TINY = ("--load-format", "dummy", "--dtype", "float32", "--max-total-tokens", "16384", "--enable-streaming-session")


class Servers:
    """Servers by name, one at a time: a server that idles takes a whole core."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._name = ""

    def __getitem__(self, name: str) -> Server:
        if name != self._name:
            self.close()
            self._server = self._running.enter_context(getattr(self, name)())
            self._name = name
        return self._server

    def close(self) -> None:
        self._name = ""
        self._running.close()

    def tiny(self):
        """Random weights: fast, and its words mean nothing. The kits compute many times what its pool holds.

        The session kit asks for 100,000 tokens, to abort them; they have to fit a request's context.
        """
        arguments = (
            *("--page-size", "16", "--max-running-requests", "48"),
            *("--chunked-prefill-size", "1024", "--context-length", "101000"),
        )
        environment = {**STRICT, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        return serving(tiny_llama(), *TINY, *arguments, env=environment)

    def short_context(self):
        """Two pages a request at most, and a request that runs for four seconds is ended."""
        arguments = ("--page-size", "256", "--context-length", "512", "--chunked-prefill-size", "4096")
        return serving(tiny_llama(), *TINY, *arguments, env={**STRICT, "SGLANG_REQ_RUNNING_TIMEOUT": "4"})

    def smollm2(self):
        """A model whose words mean something."""
        arguments = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "8192")
        return serving(smollm2_checkpoint(), *arguments, env=STRICT)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> str:
    """The file of a ShareGPT of our own: 100 questions of 80 short words."""
    rng = random.Random(5)
    words = ["the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as"]
    talks = [{"conversations": [{"value": " ".join(rng.choices(words, k=80))}, {"value": "ok"}]} for _ in range(100)]
    file = tmp_path_factory.mktemp("sharegpt") / "conversations.json"
    file.write_text(json.dumps(talks))
    return str(file)


@functools.cache
def tokenizer(model: str):
    return get_tokenizer(model)


class Kit(TestCase):
    """A kit's tests on one server. After each of them it runs on, and nothing in its log complains."""

    server_name = "tiny"
    checkpoint = staticmethod(tiny_llama)

    @pytest.fixture(autouse=True)
    def on_a_server(self, servers):
        kit = type(self)
        kit.server = servers[kit.server_name]
        kit.base_url, kit.process, kit.model = kit.server.url, kit.server.process, str(kit.checkpoint())
        kit.tokenizer = tokenizer(kit.model)
        yield
        assert kit.process.poll() is None
        assert complaints(kit.server) == []


class TestRadixCache(Kit):
    def test_150_prompts_of_a_tree(self):
        before = state(self.server)["evictions"]
        random.seed(3)
        fewer = functools.partial(radix_cache_server_kit.gen_radix_tree, num_nodes=150)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(radix_cache_server_kit, "gen_radix_tree", fewer)
            radix_cache_server_kit.run_radix_attention_test(self.base_url)
        assert state(self.server)["evictions"] > before + 50


class TestCacheHits(Kit):
    @pytest.fixture(autouse=True)
    def data(self, conversations):
        self.conversations = conversations

    def test_every_turn_finds_the_turns_before_it(self):
        for request_length, output_length in ((256, 32), (100, 17)):
            found = run_multiturn_cache_hit_test(
                self.base_url,
                self.model,
                request_length=request_length,
                output_length=output_length,
                dataset_path=self.conversations,
            )
            assert found["overall"]["cache_hit_rate"] > 0.5


class TestLogprobsAfterCacheHits(KLDivergenceMixin, Kit):
    """What was computed on cached KV is what a fresh prefill computes, to float32."""

    kl_div_thres = 1e-9
    kl_div_max_samples = 12
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = 48

    @pytest.fixture(autouse=True)
    def prompts(self):
        rng = random.Random(6)
        texts = [[rng.randrange(1000, 30_000) for _ in range(rng.randrange(100, 300))] for _ in range(48)]
        kl_test_utils._cached_input_ids[f"{tiny_llama()}_{kl_test_utils.DEFAULT_PROMPT_TOKENS}_48"] = texts


class TestStreamingSessions(StreamingSessionKitMixin, Kit):
    pass


class TestAbortAll(AbortAllMixin, Kit):
    pass


class TestPauseAndResume(PauseResumeInPlaceMixin, Kit):
    pause_num_requests = 16
    pause_max_new_tokens = 400
    pause_duration = 2
    pause_ignore_eos = True


class TestLongPrompt(BasicSchedulerStressMixin, Kit):
    test_streaming_response = test_concurrent_requests = None


class TestAPIContract(BasicAPIContractMixin, Kit):
    pass


class TestSeveralAnswersToAPrompt(RegexConstrainedMixin, Kit):
    test_regex_generate_complex_json = test_regex_generate_custom_log_format = None


class TestAbortsDuringChunkedPrefill(AbortLeakReproKitMixin, Kit):
    server_name = "short_context"


class TestRunningTimeout(RunningTimeoutTwoWaveMixin, Kit):
    server_name = "short_context"
    running_timeout_max_new_tokens = 400


class TestStreaming(BasicSchedulerStressMixin, Kit):
    server_name, checkpoint = "smollm2", staticmethod(smollm2_checkpoint)
    test_long_prompt = test_concurrent_requests = None


class TestDecodeCorrectness(BasicDecodeCorrectnessMixin, Kit):
    server_name, checkpoint = "smollm2", staticmethod(smollm2_checkpoint)
    test_basic_math = test_color_completion = None


class TestMatchedStop(MatchedStopMixin, Kit):
    server_name, checkpoint = "smollm2", staticmethod(smollm2_checkpoint)
    test_finish_stop_str = None
