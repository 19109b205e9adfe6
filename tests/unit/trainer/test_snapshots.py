"""When a state is saved: by steps or seconds, and what a new owner has repeated counts in."""

from __future__ import annotations

from tests.clock import Clock

from tinsmith_trainer.snapshots import SnapshotPolicy


def policy(clock, **before):
    return SnapshotPolicy(steps=3, seconds=60.0, clock=clock, **before)


def due(snapshots, steps):
    """After which of so many steps it is due; each save ends at once."""
    found = []
    for step in range(1, steps + 1):
        if snapshots.is_due():
            found.append(step)
            snapshots.done()
    return found


def test_it_is_due_every_so_many_steps():
    assert due(policy(Clock()), 7) == [3, 6]


def test_it_is_due_after_so_many_seconds():
    clock = Clock()
    snapshots = policy(clock)
    early = snapshots.is_due()
    clock.now += 60

    assert not early
    assert snapshots.is_due()


def test_never_two_at_once():
    snapshots = policy(Clock())
    first = [snapshots.is_due() for _ in range(7)]
    snapshots.done()

    assert first == [False, False, True, False, False, False, False]
    assert snapshots.is_due()


def test_steps_that_an_owner_has_repeated_count():
    assert due(policy(Clock(), steps_before=2), 4) == [1, 4]


def test_time_that_an_owner_has_spent_repeating_counts():
    assert due(policy(Clock(), seconds_before=60.0), 2) == [1]
