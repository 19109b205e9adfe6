"""The machinery of ``make study-lora``: what it runs, and what it makes of it. Not the trend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from tests.study import lora
from tests.study.lessons import Lessons
from tests.study.sweep import Run, best
from tests.threads import one_thread

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["one_thread"]


def runs(vertex: float, *powers: float) -> list[Run]:
    """Of rank 8, at powers of ten, with losses on a parabola whose lowest point is ``vertex``."""
    return [Run(8, 10**x, 2 + 0.3 * (x - vertex) ** 2, (), 0.0) for x in powers]


def test_a_quick_study_runs_each_rank_from_the_untrained_model_and_draws_it(tmp_path: Path):
    folder = tiny_model.build(tmp_path / "model")
    args = lora.arguments(["--quick", "--plot", str(tmp_path / "plot.svg")])

    made = lora.conduct(args, folder, "tiny")

    found = [(run["rank"], run["rate"]) for run in made["runs"]]
    assert found == [(r, x) for r in (1, 8) for x in args.rates] + [(0, x) for x in args.full_rates]
    assert all(math.isfinite(run["held_out"]) for run in made["runs"])
    begun = [run["losses"][0] for run in made["runs"]]
    assert begun == pytest.approx([begun[0]] * len(begun), abs=1e-3)
    before = made["conclusions"]["held_out_untrained"]
    assert all(one["held_out"] < before for one in made["conclusions"]["best"])
    assert made["conclusions"]["times_full"].keys() == {"1", "8"}
    assert (tmp_path / "plot.svg").read_text().count("<polyline") == 3


def test_the_best_rate_is_where_a_parabola_is_lowest():
    found = best(runs(-2.3, -4, -3.5, -2.5, -2, -1))

    assert found.rate == pytest.approx(10**-2.5)
    assert found.fitted == pytest.approx(10**-2.3)
    assert found.is_inside


def test_a_best_rate_at_the_end_of_the_grid_is_told():
    found = best(runs(-2.3, -4, -3, -2.5))

    assert found.fitted == found.rate == pytest.approx(10**-2.5)
    assert not found.is_inside


def test_beside_a_run_that_diverged_nothing_is_fitted():
    *calm, wild = runs(-2.3, -4, -2.5, -1)
    found = best([*calm, wild._replace(held_out=math.inf)])

    assert found.fitted == found.rate == pytest.approx(10**-2.5)


def test_every_question_comes_once_before_any_comes_again():
    lessons = Lessons(tuple("abcdef"), ())
    batches = [*lessons.batches(6, 4, seed=1)]

    assert [len(batch) for batch in batches] == [4] * 6
    flat = [one for batch in batches for one in batch]
    assert all(sorted(flat[n : n + 6]) == sorted("abcdef") for n in range(0, 24, 6))
    assert batches == [*lessons.batches(6, 4, seed=1)]
    assert batches != [*lessons.batches(6, 4, seed=2)]
