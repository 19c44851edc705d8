"""Chooses every rule's setting on training streams and measures all rules on held-out ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from radix_pages_sglang.experiments.colocate.outcome import Outcome
from radix_pages_sglang.experiments.colocate.replay import replay
from radix_pages_sglang.experiments.colocate.rules import SPLIT, Rule
from radix_pages_sglang.experiments.colocate.scenarios import Scenario

HELD_OUT = 1_000
"""Held-out streams have seeds from here on."""


@dataclass(frozen=True, slots=True)
class Task:
    """One replay."""

    rule: Rule
    setting: float
    seed: int
    scenario: Scenario


Run: TypeAlias = Callable[[Sequence[Task]], list[Outcome]]
"""Replays tasks, in their order."""


def run_task(task: Task) -> Outcome:
    """What a process of the pool does."""
    return replay(task.rule, task.setting, task.scenario.streams(task.seed), task.scenario)


@contextmanager
def runner(jobs: int | None, tick: Callable[[int], None]) -> Iterator[Run]:
    """What replays tasks, in `jobs` processes (default: one for each core); `tick` hears of each that is done."""
    count = jobs or os.cpu_count() or 1

    def counted(outcomes: Iterable[Outcome]) -> list[Outcome]:
        found = []
        for one in outcomes:
            found.append(one)
            tick(1)
        return found

    if count == 1:
        yield lambda tasks: counted(map(run_task, tasks))
        return
    with ProcessPoolExecutor(count) as pool:
        yield lambda tasks: counted(pool.map(run_task, tasks))


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule's setting, and the hit rates of training for every setting that was tried."""

    rule: Rule
    setting: float
    tried: dict[float, float]


def choose(rule: Rule, scenario: Scenario, seeds: Sequence[int], run: Run) -> Choice:
    """The setting with the most joint hits on training streams among those under which fewest requests failed."""
    tasks = [Task(rule, setting, seed, scenario) for setting in rule.settings for seed in seeds]
    outcomes = run(tasks)
    tried: dict[float, float] = {}
    order = []
    for place, setting in enumerate(rule.settings):
        own = outcomes[place * len(seeds) : (place + 1) * len(seeds)]
        tried[setting] = sum(one.hit_tokens for one in own) / sum(one.prompt_tokens for one in own)
        order.append((-sum(one.failed_requests for one in own), tried[setting], -place, setting))
    return Choice(rule, max(order)[-1], tried)


def choose_all(
    rules: Sequence[Rule], scenario: Scenario, seeds: Sequence[int], run: Run
) -> tuple[list[Choice], Scenario]:
    """A choice for every rule, the static split's first, and the scenario with that split as the rules' basis."""
    split = choose(SPLIT, scenario, seeds, run)
    scenario = replace(scenario, basis=replace(scenario.basis, split=split.setting))
    return [split] + [choose(rule, scenario, seeds, run) for rule in rules if rule is not SPLIT], scenario


def evaluate(
    choices: Sequence[Choice], scenario: Scenario, seeds: Sequence[int], run: Run
) -> dict[str, list[Outcome]]:
    """Outcomes of every rule on the same streams, by its name and in the order of `seeds`."""
    outcomes = run([Task(one.rule, one.setting, seed, scenario) for one in choices for seed in seeds])
    return {
        one.rule.name: outcomes[place * len(seeds) : (place + 1) * len(seeds)] for place, one in enumerate(choices)
    }
