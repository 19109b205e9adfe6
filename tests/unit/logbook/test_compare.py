"""Two runs: equal but for their names, or parted at an op that is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.logbook.made import (
    FAILED,
    LORA,
    MODEL,
    OTHER,
    STEPPED,
    Made,
    a_run,
    forward_backward,
    scored,
)

from tinsmith.logbook.compare import Difference, Side, compare
from tinsmith.messages import ops

CREATE = ops.CreateModel(base_model="tiny", lora=LORA)
SCORES = (-1.0, -2.0, -0.5)


async def outcome(a, b):
    return await compare(Side(a, a.model_id), Side(b, b.model_id), on_op=lambda: None)


def trained(model_id, *, scores=SCORES, rate=0.1, state="s2", environment=None):
    made = Made(model_id).own(environment)
    made.op(CREATE, ops.CreateModelDone(model_id=model_id, lora=LORA), state="s0")
    made.op(forward_backward(), scored(*scores))
    return made.op(ops.OptimStep(learning_rate=rate), STEPPED, state=state)


async def test_runs_that_differ_in_their_ids_only_are_equal():
    found = await outcome(a_run(MODEL), a_run(OTHER))

    assert (found.equal_ops, found.difference) == (10, None)


async def test_owners_and_saved_states_do_not_count():
    other = trained(OTHER).save_state(2, {}, state="s2").own()

    assert (await outcome(trained(MODEL), other)).difference is None


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"rate": 0.2}, Difference(2, "op.learning_rate", "0.1", "0.2")),
        ({"state": "s9"}, Difference(2, "state", "'s2'", "'s9'")),
        ({"scores": (-1.0, -2.25, 0.0)}, Difference(1, "result.logprobs[0][1]", "-2", "-2.25")),
    ],
)
async def test_the_first_difference_is_named_with_both_values(change, difference):
    found = await outcome(trained(MODEL), trained(OTHER, **change))

    assert found.difference == difference
    assert found.equal_ops == difference.seq


async def test_tensors_of_other_shapes_are_told_by_their_shapes():
    found = await outcome(trained(MODEL), trained(OTHER, scores=(-1.0,)))

    assert found.difference.field == "result.logprobs[0]"
    assert (found.difference.a, found.difference.b) == (
        "float32 [3]",
        "float32 [1]",
    )


async def test_a_failure_differs_from_success():
    other = trained(OTHER).op(ops.OptimStep(), FAILED)
    found = await outcome(trained(MODEL).op(ops.OptimStep(), STEPPED, state="s3"), other)

    assert (found.difference.field, found.difference.a) == ("result", "OptimStepDone")


async def test_a_run_that_goes_on_differs_where_the_other_ends():
    longer = trained(OTHER).op(ops.OptimStep(), STEPPED, state="s3")
    found = await outcome(trained(MODEL), longer)

    assert found.difference == Difference(3, "op", "its log has ended", "it is there")


async def test_what_the_runs_were_computed_with_is_told_beside_the_difference():
    a = trained(MODEL, environment={"torch": "2.8", "threads": "1"})
    b = trained(OTHER, environment={"torch": "2.9", "threads": "1"}, state="s9")

    assert (await outcome(a, b)).difference.environments == (
        ("environment[torch]", "'2.8'", "'2.9'"),
    )


async def test_nothing_that_is_not_a_number_is_equal_to_itself():
    """As metrics, and as bits in tensors."""
    a, b = (trained(model, scores=(float("nan"),)) for model in (MODEL, OTHER))

    assert (await outcome(a, b)).difference is None


@given(st.data())
async def test_whichever_op_is_another_one_it_is_found(data):
    seq = data.draw(st.integers(0, 9))
    a, b = (Made(model).own() for model in (MODEL, OTHER))
    for made, changed in ((a, None), (b, seq)):
        for number in range(10):
            step = ops.OptimStep(weight_decay=0.5 if number == changed else 0.0)
            made.op(step, STEPPED, state=f"s{number}")
    found = await outcome(a, b)

    assert (found.difference.seq, found.difference.field) == (seq, "op.weight_decay")
