"""Dashboard, alert rules and Dockerfile: they load, and name only what exists."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.client.exported import EXPORTED, LABELS, SCRAPE_LABELS

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "integration/monitoring/grafana/radix-pages.json").read_text())
ALERTS = yaml.safe_load((ROOT / "integration/monitoring/alerts/radix-pages.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = DASHBOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}

WORDS = {"and", "or", "unless", "on", "ignoring", "bool"}
"""Of PromQL; functions and aggregations are told by the bracket behind them."""


def queries():
    """Every expression of dashboard and alerts, its variables' queries included, by where it stands."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']}/{target['refId']}", target["expr"]
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            yield f"${name}", re.sub(r"^label_values\((.*), \w+\)$", r"\1", variable["query"]["query"])
    for rule in RULES:
        yield rule["alert"], rule["expr"]


QUERIES = dict(queries())


def metrics(query):
    """The names of metrics in a PromQL expression: all words but labels, durations and those of PromQL."""
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|without|on|ignoring) *\([^)]*\)", " ", bare)
    words = re.findall(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?![\w:]| *\()", bare)
    return {word for word in words if word not in WORDS}


def labels(query):
    """The labels that a PromQL expression matches, keeps or drops."""
    matched = re.findall(r'(\w+) *(?:=~|!~|!=|=) *"', query)
    grouped = re.findall(r"\b(?:by|without|on|ignoring) *\(([^)]*)\)", query)
    return {*matched, *(name.strip() for names in grouped for name in names.split(","))}


def test_metrics_and_labels_are_found_in_an_expression():
    query = 'sum without (le, x) (rate(a:b_total{c=~"d|"}[5m])) > 0.5 * 1e3 * e_bucket{f!="g h"} and on (i) j offset'
    assert metrics(query) == {"a:b_total", "e_bucket", "j", "offset"}
    assert labels(query) == {"le", "x", "c", "f", "i"}


@pytest.mark.parametrize("place", QUERIES)
def test_an_expression_names_only_metrics_and_labels_that_a_server_exports(place):
    assert metrics(QUERIES[place]) - EXPORTED == set()
    assert labels(QUERIES[place]) - LABELS - SCRAPE_LABELS == set()
    assert metrics(QUERIES[place])


def test_every_metric_is_watched_somewhere():
    watched = set().union(*map(metrics, QUERIES.values()))
    families = {re.sub("_(bucket|count|sum)$", "", name) for name in EXPORTED}
    assert families - {re.sub("_(bucket|count|sum)$", "", name) for name in watched} == set()


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in PANELS:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert x + w <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_reads_the_chosen_data_source():
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert VARIABLES["datasource"]["type"] == "datasource"
    for panel in PANELS:
        assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [chosen] * (
            1 + len(panel["targets"])
        )


def test_every_variable_is_used_and_every_one_used_exists():
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?([a-z]\w*)", text))
    assert used == set(VARIABLES)
    assert {"job", "instance", "dp_rank", "tp_rank", "pp_rank"} < used


def test_every_query_of_the_dashboard_follows_the_chosen_ranks():
    for panel in PANELS:
        for target in panel["targets"]:
            selectors = re.findall(r"[\w:]+\{([^}]*)\}", target["expr"])
            assert len(selectors) == len(re.findall(r"(?:radix_pages|sglang):", target["expr"]))
            for selector in selectors:
                assert {"job", "instance", "dp_rank", "tp_rank", "pp_rank"} <= labels(selector + " ")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_rule_is_complete(rule):
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"RadixPages\w+", rule["alert"])
    assert re.fullmatch(r"\d+[smh]", rule["for"])
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    for text in rule["annotations"].values():
        assert text.count("{{") == text.count("}}")


def test_there_is_an_alert_for_each_kind_of_trouble():
    assert [rule["alert"].removeprefix("RadixPages") for rule in RULES] == [
        "Degraded",
        "CommitFailures",
        "OverCeiling",
        "Thrash",
        "FarAbovePackedFloor",
        "CeilingRefusals",
    ]


def test_the_dockerfile_copies_what_the_package_is_made_of():
    lines = (ROOT / "integration/docker/Dockerfile").read_text().splitlines()
    copied = {source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"]
    assert {folders["radix_pages"], folders["radix_pages_sglang"], "pyproject.toml"} <= copied
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= copied
    assert all((ROOT / source).exists() for source in copied)
    sent = (ROOT / "integration/docker/Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in sent if line.startswith("!")} == copied
