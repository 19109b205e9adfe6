from __future__ import annotations

import io

import pytest
from rich.console import Console

from tinsmith.demo.loop import Step
from tinsmith.demo.progress import step, training_bar


@pytest.fixture
def console() -> Console:
    """Not a terminal, as in CI."""
    return Console(file=io.StringIO(), width=200)


def test_a_step_is_one_line_that_says_what_and_how_long(console):
    with step(console, "Starting [the] server in /data[1]"):
        pass

    assert console.file.getvalue() == "Starting [the] server in /data[1]: 0 s\n"


def test_a_step_that_fails_is_not_reported_as_done(console):
    with pytest.raises(OSError, match="full"), step(console, "Saving"):
        raise OSError("full")

    assert "Saving" not in console.file.getvalue()


def test_the_bar_passes_steps_on_and_shows_loss_and_speed(console):
    steps = [
        Step(number=1, loss_per_token=3.0, tokens=40, ended_s=1.0),
        Step(number=2, loss_per_token=1.25, tokens=60, ended_s=4.0),
    ]

    assert list(training_bar(console, steps, total=2)) == steps
    assert "2/2 steps, loss 1.25 per token, 25 tokens/s" in console.file.getvalue()
