"""An engine that fails again and again pauses, and is tried with one request at a time."""

from __future__ import annotations

import pytest
from tests.clock import Clock

from tinsmith.errors import ServerError
from tinsmith_sampler.condition import FAILURES, LONGEST_PAUSE_S, PAUSE_S, Condition

FREE = 32


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def condition(clock):
    return Condition(clock)


def fail(condition, times):
    for _ in range(times):
        condition.failed(ServerError("out of order"))


def test_single_failures_change_nothing(condition):
    for _ in range(5):
        fail(condition, FAILURES - 1)
        condition.answered()

    assert (condition.trouble, condition.room(FREE, 5)) == ("", FREE)


def test_some_in_a_row_pause_it_and_it_says_why(condition, clock):
    fail(condition, FAILURES)

    assert condition.room(FREE, 0) == 0
    assert "failed 3 times in a row, the last time with: out of order" in condition.trouble
    clock.now += PAUSE_S
    assert [condition.room(FREE, running) for running in (0, 1)] == [1, 0]
    condition.answered()
    assert (condition.trouble, condition.room(FREE, 1)) == ("", FREE)


def test_what_ran_beside_the_failures_makes_no_pause_longer(condition, clock):
    fail(condition, FAILURES + 50)
    clock.now += PAUSE_S

    assert condition.room(FREE, 0) == 1


def test_pauses_grow_up_to_a_limit(condition, clock):
    fail(condition, FAILURES)
    pauses = []
    for _ in range(8):
        began = clock.now
        while not condition.room(FREE, 0):
            clock.now += 1.0
        pauses.append(clock.now - began)
        fail(condition, 1)

    assert pauses == [2, 4, 8, 16, *[LONGEST_PAUSE_S] * 4]
