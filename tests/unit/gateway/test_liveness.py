"""Silence, and when it means something; on a clock that the test moves."""

from __future__ import annotations

import pytest
from tests.clock import Clock

from tinsmith.messages.services import ServiceAlive
from tinsmith_gateway.liveness import MAX_GAP_S, Hearing, Services


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def hearing(clock):
    return Hearing(clock)


def alive(*models, role="trainer"):
    return ServiceAlive(service=role, instance="i", version="0", base_models=models)


def test_what_was_never_heard_is_silent_since_the_start(clock, hearing):
    clock.now += 7

    assert hearing.silent_s(None) == 7


def test_what_was_heard_is_silent_since_then(clock, hearing):
    clock.now += 7

    assert hearing.silent_s(clock.now - 3) == 3


def test_a_gateway_that_is_cut_off_takes_nobody_for_silent(clock, hearing):
    heard_at = clock.now
    clock.now += 20
    hearing.tick(is_connected=False)

    assert hearing.silent_s(heard_at) == 0
    assert hearing.silent_s(None) == 0


def test_a_gateway_that_was_suspended_takes_nobody_for_silent(clock, hearing):
    heard_at = clock.now
    clock.now += MAX_GAP_S + 1
    hearing.tick(is_connected=True)

    assert hearing.silent_s(heard_at) == 0


def test_regular_ticks_forgive_nothing(clock, hearing):
    for _ in range(10):
        clock.now += MAX_GAP_S
        hearing.tick(is_connected=True)

    assert hearing.silent_s(None) == 10 * MAX_GAP_S


def test_a_service_is_heard_for_its_role_and_its_models_only(clock, hearing):
    services = Services(hearing)
    clock.now += 20
    services.heard(alive("a", "b"))
    clock.now += 1

    silent = [services.silent_s(*key) for key in (("trainer", "a"), ("trainer", "c"))]
    assert [*silent, services.silent_s("sampler", "a")] == [1, 21, 21]
