"""What `/server_info` tells for the page map: who holds which frames, shared prefixes, hits.

A frame is two pages of four tokens, the first one SGLang's padding page; pools hold 60 tokens: 8 whole frames.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from radix_pages.ledger import Ledger
from radix_pages.units import Geometry
from radix_pages_sglang import counts
from radix_pages_sglang.page_map import Requests, frame_holders, requests_of, runs
from tests.adapter import caches
from tests.adapter.caches import Request, run
from tests.adapter.framed import framed

pytestmark = pytest.mark.usefixtures("published_config")

A, B = run(1000, 16), run(2000, 8)


def pool(**options):
    return framed(page_size=4, frame_pages=2, pool_tokens=60, **options)


def state(c, *requests, waiting=0):
    return c.tree.state(Requests(tuple(request.req.kv for request in requests), waiting))


def holders(c, *requests):
    told = state(c, *requests)["frame_holders"]
    return told["requests"], told["cache"], told["returned"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([7], "7"), ([0, 0, 0, 16, 7, 7], "0*3 16 7*2"), ([1, 2, 1], "1 2 1"), ([5] * 2000, "5*2000")],
)
def test_runs_tell_repeated_numbers_once(numbers, text):
    assert runs(np.array(numbers)) == text


def test_an_untouched_pool_is_held_by_nobody():
    assert holders(pool()) == ("0*8", "0*8", "0*8")


def test_what_no_request_uses_is_the_caches():
    c = pool()
    c.insert(A)
    assert holders(c) == ("0*8", "1 2 1 0*5", "0*8")


def test_a_running_request_holds_its_own_pages_and_the_cached_prefix_that_it_uses():
    """It matches A (pages 1 to 4), locks it and computes pages 7 and 8; B (5 and 6) stays the cache's alone."""
    c = pool()
    c.insert(A)
    c.insert(B)
    request = Request(c, [*A, *run(3000, 8)]).admit().prefill()
    assert holders(c, request) == ("1 2 1*3 0*3", "0*2 1*2 0*4", "0*8")
    told = state(c, request)
    assert told["protected_tokens"] == 16
    assert told["cached_tokens"] == 8


def test_what_a_request_leaves_behind_is_the_caches_once_it_has_ended():
    c = pool()
    request = Request(c, A).admit().prefill().publish().decode([1, 2])
    assert holders(c, request)[1] == "0*8"
    request.finish()
    assert holders(c, request) == ("0*8", "1 2 1 0*5", "0*8")


def test_returned_frames_are_told():
    c = caches.returning(pool_tokens=60, pretended=True)
    c.insert(B)
    assert holders(c) == ("0*8", "1*2 0*6", "0*2 1*6")


def test_of_many_frames_several_stand_together():
    ledger = Ledger(Geometry(1, pages_per_frame=2), 11)
    ledger.hold(np.array([1, 2, 3, 7, 11]))
    told = frame_holders(ledger, np.array([7, 2, 2, 0]), most_cells=3)
    assert told == {"frames_per_cell": 2, "requests": "1*2 0", "cache": "2 0 1", "returned": "0*3"}


def test_a_page_that_a_stale_row_names_but_nobody_holds_is_not_counted():
    ledger = Ledger(Geometry(1, pages_per_frame=2), 5)
    ledger.hold(np.array([1]))
    assert frame_holders(ledger, np.array([1, 4]))["requests"] == "1 0*2"


def test_the_state_tells_what_a_page_takes_and_who_runs_and_waits():
    c = pool()
    request = Request(c, A).admit().prefill()
    told = state(c, request, waiting=3)
    assert (told["running_requests"], told["waiting_requests"]) == (1, 3)
    assert told["page_bytes"] == 4 * 2 * 8  # tokens, keys and values, float64


def test_shared_prefixes_are_told_in_tokens():
    c = pool()
    for tail in (1, 2, 3):
        c.insert([*A, *run(3000 + 100 * tail, 4)])
    (prefix,) = state(c)["shared_prefixes"]["largest"]
    expected = {
        "tokens": 16,
        "own_tokens": 16,
        "spared_tokens": 32,
        "children": 3,
        "leaves": 3,
        "locks": 0,
        "hits": 3,
    }
    assert prefix == expected
    assert state(c)["shared_prefixes"]["is_complete"]


def scheduler_of(c, running=(), last=(), chunked=None):
    def batch(requests):
        return SimpleNamespace(reqs=[request.req for request in requests])

    return SimpleNamespace(
        tree_cache=c.tree,
        running_batch=batch(running),
        last_batch=batch(last) if last else None,
        chunked_req=chunked and chunked.req,
        waiting_queue=[object()],
    )


def test_each_request_with_a_row_counts_once():
    c = pool()
    running, prefilled, chunked = (Request(c, run(1000 * n, 8)).admit().prefill(4) for n in (1, 2, 3))
    waiting = Request(c, run(4000, 8))
    found = requests_of(scheduler_of(c, [running, waiting], [running, prefilled], chunked))
    assert found == Requests((running.req.kv, prefilled.req.kv, chunked.req.kv), waiting=1)


def test_hits_are_counted_without_what_a_retracted_request_prefills_again():
    c = pool()
    reporter = SimpleNamespace(scheduler=scheduler_of(c))
    stats = SimpleNamespace(
        log_hit_tokens=40, log_input_tokens=60, reprocessed_log_hit_tokens=10, reprocessed_log_input_tokens=20
    )
    for _ in range(2):
        counts._count_prefill(reporter, batch=None, prefill_stats=stats, can_run_cuda_graph=False)
    assert (state(c)["hit_tokens"], state(c)["computed_tokens"]) == (60, 80)


def test_another_cache_counts_no_hits():
    reporter = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=object()))
    assert counts._count_prefill(reporter, None, SimpleNamespace()) is None
