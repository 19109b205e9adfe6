"""How busy a trainer says it is."""

from __future__ import annotations

import pytest

from tinsmith_trainer.workload import WINDOW, BusyShare


class Worked:
    def __init__(self):
        self.now = self.busy = 0.0
        self.share = BusyShare(lambda: self.now, lambda: self.busy)

    def pass_time(self, seconds, *, share):
        self.now += seconds
        self.busy += seconds * share
        return self.share.sample()


def test_the_share_is_of_the_time_that_has_passed():
    worked = Worked()

    assert worked.pass_time(2, share=0.25) == pytest.approx(0.25)


def test_what_is_long_past_counts_no_more():
    worked = Worked()
    for _ in range(WINDOW + 1):
        worked.pass_time(1, share=0.0)
    for _ in range(WINDOW):
        told = worked.pass_time(1, share=1.0)

    assert told == pytest.approx(1.0)


def test_no_time_is_no_work():
    assert Worked().share.sample() == 0.0
