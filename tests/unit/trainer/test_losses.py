"""The table of loss functions: names, settings, defaults."""

from __future__ import annotations

import pytest

from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith_trainer import losses


def test_an_unknown_loss_names_those_that_exist():
    with pytest.raises(
        NotSupported,
        match="'grpo' is not available on this server; use cispo, cross_entropy, custom, dro, "
        "gspo, importance_sampling, ppo, stable_reinforce",
    ):
        losses.find("grpo")


DEFAULTS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "stable_reinforce": {"kl_coeff": 0.01},
}


def test_every_loss_has_the_defaults_of_the_protocol():
    assert {name: losses.find(name).configure({}) for name in losses.LOSSES} == DEFAULTS


def test_settings_override_defaults():
    assert losses.find("ppo").configure({"clip_high_threshold": 2}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 2.0,
    }


def test_a_text_of_the_unpublished_objective_changes_nothing():
    given = {"mode": "text", "kl_coeff": 0.1}

    assert losses.find("stable_reinforce").configure(given) == {"kl_coeff": 0.1}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("cross_entropy", {"clip": 0.2}, r"\['clip'\]: cross_entropy does not take it; it takes n"),
        ("ppo", {"beta": 0.2}, r"takes clip_high_threshold, clip_low_threshold"),
        ("dro", {"beta": "many"}, "'many' is not a number"),
        ("dro", {"beta": -1.0}, "-1 is out of range; use a finite number of at least 0"),
        ("dro", {"beta": float("nan")}, "nan is out of range"),
        ("cispo", {"clip_high_threshold": float("inf")}, "inf is out of range"),
        ("stable_reinforce", {"mode": 2.0}, "2 is not a text"),
        ("stable_reinforce", {"beta": 2.0}, "it takes kl_coeff, mode"),
        ("ppo", {"clip_low_threshold": 1.5}, "1.5 is above clip_high_threshold 1.2"),
    ],
)
def test_a_wrong_setting_is_refused(name: str, given: dict[str, float | str], message: str):
    with pytest.raises(InvalidRequest, match=f"loss_fn_config.*{message}"):
        losses.find(name).configure(given)
