"""The examples of docs/examples, run as they are, do to a model what they say."""

from __future__ import annotations

import re

import pytest
from tests.examples.conftest import ROOT, figures

MOST_LINES = 120


def saved(output):
    """The weights that it says can be sampled from."""
    return re.search(r"to sample from: +(tinker://\S+)", output)[1]


def answers(output):
    return re.findall(r"\d \+ \d = (['\"].*['\"])", output)


@pytest.fixture(scope="module")
def taught(scripts):
    """What sft.py printed."""
    return scripts.example("sft", "--steps", "30", "--learning-rate", "1e-2")


def test_sft_lowers_the_loss(taught):
    losses = figures(taught, "loss per token")

    assert len(losses) == 30
    assert losses[-1] < losses[0] / 2


def test_evaluation_sees_what_was_taught(scripts, taught):
    """Numbers as answers: in the saved weights, and not in the base."""
    untrained = scripts.example("evaluate")
    trained = scripts.example("evaluate", model=saved(taught))

    assert not any(re.fullmatch(r"'\d+'", one) for one in answers(untrained))
    assert all(re.fullmatch(r"'\d+'", one) for one in answers(trained))
    assert len(answers(trained)) == len(answers(untrained)) == 20
    assert 0 <= figures(trained, "score")[0] <= 1


def test_rl_begins_with_what_it_loads(scripts, taught):
    state = re.search(r"to train on: +(tinker://\S+)", taught)[1]
    output = scripts.example("rl", "--reward", "short", "--load", state, "--steps", "1")

    assert figures(output, "reward")[0] > 0.85  # a random model's answers are half as good


def test_rl_raises_the_reward(scripts):
    options = ("--reward", "short", "--learning-rate", "1e-2")
    first = scripts.example("rl", *options, "--steps", "6")
    rewards = figures(first, r"step +\d+  reward")
    curve = re.findall(r"^ +\d+ +([\d.]+) #+$", first, re.MULTILINE)

    assert len(rewards) == 6
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.05
    assert [float(one) for one in curve] == pytest.approx(rewards, abs=0.006)
    assert saved(first).endswith("/sampler_weights/rl")


def test_async_rl_raises_the_reward_within_its_lag(scripts):
    output = scripts.example(
        *("async_rl", "--reward", "short", "--learning-rate", "1e-2"),
        *("--steps", "8", "--max-lag", "2"),
    )
    rewards, lags = figures(output, r"step +\d+  reward"), figures(output, "lag")

    assert len(rewards) == len(lags) == 8
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.03
    assert max(lags) <= 2


def test_dpo_learns_what_is_preferred(scripts):
    output = scripts.example("dpo", "--steps", "4", "--learning-rate", "1e-3")

    assert figures(output, "loss")[0] == pytest.approx(0.693, abs=0.002)  # ln 2: its own reference
    assert figures(output, "margin")[-1] > 0.2
    assert figures(output, "accuracy")[-1] > 0.9


def test_examples_can_be_read_at_one_sitting():
    for path in (ROOT / "docs/examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < MOST_LINES, path
