"""Two models that share memory, by replay: what every rule must keep to, and that the accounts are true."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from radix_pages_sglang import cli
from radix_pages_sglang.experiments.colocate.replay import replay
from radix_pages_sglang.experiments.colocate.rules import FLUSH, OURS, RULES, SPLIT
from radix_pages_sglang.experiments.colocate.scenarios import REPLAYED
from radix_pages_sglang.experiments.colocate.training import Choice, choose, evaluate, run_task

SHORT = REPLAYED.lasting(15.0, 2)
BUDGET = SHORT.memory.budget_frames


def run(tasks):
    return [run_task(task) for task in tasks]


@pytest.fixture(scope="module")
def outcomes():
    """Every rule on the same streams, with its middle setting. A replay raises if its accounts do not agree."""
    streams = SHORT.streams(7)
    return {rule.name: replay(rule, rule.settings[len(rule.settings) // 2], streams, SHORT) for rule in RULES}


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_both_models_together_never_hold_more_than_the_budget(outcomes, rule):
    assert max(sum(sample.committed) for sample in outcomes[rule].samples) <= BUDGET


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_no_request_fails(outcomes, rule):
    assert outcomes[rule].failed_requests == 0
    assert outcomes[rule].requests == outcomes[SPLIT.name].requests > 20


def test_a_static_split_lends_nothing_and_ours_does(outcomes):
    first = round(SPLIT.settings[len(SPLIT.settings) // 2] * BUDGET)
    assert outcomes[SPLIT.name].lent_frames((first, BUDGET - first)) == 0
    assert outcomes[OURS.name].lent_frames((first, BUDGET - first)) > 0


def test_only_the_rule_that_moves_moves(outcomes):
    assert [name for name, one in outcomes.items() if one.moved_pages] == [OURS.name]


def test_the_same_streams_come_to_the_same(outcomes):
    again = replay(OURS, OURS.settings[len(OURS.settings) // 2], SHORT.streams(7), SHORT)
    assert again == outcomes[OURS.name]


def test_held_out_streams_are_not_those_of_training():
    assert SHORT.streams(0) != SHORT.streams(1_000)


def test_the_setting_with_most_hits_among_those_that_fail_least_is_chosen():
    tasks = []

    def pretended(asked):
        tasks.extend(asked)
        hits = {0.5: 900, 1.0: 100, 2.0: 300}
        one = replace(outcome_of_nothing(), prompt_tokens=1000)
        return [
            replace(one, hit_tokens=hits.get(task.setting, 0), failed_requests=int(task.setting == 0.5))
            for task in asked
        ]

    assert choose(FLUSH, SHORT, [1, 2], pretended).setting == 2.0
    assert [(task.setting, task.seed) for task in tasks[:3]] == [(0.5, 1), (0.5, 2), (1.0, 1)]


def test_outcomes_stand_by_rule_in_the_order_of_streams():
    choices = [Choice(rule, rule.settings[0], {}) for rule in (SPLIT, FLUSH)]

    def pretended(asked):
        return [replace(outcome_of_nothing(), requests=task.seed) for task in asked]

    found = evaluate(choices, SHORT, [5, 6], pretended)
    assert {name: [one.requests for one in own] for name, own in found.items()} == {
        SPLIT.name: [5, 6],
        FLUSH.name: [5, 6],
    }


def outcome_of_nothing():
    streams = ([], [])
    return replay(SPLIT, SPLIT.settings[0], streams, SHORT)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--trace", "a", "--trace", "b", "--trace", "c"], "--trace was given 3 times"),
        (["--trace", "no-such-file"], "no-such-file"),
        (["--frame-pages", "3"], "--frame-pages 3"),
    ],
)
def test_bad_input_is_named_before_anything_runs(argv, says):
    done = CliRunner().invoke(cli.app, ["experiment", "colocate", "--no-served", *argv])
    assert done.exit_code == 2
    assert says in done.output


def test_committed_rows_have_no_failed_request():
    from radix_pages_sglang.experiments.provenance import RESULTS

    rows = json.loads((RESULTS / "colocate" / "report.json").read_text())["rows"]
    assert {row["rule"] for row in rows} >= {rule.name for rule in RULES}
    assert all(row["failed_requests"] == 0 for row in rows if row["kind"] == "replay")
