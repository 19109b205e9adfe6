"""Checks run side by side: one that hangs or breaks is a line of the report."""

from __future__ import annotations

import threading

from tinsmith.config import Config
from tinsmith.doctor.examination import CHECKS, examine
from tinsmith.doctor.finding import Subject, ok


def breaking(_):
    msg = "no such thing"
    raise RuntimeError(msg)


def test_a_check_that_breaks_or_hangs_is_a_finding(tmp_path):
    let_go = threading.Event()
    checks = {
        "broken": breaking,
        "hanging": lambda _: let_go.wait(60) and None,
        "fine": lambda _: ok("fine", "yes"),
        "none": lambda _: None,
        "many": lambda _: [ok("a", ""), ok("b", "")],
    }
    subject = Subject(Config(data_dir=tmp_path), {})
    found = list(examine(subject, checks, patience_s=5.0))
    let_go.set()

    assert [(one.check, one.level) for one in found] == [
        ("broken", "fail"),
        ("hanging", "fail"),
        ("fine", "ok"),
        ("a", "ok"),
        ("b", "ok"),
    ]
    assert "RuntimeError: no such thing" in found[0].says
    assert "has not come to an end" in found[1].says


def test_on_a_machine_with_nothing_on_it_no_check_breaks(tmp_path):
    subject = Subject(Config(data_dir=tmp_path / "none"), {"HOME": str(tmp_path)})
    found = list(examine(subject, CHECKS))

    assert not [one for one in found if "the check itself failed" in one.says]
    assert all(one.remedy for one in found if one.level != "ok")
    assert not (tmp_path / "none").exists()
