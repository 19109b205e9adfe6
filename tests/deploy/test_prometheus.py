"""Prometheus's own tool takes what we give it, and each alert comes when it should and only then.

Without ``promtool`` on the PATH (Debian's package ``prometheus`` has it) this is skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field

import pytest
import yaml
from tests.deploy.shipped import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on the PATH")
MINUTES = 60
LATE = 45  # in minutes: longer than any alert waits


@dataclass(frozen=True)
class Case:
    """Series, name and labels -> value or growth a minute, and what the alert says of them."""

    alert: str
    fires: dict[str, str]
    silent: list[dict[str, str]]
    labels: dict[str, str] = field(default_factory=dict)
    value: str = ""  # as a sentence of the alert has it


ONE = {"instance": "a:1"}
BUSY = 'tinsmith_trainer_busy_share{base_model="m",instance="a:1"}'
WAITING = 'tinsmith_trainer_models_waiting{base_model="m",instance="a:1"}'
COMMITS = "tinsmith_trainer_commit_seconds_bucket"

CASES = [
    Case(
        "TinsmithProcessAway",
        {'up{job="tinsmith-up",instance="a:1"}': "0"},
        [{'up{job="tinsmith-up",instance="a:1"}': "1"}, {'up{job="else",instance="a:1"}': "0"}],
        {"job": "tinsmith-up", **ONE},
    ),
    Case(
        "TinsmithNotReady",
        {'tinsmith_ready{service="trainer",instance="a:1"}': "0"},
        [{'tinsmith_ready{service="trainer",instance="a:1"}': "1"}],
        {"service": "trainer", **ONE},
    ),
    Case(
        "TinsmithBrokerAway",
        {'tinsmith_bus_connected{service="sampler",instance="a:1"}': "0"},
        [{'tinsmith_bus_connected{service="sampler",instance="a:1"}': "1"}],
        {"service": "sampler", **ONE},
    ),
    *(
        Case(
            alert,
            {f'tinsmith_workers{{role="{role}",model="m",instance="a:1"}}': "0"},
            [
                {f'tinsmith_workers{{role="{role}",model="m",instance="a:1"}}': "1"},
                # One gateway that does not hear them yet is no lack of them.
                {
                    f'tinsmith_workers{{role="{role}",model="m",instance="a:1"}}': "0",
                    f'tinsmith_workers{{role="{role}",model="m",instance="b:1"}}': "1",
                },
            ],
            {"model": "m"},
        )
        for alert, role in (("TinsmithNoTrainer", "trainer"), ("TinsmithNoSampler", "sampler"))
    ),
    Case(
        "TinsmithSamplerFenced",
        {'tinsmith_weights_replicas{state="fenced",instance="a:1"}': "1"},
        [{'tinsmith_weights_replicas{state="fenced",instance="a:1"}': "0"}],
        {"state": "fenced", **ONE},
    ),
    Case(
        "TinsmithWeightsMismatch",
        {'tinsmith_weights_mismatches_total{instance="a:1"}': "0+1"},
        [{'tinsmith_weights_mismatches_total{instance="a:1"}': "7"}],
        ONE,
    ),
    Case(
        "TinsmithSamplersDisagree",
        {'tinsmith_canary_over{part="numerics",base_model="m",instance="a:1"}': "1"},
        [
            {'tinsmith_canary_over{part="numerics",base_model="m",instance="a:1"}': "0"},
            {'tinsmith_canary_over{part="staleness",base_model="m",instance="a:1"}': "1"},
        ],
        {"base_model": "m"},
    ),
    Case(
        "TinsmithSamplesStale",
        {'tinsmith_canary_over{part="staleness",base_model="m",instance="a:1"}': "1"},
        [
            {'tinsmith_canary_over{part="staleness",base_model="m",instance="a:1"}': "0"},
            {'tinsmith_canary_over{part="numerics",base_model="m",instance="a:1"}': "1"},
        ],
        {"base_model": "m"},
    ),
    Case(
        "TinsmithBrokerFull",
        {'tinsmith_bus_refused_total{kind="op",reason="bytes",instance="a:1"}': "0+1"},
        [{'tinsmith_bus_refused_total{kind="op",reason="bytes",instance="a:1"}': "3"}],
        {"kind": "op", "reason": "bytes", **ONE},
    ),
    Case(
        "TinsmithWorkWaitsLong",
        {'tinsmith_queue_oldest_seconds{queue="TS_OPS",instance="a:1"}': "1000"},
        [
            {'tinsmith_queue_oldest_seconds{queue="TS_OPS",instance="a:1"}': "800"},
            {'tinsmith_queue_oldest_seconds{queue="TS_HELD",instance="a:1"}': "1000"},
        ],
        {"queue": "TS_OPS"},
        "16m 40s",
    ),
    Case(
        "TinsmithTrainerStuck",
        {'tinsmith_trainer_turn_age_seconds{instance="a:1"}': "1000"},
        [{'tinsmith_trainer_turn_age_seconds{instance="a:1"}': "800"}],
        ONE,
        "16m 40s",
    ),
    Case(
        "TinsmithTrainersBusy",
        {BUSY: "0.99", WAITING: "5"},
        [{BUSY: "0.99", WAITING: "0"}, {BUSY: "0.5", WAITING: "5"}],
        {"base_model": "m"},
    ),
    Case(
        "TinsmithModelsFail",
        {'tinsmith_trainer_models_lost_total{why="failed",instance="a:1"}': "0+1"},
        [
            {'tinsmith_trainer_models_lost_total{why="failed",instance="a:1"}': "2"},
            {'tinsmith_trainer_models_lost_total{why="fenced",instance="a:1"}': "0+1"},
        ],
        {"why": "failed", **ONE},
    ),
    Case(
        "TinsmithServerErrors",
        {'tinsmith_http_requests_total{route="/r",status="503",instance="a:1"}': "0+60"},
        [
            {'tinsmith_http_requests_total{route="/r",status="429",instance="a:1"}': "0+60"},
            {'tinsmith_http_requests_total{route="/r",status="503",instance="a:1"}': "0+1"},
        ],
        {"route": "/r"},
    ),
    Case(
        "TinsmithOperationsFail",
        {'tinsmith_trainer_ops_total{op="save",outcome="unknown",instance="a:1"}': "0+1"},
        [{'tinsmith_trainer_ops_total{op="save",outcome="user",instance="a:1"}': "0+1"}],
        {"op": "save"},
    ),
    Case(
        "TinsmithCommitsSlow",
        {f'{COMMITS}{{le="{le}"}}': grown for le, grown in (("1", "0"), ("+Inf", "0+60"))}
        | {f'{COMMITS}{{le="5"}}': "0+60"},
        [{f'{COMMITS}{{le="{le}"}}': "0+60" for le in ("1", "5", "+Inf")}],
    ),
]


def text_of(series, value):
    """Promtool's notation: a start and the growth of each minute."""
    start, _, grown = value.partition("+")
    return {"series": series, "values": f"{start}+{grown or 0}x{MINUTES}"}


def minutes(rule):
    found = re.fullmatch(r"(\d+)m", rule.get("for", "0m"))
    assert found, rule["for"]
    return int(found[1])


def said(case):
    """The alert as it is to be, its sentences filled in."""
    labels = RULES[case.alert]["labels"] | case.labels
    annotations = {
        name: re.sub(
            r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], sentence
        ).replace("{{ $value | humanizeDuration }}", case.value)
        for name, sentence in RULES[case.alert]["annotations"].items()
    }
    return {"exp_labels": labels, "exp_annotations": annotations}


def trials(case):
    """For promtool: silent until it has lasted, then there; and silent when all is well."""

    def one(series, expected):
        return {
            "interval": "1m",
            "input_series": [text_of(*pair) for pair in series.items()],
            "alert_rule_test": [
                {"alertname": case.alert, "eval_time": f"{at}m", "exp_alerts": alerts}
                for at, alerts in expected
            ],
        }

    waits = minutes(RULES[case.alert])
    early = [(waits - 1, [])] if waits else []
    return [
        one(case.fires, [*early, (LATE, [said(case)])]),
        *(one(series, [(LATE, [])]) for series in case.silent),
    ]


def promtool(*arguments):
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)


def test_there_is_a_case_of_every_alert():
    assert sorted(case.alert for case in CASES) == sorted(RULES)


@needs_promtool
def test_promtool_takes_rules_and_configuration():
    rules = promtool("check", "rules", PROMETHEUS / "alerts.yml")
    assert rules.returncode == 0, rules.stdout + rules.stderr

    scraping = promtool("check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")
    assert scraping.returncode == 0, scraping.stdout + scraping.stderr


@needs_promtool
def test_promtool_takes_every_expression_of_the_dashboard(tmp_path):
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "tinsmith.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    path = tmp_path / "rules.yml"
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(asked)
    ]
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))

    checked = promtool("check", "rules", path)

    assert f"{len(asked)} rules found" in checked.stdout, checked.stdout + checked.stderr
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_each_alert_comes_when_it_should_and_only_then(tmp_path):
    path = tmp_path / "test.yml"
    tests = {
        "rule_files": [str(PROMETHEUS / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [trial for case in CASES for trial in trials(case)],
    }
    path.write_text(yaml.safe_dump(tests))

    tested = promtool("test", "rules", path)

    assert tested.returncode == 0, tested.stdout + tested.stderr
