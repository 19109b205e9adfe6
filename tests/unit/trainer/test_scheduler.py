"""Turns are shared by tokens, not by ops."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tinsmith_trainer.scheduler import LEAST_COST, QUANTUM, Place, Scheduler


def drain(scheduler):
    taken = []
    while (op := scheduler.take()) is not None:
        taken.append(op)
    return taken


def test_nothing_queued_is_nothing_to_do():
    assert Scheduler().take() is None


def test_one_model_keeps_its_order():
    scheduler = Scheduler()
    for n in range(5):
        scheduler.add("a", n, cost=1000)

    assert drain(scheduler) == [0, 1, 2, 3, 4]


def test_a_small_tenant_waits_for_a_quantum_and_a_pass_of_each_flooding_one():
    scheduler, floods = Scheduler(), ["flood-a", "flood-b", "flood-c"]
    for n in range(60):
        scheduler.add(floods[n % 3], n, cost=500)
    for _ in range(17):
        scheduler.take()
    scheduler.add("small", "small", cost=10)

    assert 500 * drain(scheduler).index("small") <= len(floods) * (QUANTUM + 500)


def test_a_small_step_is_finished_before_the_next_model_begins():
    """Otherwise all clients of equal steps get their results late, and all at once."""
    scheduler = Scheduler()
    for model in "abc":
        scheduler.add(model, f"{model} forward_backward", cost=64)
        scheduler.add(model, f"{model} optim_step", cost=0)

    assert [op[0] for op in drain(scheduler)] == list("aabbcc")


def test_equal_shares_of_tokens_for_ops_of_unequal_size():
    scheduler = Scheduler()
    for n in range(40):
        scheduler.add("large", ("large", n), cost=400)
        scheduler.add("small", ("small", n), cost=100)
    first = drain(scheduler)[:50]

    tokens = {"large": 400 * sum(m == "large" for m, _ in first)}
    tokens["small"] = 100 * sum(m == "small" for m, _ in first)
    assert abs(tokens["large"] - tokens["small"]) <= QUANTUM + 400


def test_equal_shares_when_models_queue_one_op_after_another():
    """As an owner does: the next op comes when the one before it has been taken."""
    scheduler, costs, tokens = Scheduler(), {"large": 400, "small": 100}, Counter()
    for model, cost in costs.items():
        scheduler.add(model, model, cost=cost)
    for _ in range(200):
        taken = scheduler.take()
        tokens[taken] += costs[taken]
        scheduler.add(taken, taken, cost=costs[taken])

    assert abs(tokens["large"] - tokens["small"]) <= QUANTUM + 400


def test_a_rest_saves_nothing_up():
    scheduler = Scheduler()
    scheduler.add("idle", "idle", cost=QUANTUM)
    for n in range(60):
        scheduler.add("busy", n, cost=QUANTUM)
    for _ in range(30):
        scheduler.take()
    for _ in range(30):
        scheduler.add("idle", "idle", cost=QUANTUM)
    first = drain(scheduler)[:20]

    assert 8 <= first.count("idle") <= 12


def test_steps_without_tokens_do_not_keep_the_others_waiting():
    scheduler = Scheduler()
    for n in range(1000):
        scheduler.add("steps", n, cost=0)
    scheduler.add("other", "first", cost=LEAST_COST)
    scheduler.add("other", "second", cost=LEAST_COST)

    assert drain(scheduler).index("second") <= QUANTUM / LEAST_COST + 2


def test_places_are_the_turns_and_tokens_that_come_before():
    scheduler = Scheduler()
    scheduler.add("a", 1, cost=QUANTUM)
    scheduler.add("a", 2, cost=100)
    scheduler.add("b", 3, cost=300)
    scheduler.add("b", 4, cost=50)
    scheduler.add("c", 5, cost=50)

    assert scheduler.places() == {
        "a": Place(0, 0),
        "b": Place(1, QUANTUM),
        "c": Place(3, QUANTUM + 350),
    }
    assert drain(scheduler) == [1, 3, 4, 5, 2]
    assert scheduler.places() == {}


def test_a_dropped_model_takes_its_queue_along():
    scheduler = Scheduler()
    scheduler.add("a", 1, cost=1)
    scheduler.add("b", 2, cost=1)

    assert scheduler.drop("a") == [1]
    assert drain(scheduler) == [2]
    assert scheduler.places() == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 900)), max_size=20))
def test_places_come_true_if_nothing_is_added(queued):
    scheduler = Scheduler()
    for model, cost in queued:
        scheduler.add(model, model, cost=cost)
    places, taken = scheduler.places(), drain(scheduler)

    assert {model: place.turns for model, place in places.items()} == {
        model: taken.index(model) for model in set(taken)
    }


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
