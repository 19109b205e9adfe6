"""Runs whose contents were forgotten: what a client is told that asks for them."""

from __future__ import annotations

import pytest

from tinsmith import ids
from tinsmith.messages import ops
from tinsmith.messages.table import OPS, RUN_KEYS


@pytest.fixture
async def model(rig):
    return await rig.model()


async def step(rig, model, seq):
    return await rig.post(
        "optim_step", {"model_id": model, "seq_id": seq, "adam_params": {}, "type": "optim_step"}
    )


async def test_a_new_model_gets_a_key_before_its_first_op(rig, seals, model):
    assert await seals.has_key(model)


async def test_a_model_of_before_stays_as_it_is(rig, seals, fake, model, new_model):
    await fake.table(RUN_KEYS).erase(ids.token(model))  # as if it had been made without one
    await rig.post("create_model", new_model(ids.session_of(model), rank=8))

    assert not await seals.has_key(model)


async def test_an_old_future_of_a_forgotten_run_fails_clearly(rig, seals, fake, model):
    (op,) = fake.queued(OPS)
    await fake.finish_op(op, ops.CreateModelDone(model_id=model, lora=op.body.lora))
    assert "error" not in (await rig.poll(f"{model}:0")).json
    await seals.forget(model, "asked to")

    answer = await rig.poll(f"{model}:0")

    assert (answer.status, answer.json["category"]) == (200, "user")
    assert "were forgotten on" in answer.json["error"]


async def test_a_future_that_never_ended_fails_as_well(rig, seals, model):
    await seals.forget(model, "asked to")

    assert "were forgotten on" in (await rig.poll(f"{model}:0")).json["error"]


async def test_nothing_more_is_taken_for_a_forgotten_run(rig, seals, fake, model):
    await seals.forget(model, "asked to")

    answer = await step(rig, model, 1)

    assert answer.status == 410
    assert "were forgotten on" in answer.detail
    assert len(fake.queued(OPS)) == 1
