"""The ops in a trainer's hands: how many bytes of them stay in memory."""

from __future__ import annotations

import pytest

from tinsmith_trainer.in_hand import InHand


class Taken:
    def __init__(self, size):
        self.size = size
        self.is_let_go = False

    def shed(self):
        self.size = 0

    def let_go(self):
        self.is_let_go = True


@pytest.fixture
def ops():
    return InHand(limit_bytes=100)


def test_bytes_are_kept_up_to_the_limit_and_shed_beyond_it(ops):
    taken = [Taken(60), Taken(60), Taken(40), Taken(1)]
    for seq, one in enumerate(taken):
        ops.add(seq, one)

    assert [one.size for one in taken] == [60, 0, 40, 0]
    assert (len(ops), ops.held_bytes) == (4, 100)


def test_what_is_finished_makes_room(ops):
    ops.add(1, Taken(80))
    ops.remove(1)
    ops.add(2, late := Taken(80))

    assert (late.size, 1 in ops, 2 in ops) == (80, False, True)


def test_a_redelivery_takes_the_place_of_the_first(ops):
    ops.add(1, Taken(80))
    ops.add(1, again := Taken(80))
    ops.let_go()

    assert (ops.held_bytes, len(ops), again.is_let_go) == (80, 1, True)
