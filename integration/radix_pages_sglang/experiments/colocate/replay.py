"""Both models under one rule in virtual time, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from radix_pages_sglang.experiments.colocate.cache import Device
from radix_pages_sglang.experiments.colocate.neighbours import Neighbour
from radix_pages_sglang.experiments.colocate.outcome import Outcome, Sample, outcome
from radix_pages_sglang.experiments.colocate.rules import Rule
from radix_pages_sglang.experiments.colocate.scenarios import Scenario
from radix_pages_sglang.experiments.colocate.streams import Request

TICK_SECONDS = 0.1
"""How often the broker looks."""


def replay(rule: Rule, setting: float, streams: Sequence[Sequence[Request]], scenario: Scenario) -> Outcome:
    """Serve both streams to their end. Raises RuntimeError when a model's accounts do not agree afterwards."""
    memory = scenario.memory
    device = Device(memory.budget_frames)
    cap = round(setting * memory.budget_frames * memory.pages_per_frame) if rule.has_cap else None
    models = [
        Neighbour(
            requests,
            device,
            memory,
            scenario.speeds,
            shrink=rule.shrink,
            cached_pages=cap,
            gives_all=rule.has_cap,
        )
        for requests in streams
    ]
    broker = rule.make_broker(models, memory.budget_frames, setting, scenario.basis)
    samples = []
    ticks = 0
    while not all(model.is_done for model in models):
        now = ticks * TICK_SECONDS
        broker.tick(now)
        first, second = models
        ceilings = (first.ceiling_frames, second.ceiling_frames)
        samples.append(Sample(now, (first.committed_frames, second.committed_frames), ceilings))
        ticks += 1
        for model in models if ticks % 2 else models[::-1]:
            model.run_until(ticks * TICK_SECONDS)
    for model in models:
        model.check()
    return outcome(
        [one for model in models for one in model.served],
        broker.lends,
        samples,
        scenario.judged,
        failed_commits=sum(model.cache.residency.counts.commit_failures for model in models),
        lost=sum(model.lost for model in models),
        retracted=sum(model.retracted for model in models),
        evicted_pages=sum(model.cache.evicted_pages for model in models),
        moved_pages=sum(model.cache.moved_pages for model in models),
    )
