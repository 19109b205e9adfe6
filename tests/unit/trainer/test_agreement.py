"""The split of a difference into numerics and staleness, and when it is too large."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tinsmith_trainer.agreement import WINDOW, Limits, Rescored, Window

ANY = Limits(math.inf, math.inf)


def floats(*values):
    return np.array(values, np.float32)


def of(drift, limits=ANY):
    window = Window(limits)
    window.add(np.asarray(drift, np.float64))
    return window


def test_the_parts_add_up_to_what_a_loss_sees():
    scored = Rescored(floats(-1, -2, -3), floats(-1.25, -2, -2.5), floats(-0.5, -4, -3))

    assert scored.drift("numerics").tolist() == [-0.25, 0, 0.5]
    assert scored.drift("staleness").tolist() == [0.75, -2, -0.5]
    total = scored.drift("numerics") + scored.drift("staleness")
    assert total.tolist() == (scored.present - scored.sampler).tolist()


def test_figures_are_means_over_tokens_and_the_largest():
    figures = of([math.log(2), -math.log(4)]).figures

    assert figures.tokens == 2
    assert figures.k1 == pytest.approx((math.log(4) - math.log(2)) / 2)
    # r - 1 - d of r = 2 and r = 1/4.
    assert figures.k3 == pytest.approx((1 - math.log(2) - 0.75 + math.log(4)) / 2)
    assert figures.dlogp == pytest.approx(math.log(4))


def test_both_estimators_come_to_the_divergence_of_two_distributions():
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.25, 0.35, 0.4])
    counts = np.array([1000, 1400, 1600])  # as q draws them
    figures = of(np.repeat(np.log(p / q), counts)).figures

    kl = float((q * np.log(q / p)).sum())
    assert figures.k1 == pytest.approx(kl)
    assert figures.k3 == pytest.approx(kl)


def test_equal_numbers_are_no_difference():
    assert of(np.zeros(7)).figures == (7, 0.0, 0.0, 0.0)


def test_what_is_old_leaves_the_window_and_with_it_the_alarm():
    window = Window(Limits(0.01, 1.0))
    turned = [window.add(np.full(10, 2.0))]
    turned += [window.add(np.zeros(512)) for _ in range(WINDOW // 512)]

    assert turned == [True, *[False] * (len(turned) - 2), True]
    assert not window.is_over
    assert window.figures == (WINDOW, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("drift", "is_over"),
    [
        (np.full(100, 0.1), False),
        (np.full(100, 0.2), True),  # k3 is 0.02
        (np.append(np.zeros(5000), 1.1), True),  # one token
        ([math.nan, 0], True),
        ([math.inf, 0], True),
    ],
)
def test_a_divergence_or_one_token_is_over_its_limit(drift, is_over):
    assert of(drift, Limits(0.01, 1.0)).is_over == is_over
