"""What a replay prints."""

from __future__ import annotations

import json

from tinsmith.cli.replay import Options
from tinsmith.logbook.differences import Difference, Gap
from tinsmith_trainer.replay_report import summarise, to_json, to_text
from tinsmith_trainer.replaying import Divergence, Findings
from tinsmith_trainer.segments import Sample, Stretch, plan

WHOLE = plan([], 9, Stretch())
PARTED = Divergence(4, "optim_step", Difference("state", "aaa", "bbb"))


def summary(findings=None, found_plan=WHOLE, **options):
    findings = findings or Findings(results=10, states=1, last_seq=9, seconds=2.0, tokens=600)
    return summarise("m", Options(target="m", **options), found_plan, findings, ["w"])


def test_equality_is_told_with_what_was_compared_and_how_fast():
    assert to_text(summary()).splitlines() == [
        "EQUAL bit for bit: run m",
        "ops 0 to 9: compared 10 results and 1 state",
        "took 2.0 s: 5.0 ops/s, 300 tokens/s",
    ]


def test_a_divergence_is_told_first_with_both_sides():
    lines = to_text(summary(Findings(divergence=PARTED))).splitlines()

    assert lines[:3] == [
        "DIVERGED at op 4 (optim_step), state: run m",
        "  in the log: aaa",
        "  found here: bbb",
    ]


def test_what_was_not_compared_is_told():
    findings = Findings(led_up=1)
    findings.not_repeated.update({"saves": 2, "others": 1})

    text = to_text(summary(findings))

    assert "not repeated: 1 others, 2 saves" in text
    assert "repeated without comparing: 1 op\n" in text


def test_a_tolerance_is_told_with_the_largest_difference():
    findings = Findings(largest=Gap(0.5, "logprobs[0][1]"), largest_seq=3)

    text = to_text(summary(findings, tolerance=0.75))

    assert "EQUAL within 0.75" in text
    assert "largest difference: 0.5 (op 3, logprobs[0][1])" in text


def test_a_sample_is_told_with_its_seed():
    sampled = plan([], 9, Stretch(), Sample(1.0, 77))

    assert "1 of 1 segment, chosen by --seed 77" in to_text(summary(found_plan=sampled))


def test_json_has_the_verdict_and_where_it_diverged():
    told = json.loads(to_json(summary(Findings(divergence=PARTED))))

    assert told["verdict"] == "diverged"
    assert told["divergence"] == {
        "seq": 4, "op": "optim_step", "field": "state", "expected": "aaa", "found": "bbb",
    }  # fmt: skip
    assert told["warnings"] == ["w"]


def test_what_a_log_says_cannot_steer_a_terminal():
    forged = Divergence(4, "optim_step", Difference("metrics[\x1b[2J]", "1", "2"))

    assert "metrics[\\u001b[2J]" in to_text(summary(Findings(divergence=forged)))
