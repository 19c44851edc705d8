"""Two real servers share one memory budget while their ceilings are moved, as the colocate experiment does it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radix_pages_sglang.experiments.colocate.outcome import Outcome
from radix_pages_sglang.experiments.colocate.rules import OURS
from radix_pages_sglang.experiments.colocate.scenarios import SERVED
from radix_pages_sglang.experiments.colocate.served import ServedModel, serve, two_servers
from radix_pages_sglang.local_server import repeating
from radix_pages_sglang.resident import resident_bytes
from tests.engine.test_frames import complaints

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SHORT = SERVED.lasting(3.0, 3)
"""Bursts of three seconds; the first two count for nothing."""
KEPT = 0.2
"""The part of the budget that a model keeps while the other one is busy."""


@pytest.fixture(scope="module")
def models() -> Iterator[list[ServedModel]]:
    with two_servers(SHORT.memory) as models:
        yield models


@pytest.fixture(scope="module")
def seen_outside(models) -> list[list[int]]:
    """Bytes of each model's KV mapping, as the system counted them while `shared` ran."""
    return [[] for _ in models]


@pytest.fixture(scope="module")
def shared(models, seen_outside) -> Outcome:
    def look() -> None:
        for model, seen in zip(models, seen_outside, strict=True):
            memory = model.state["memory"]
            seen.append(resident_bytes(*memory["region"], pid=memory["pid"]))

    with repeating(look, every_seconds=0.1):
        return serve(OURS, KEPT, models, SHORT.streams(1), SHORT)


def test_every_request_is_answered_while_ceilings_move(shared):
    assert shared.requests > 20
    assert (shared.failed_requests, shared.failed_commits, shared.problems) == (0, 0, ())
    assert len(shared.first_token_seconds) == shared.requests
    assert 0 < shared.hit_rate < 1


def test_each_model_lends_to_the_other_and_the_two_never_have_more_than_the_budget(shared):
    budget = SHORT.memory.budget_frames
    firsts = [sample.ceilings[0] for sample in shared.samples]
    assert min(firsts) < budget / 2 < max(firsts)
    assert len(shared.lend_seconds) > 1
    assert shared.lent_frames((budget // 2, budget // 2)) > 0
    for sample in shared.samples:
        assert sum(sample.ceilings) <= budget, sample
        assert sum(sample.committed) <= budget, sample


def test_the_system_sees_memory_go_from_one_to_the_other(models, shared, seen_outside):
    """By more than a frame, in both directions."""
    for model, seen in zip(models, seen_outside, strict=True):
        assert len(seen) > 20
        assert max(seen) - min(seen) > model.frame_bytes


def test_after_all_that_no_check_has_complained(models, shared):
    assert [complaints(model.server) for model in models] == [[], []]
