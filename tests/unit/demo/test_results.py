from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tinsmith.demo.loop import Step
from tinsmith.demo.results import Results, side_by_side, write

GOOD, BAD = "Ice is frozen water STOP", "Ice is [b]frozen[/b] water."


def results(*, passed_before: int, passed_after: int) -> Results:
    def answers(passed: int) -> tuple[str, ...]:
        return (GOOD,) * passed + (BAD,) * (10 - passed)

    return Results(
        base_model="tiny",
        questions=("What is ice?",) * 10,
        before=answers(passed_before),
        after=answers(passed_after),
        steps=(
            Step(number=1, loss_per_token=3.0, tokens=40, ended_s=1.0),
            Step(number=2, loss_per_token=1.0, tokens=60, ended_s=4.0),
        ),
        checkpoint="tinker://run/weights/demo",
    )


@pytest.mark.parametrize(
    ("before", "after", "learned"), [(0, 10, True), (2, 6, True), (3, 10, False), (0, 5, False)]
)
def test_the_model_has_learned_when_the_pass_rate_rose_clearly(before, after, learned):
    assert results(passed_before=before, passed_after=after).has_learned is learned


def test_the_json_holds_what_a_program_needs(tmp_path):
    write(results(passed_before=0, passed_after=9), tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())

    assert (content["pass_rate_before"], content["pass_rate_after"]) == (0.0, 0.9)
    assert content["loss_per_token"] == [3.0, 1.0]
    assert content["tokens_per_s"] == 25.0
    assert content["samples"][9] == {"question": "What is ice?", "before": BAD, "after": BAD}


def test_answers_are_shown_as_they_are():
    console = Console(file=io.StringIO(), width=200)
    console.print(side_by_side(results(passed_before=0, passed_after=10)))

    assert BAD in console.file.getvalue()
    assert GOOD in console.file.getvalue()
