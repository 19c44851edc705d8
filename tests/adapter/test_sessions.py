"""Streaming sessions on our cache: SGLang's own sessions, controller and requests, without a server.

A session keeps the row of its first turn and the lock on what that turn published, from turn to turn.
"""

from array import array

import pytest
from sglang.srt.managers.io_struct import (
    CloseSessionReqInput,
    OpenSessionReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import SessionController

from tests.adapter.caches import OURS, Request, Sizes, build, run

pytestmark = pytest.mark.usefixtures("published_config")


class Conversation:
    """A streaming session and the turns that a client sends to it."""

    def __init__(self, cache, name="s"):
        self.cache = cache
        self.name = name
        self.controller = SessionController(cache.tree)
        self.controller.open(OpenSessionReqInput(capacity_of_str_len=1000, session_id=name, streaming=True))
        self.num_turns = 0

    @property
    def session(self):
        return self.controller.get(self.name)

    @property
    def slot(self):
        return self.cache.tree.session.slots.get(self.name)

    @property
    def row(self):
        return self.slot.kv.req_pool_idx

    @property
    def held_tokens(self):
        """Slots that the session owns outside the tree, as the scheduler's idle check counts them."""
        return kv_private_tokens(self.slot.kv, self.cache.page_size)

    @property
    def slots(self):
        """The slots in its row, of all tokens whose KV is computed."""
        return self.cache.rows.req_to_token[self.row, : self.slot.kv.kv_committed_len].tolist()

    def turn(self, tokens):
        """The next request of this session: the whole history and `tokens`."""
        self.num_turns += 1
        sent = TokenizedGenerateReqInput(
            rid=f"{self.name}-{self.num_turns}",
            input_text=None,
            input_ids=array("q", tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1 << 20),
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            session_params=SessionParams(id=self.name),
        )
        req = self.session.create_req(sent, tokenizer=None, vocab_size=1 << 20)
        assert req.finished_reason is None
        assert req.to_finish is None
        return Request(self.cache, tokens, req=req)

    def close(self):
        self.controller.close(CloseSessionReqInput(session_id=self.name))


@pytest.fixture(params=[1, 4])
def cache(request):
    return build(OURS, page_size=request.param)


def test_a_session_keeps_its_row_and_its_lock_from_turn_to_turn(cache):
    """Turn 1 publishes 8 tokens, turns 2 and 3 go on in the same row and publish nothing."""
    talk = Conversation(cache)
    talk.turn(run(1000, 8)).serve(run(2000, 4))
    row, lock = talk.row, talk.slot.lock
    assert cache.sizes.protected == 8
    for number, length in ((2, 8 + 4), (3, 8 + 4 + 8 + 4)):
        turn = talk.turn(run(3000 * number, 8)).admit()
        assert turn.req.prefix_len == length - 1  # the last output's KV is computed by the next turn
        turn.prefill().publish().decode(run(4000 * number, 4)).finish()
        assert (talk.row, talk.slot.lock) == (row, lock)
        assert cache.sizes.protected == 8
        assert cache.sizes.total + talk.held_tokens == 256
    cache.core.sanity_check([], [])  # the controller skips it while a session holds KV


def test_what_a_session_holds_survives_the_eviction_of_everything_else(cache):
    talk = Conversation(cache)
    talk.turn(run(1000, 8)).serve(run(2000, 4))
    before = talk.slots
    Request(cache, run(5000, 100)).serve()
    assert cache.evict(256) > 0
    assert cache.sizes.protected == 8
    Request(cache, run(7000, 150)).serve()
    assert talk.slots == before
    assert len(before) == 11
    assert cache.holds_computed_kv(run(1000, 8))
    assert cache.cached(run(1000, 8)) == 8


def test_others_share_what_the_first_turn_published(cache):
    talk = Conversation(cache)
    talk.turn(run(1000, 8)).serve(run(2000, 4))
    other = Request(cache, run(1000, 12)).admit()
    assert other.req.prefix_len == 8
    other.prefill().publish().finish()
    assert cache.sizes == Sizes(256 - 12 - talk.held_tokens, 4, 8)


def test_a_session_may_start_on_what_others_published(cache):
    """The first turn matches 8 of another request's 12 and protects them when it is admitted."""
    Request(cache, run(1000, 12)).serve()
    talk = Conversation(cache)
    turn = talk.turn([*run(1000, 8), *run(2000, 8)]).admit()
    assert (turn.req.prefix_len, cache.sizes.protected) == (8, 8)
    turn.prefill().publish().decode([1]).finish()
    assert cache.sizes.protected == 16
    talk.close()
    assert cache.sizes.protected == 0
    assert cache.sizes.total == 256


def test_a_chunked_first_turn_moves_the_lock_along(cache):
    talk = Conversation(cache)
    turn = talk.turn(run(1000, 24)).admit()
    for published in (8, 16, 24):
        turn.prefill(8).publish()
        assert (cache.sizes.protected, talk.slot.kv.cache_protected_len) == (published, published)
    turn.decode([1]).finish()
    assert cache.sizes.protected == 24


def test_closing_a_session_gives_its_row_and_lock_back(cache):
    rows = cache.rows.available_size()
    talk = Conversation(cache)
    talk.turn(run(1000, 8)).serve(run(2000, 4))
    talk.turn(run(3000, 8)).serve(run(4000, 4))
    assert cache.rows.available_size() == rows - 1
    talk.close()
    assert cache.rows.available_size() == rows
    assert cache.sizes == Sizes(248, 8, 0)
    assert cache.evict(8) == 8
    assert cache.free_pages() == list(range(1, 256 // cache.page_size + 1))


def test_an_aborted_turn_gives_the_lock_back_and_the_next_turn_starts_over(cache):
    talk = Conversation(cache)
    talk.turn(run(1000, 8)).serve(run(2000, 4))
    turn = talk.turn(run(3000, 8)).admit().prefill()
    turn.req.finished_reason = FINISH_ABORT()
    release_kv_cache(turn.req, cache.tree, checkpoint=False)
    assert talk.slot is None
    assert cache.sizes == Sizes(248, 8, 0)
    again = talk.turn(run(5000, 8)).admit()
    assert again.req.prefix_len == 8
    again.prefill().publish().decode([1]).finish()
    assert cache.sizes.total + talk.held_tokens == 256


def test_a_trim_never_reaches_into_a_session(cache):
    """A0[8] is the session's, A1[8] hangs below it; only A1 goes, page by page."""
    talk = Conversation(cache)
    talk.turn(run(1000, 8)).serve([1])
    cache.insert(run(1000, 16))
    evicted = 0
    while cache.evict(cache.page_size):
        evicted += cache.page_size
    assert evicted == 8
    assert cache.sizes.protected == 8
    talk.turn(run(3000, 4)).serve([1])
    assert cache.sizes.total + talk.held_tokens == 256


# Flush while a session is open: idle is all that SGLang asks for


def test_reset_voids_the_lock_of_an_open_session(cache):
    talk = Conversation(cache)
    talk.turn(run(1000, 8)).serve(run(2000, 4))
    assert cache.sizes.protected == 8
    cache.reset()
    assert cache.sizes == Sizes(256, 0, 0)
    cache.tree.sanity_check()


def test_releasing_a_session_after_a_reset_is_harmless(cache):
    rows = cache.rows.available_size()
    talk = Conversation(cache)
    talk.turn(run(1000, 8)).serve(run(2000, 4))
    cache.reset()
    cache.tree.release_session(talk.name)
    talk.close()
    assert cache.sizes == Sizes(256, 0, 0)
    assert cache.rows.available_size() == rows
    assert cache.free_pages() == list(range(1, 256 // cache.page_size + 1))


def test_a_session_goes_on_after_a_reset(cache):
    """Its history is prefilled again, published again and locked again."""
    talk = Conversation(cache)
    talk.turn(run(1000, 8)).serve(run(2000, 4))
    cache.reset()
    turn = talk.turn(run(3000, 8)).admit()
    assert turn.req.prefix_len == 0
    turn.prefill().publish().decode([1]).finish()
    assert cache.sizes.protected == cache.whole_pages(20)
    assert cache.sizes.total + talk.held_tokens == 256
    talk.close()
    assert cache.sizes.protected == 0
