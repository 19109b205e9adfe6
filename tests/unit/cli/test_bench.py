"""`tinsmith bench` lists what there is to measure, and says where it is when it is not here."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from tinsmith.cli import bench
from tinsmith.cli.app import app

TREE = Path(__file__).parents[3]
BROKEN = '"""Ends with 7;\nas told."""\nimport sys\nsys.exit(7)\n'


def tree(folder):
    (folder / "tests" / "bench").mkdir(parents=True)
    (folder / "Makefile").write_text("bench:\n\tpython -m tests.bench.broken\n")
    (folder / "tests" / "bench" / "broken.py").write_text(BROKEN)
    return folder


def test_every_bench_of_the_makefile_is_listed():
    found = bench.benches(TREE)

    assert {"step", "log", "trainer", "tenants", "gateway", "weights", "checkpoint"} <= set(found)
    assert all(found.values())


def test_a_bench_is_run_and_its_code_is_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TREE", tree(tmp_path))

    assert CliRunner().invoke(app, ["bench"]).stdout == "broken  Ends with 7\n"
    assert CliRunner().invoke(app, ["bench", "broken"]).exit_code == 7


def test_an_unknown_bench_and_a_tree_that_is_not_there(tmp_path, monkeypatch):
    shown = CliRunner().invoke(app, ["bench", "none"])
    assert shown.exit_code == 2
    assert "there is no bench 'none'; one of step," in shown.stderr
    monkeypatch.setattr(bench, "TREE", tmp_path)
    shown = CliRunner().invoke(app, ["bench"])
    assert shown.exit_code == 2
    assert "get the source tree" in shown.stderr
