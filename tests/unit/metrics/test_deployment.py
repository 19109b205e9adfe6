"""The dashboard and the alert rules name metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tinsmith.metrics import names

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/tinsmith.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
SCRAPING = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def rules():
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def expressions():
    return [
        *((panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]),
        *((rule["alert"], rule["expr"]) for rule in rules()),
        *(
            ("variable", one["query"]["query"])
            for one in DASHBOARD["templating"]["list"]
            if "query" in one and isinstance(one["query"], dict)
        ),
    ]


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_every_metric_that_is_asked_for_is_told_by_somebody(where, expression):
    found = re.findall(r"\btinsmith_\w+", expression)

    assert found or "process_" in expression or "up{" in expression, where
    for name in found:
        declared = names.ALL.get(name) or names.ALL[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert declared.name == name or declared.kind == "histogram"


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_labels_that_are_asked_for_are_those_of_the_metric(where, expression):
    common = {"service", "base_model", "instance", "job", "le"}
    for name, inside in re.findall(r"\b(tinsmith_\w+)\{([^}]*)\}", expression):
        declared = names.ALL.get(name) or names.ALL[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert set(re.findall(r"(\w+)\s*[=!]", inside)) <= common | set(declared.labels), where


def test_panels_have_titles_and_places_of_their_own():
    places = [tuple(panel["gridPos"].values()) for panel in panels()]

    assert all(panel["title"] and panel["targets"] for panel in panels())
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_alerts_say_what_is_wrong_and_what_to_do():
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "remedy"} <= set(rule["annotations"])


def test_the_configuration_reads_the_rules_and_what_up_writes():
    (files,) = [job for job in SCRAPING["scrape_configs"] if job["job_name"] == "tinsmith-up"]

    assert SCRAPING["rule_files"] == ["alerts.yml"]
    assert files["file_sd_configs"][0]["files"][0].endswith("run/prometheus.json")
