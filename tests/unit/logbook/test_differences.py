"""Every difference of two outcomes is found and named; with a tolerance, only those beyond it."""

from __future__ import annotations

import math

import pytest
from tests.unit.trainer.examples import tensor

from tinsmith.logbook.differences import NO_GAP, Comparison
from tinsmith.messages.base import Failed, Tensor
from tinsmith.messages.ops import CreateModelDone, ForwardBackwardDone, LoraShape, OptimStepDone


def scored(*rows, loss=1.0, passes=((0, 1),)):
    logprobs = tuple(tensor(row, "float32") for row in rows)
    return ForwardBackwardDone(logprobs=logprobs, metrics={"loss:sum": loss}, passes=passes)


def first(expected, found, **options):
    difference = Comparison(**options).first(expected, found)
    return difference and (difference.field, difference.expected, difference.found)


DONE = scored([-1, -2], [-3, -4, -5])


def test_equal_outcomes_have_no_difference():
    assert first(DONE, scored([-1, -2], [-3, -4, -5])) is None


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        (scored([-1, -2], [-3, -4, -5.5]), ("logprobs[1][2]", "-5", "-5.5")),
        (scored([-1, -2]), ("logprobs[1]", "Tensor", "(absent)")),
        (scored([-1, -2], [-3, -4]), ("logprobs[1]", "float32 [3]", "float32 [2]")),
        (scored([-1, -2], [-3, -4, -5], loss=2.0), ("metrics[loss:sum]", "1.0", "2.0")),
        (scored([-1, -2], [-3, -4, -5], passes=((0,), (1,))), ("passes[0][1]", "1", "(absent)")),
        (OptimStepDone(), ("result", "ForwardBackwardDone", "OptimStepDone")),
        (Failed(category="user", message="m"), ("result", "ForwardBackwardDone",
                                                "failed (user: m)")),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(found, difference):
    assert first(DONE, found) == difference


def test_a_field_inside_of_a_field_is_named():
    mine, yours = (CreateModelDone(model_id="m", lora=LoraShape(rank=rank)) for rank in (4, 8))

    assert first(mine, yours) == ("lora.rank", "4", "8")


def test_every_bit_counts():
    assert first(scored([0.0]), scored([-0.0])) == ("logprobs[0][0]", "0", "-0")
    assert first(scored(loss=0.0), scored(loss=-0.0)) == ("metrics[loss:sum]", "0.0", "-0.0")
    assert first(scored([math.nan]), scored([math.nan])) is None


def test_another_order_is_a_difference():
    mine = OptimStepDone(metrics={"a": 1.0, "b": 2.0})
    yours = OptimStepDone(metrics={"b": 2.0, "a": 1.0})

    assert first(mine, yours)[0] == "result"
    assert first(mine, yours, tolerance=0.0) is None


def test_bytes_that_do_not_fill_their_shape_are_a_difference():
    lying = ForwardBackwardDone(logprobs=(Tensor("float32", (2,), b"abc"),), metrics={})
    honest = ForwardBackwardDone(logprobs=(tensor([1, 2], "float32"),), metrics={})

    assert first(lying, honest) == ("logprobs[0]", "float32 [2] of 3 bytes", "float32 [2]")


def test_failures_are_compared_by_who_must_act_and_by_kind():
    mine = Failed(category="user", message="a", code="InvalidRequest")

    assert first(mine, Failed(category="user", message="b", code="InvalidRequest")) is None
    assert first(mine, Failed(category="server", message="a", code="InvalidRequest"))[0] == (
        "category"
    )
    assert first(mine, Failed(category="user", message="a", code="NotFound"))[0] == "code"


def test_within_the_tolerance_there_is_no_difference():
    comparison = Comparison(tolerance=0.5)

    assert comparison.first(DONE, scored([-1, -2.25], [-3, -4, -5.5], loss=1.125)) is None
    assert (comparison.largest.amount, comparison.largest.field) == (0.5, "logprobs[1][2]")


def test_beyond_the_tolerance_the_first_one_is_named_and_the_largest_kept():
    comparison = Comparison(tolerance=0.5)
    difference = comparison.first(DONE, scored([-1, -2.75], [-3, -4, -8]))

    assert difference.field == "logprobs[0][1]"
    assert (comparison.largest.amount, comparison.largest.field) == (3.0, "logprobs[1][2]")


def test_a_number_that_is_none_is_never_near():
    assert first(scored([1.0]), scored([math.nan]), tolerance=math.inf)[0] == "logprobs[0][0]"
    assert first(scored(loss=1.0), scored(loss=math.nan), tolerance=math.inf) is not None
    assert first(scored([math.inf]), scored([math.inf, 1]), tolerance=1.0)[0] == "logprobs[0]"


def test_a_tolerance_allows_nothing_but_numbers_to_differ():
    assert first(DONE, scored([-1, -2]), tolerance=math.inf)[0] == "logprobs[1]"


def test_without_a_tolerance_no_gap_is_kept():
    comparison = Comparison()
    comparison.first(DONE, scored([-1, -2], [-3, -4, -5.5]))

    assert comparison.largest == NO_GAP
