"""Turns are shared by tokens, not by ops."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinsmith_trainer.scheduler import Scheduler


def drain(scheduler):
    taken = []
    while (op := scheduler.take()) is not None:
        taken.append(op)
    return taken


def test_nothing_queued_is_nothing_to_do():
    assert Scheduler().take() is None


def test_one_model_keeps_its_order_and_never_waits():
    scheduler = Scheduler(quantum=10)
    for n in range(5):
        scheduler.add("a", n, cost=1000)

    assert drain(scheduler) == [0, 1, 2, 3, 4]


def test_a_small_tenant_is_not_kept_waiting_by_a_flood():
    scheduler = Scheduler(quantum=100)
    for n in range(20):
        scheduler.add("flood", ("flood", n), cost=100)
    scheduler.add("small", ("small", 0), cost=10)

    assert drain(scheduler).index(("small", 0)) <= 2


def test_equal_shares_of_tokens_for_ops_of_unequal_size():
    scheduler = Scheduler(quantum=50)
    for n in range(40):
        scheduler.add("large", ("large", n), cost=400)
        scheduler.add("small", ("small", n), cost=100)
    first = drain(scheduler)[:25]

    tokens = {"large": 400 * sum(m == "large" for m, _ in first)}
    tokens["small"] = 100 * sum(m == "small" for m, _ in first)
    assert abs(tokens["large"] - tokens["small"]) <= 400


def test_a_dropped_model_takes_its_queue_along():
    scheduler = Scheduler()
    scheduler.add("a", 1, cost=1)
    scheduler.add("b", 2, cost=1)

    assert scheduler.drop("a") == [1]
    assert drain(scheduler) == [2]
    assert scheduler.waiting("a") == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9000)), max_size=40))
def test_everything_queued_is_taken_once_and_in_its_models_order(queued):
    scheduler = Scheduler()
    for n, (model, cost) in enumerate(queued):
        scheduler.add(model, (model, n), cost=cost)
    taken = drain(scheduler)

    for model in "abc":
        assert [n for m, n in taken if m == model] == [
            n for n, (m, _) in enumerate(queued) if m == model
        ]
    assert len(taken) == len(queued)
