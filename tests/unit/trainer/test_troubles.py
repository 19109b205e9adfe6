"""Patience with models that fail, and its end."""

from __future__ import annotations

from tinsmith.errors import BrokerUnavailable
from tinsmith_trainer.troubles import LONGEST_PAUSE_S, MAX_TRIES, Troubles


def fail(troubles, times, error=None):
    return [troubles.add("m", error or ValueError("broken")) for _ in range(times)]


def test_a_first_failure_is_tried_again():
    troubles = Troubles()
    fail(troubles, 1)

    assert troubles.why_give_up("m") is None


def test_pauses_grow_up_to_a_limit():
    pauses = fail(Troubles(), 8)

    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S


def test_the_same_failure_at_the_same_place_ends_the_patience_and_is_told():
    troubles = Troubles()
    fail(troubles, MAX_TRIES)

    assert "ValueError: broken" in troubles.why_give_up("m")
    assert troubles.why_give_up("another") is None


def test_a_model_that_got_on_starts_afresh():
    troubles = Troubles()
    fail(troubles, MAX_TRIES - 1)
    troubles.reached("m", 5)
    fail(troubles, 1)

    assert troubles.why_give_up("m") is None


def test_standing_still_is_not_getting_on():
    troubles = Troubles()
    fail(troubles, 1)
    troubles.reached("m", 5)
    for _ in range(MAX_TRIES):
        troubles.reached("m", 5)
        fail(troubles, 1)

    assert troubles.why_give_up("m") is not None


def test_an_absent_broker_is_no_fault_of_the_model():
    troubles = Troubles()
    fail(troubles, 50, BrokerUnavailable("away"))

    assert troubles.why_give_up("m") is None
