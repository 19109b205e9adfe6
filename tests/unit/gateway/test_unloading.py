"""``unload_model``: the model takes no more requests, and the promise is kept."""

from __future__ import annotations

from tests.unit.gateway.conftest import OTHER_KEY


async def test_a_model_is_unloaded_once_and_for_all(rig):
    model = await rig.model()

    promises = [(await rig.post("unload_model", {"model_id": model})).json for _ in range(2)]
    answer = await rig.poll(promises[0]["request_id"])

    assert promises[0] == promises[1]
    assert answer.json == {"type": "unload_model", "model_id": model}


async def test_nothing_is_taken_for_it_any_more(rig, recorded):
    model = await rig.model()
    await rig.post("unload_model", {"model_id": model})

    answer = await rig.post("optim_step", recorded("optim_step_adam", model_id=model))

    assert (answer.status, model in answer.detail) == (410, True)


async def test_what_was_asked_before_is_still_answered(rig, recorded):
    model = await rig.model()
    future = (await rig.post("optim_step", recorded("optim_step_adam", model_id=model))).json
    await rig.post("unload_model", {"model_id": model})

    assert (await rig.poll(future["request_id"])).status == 408


async def test_only_its_owner_can_unload_it(rig):
    model = await rig.model()

    answer = await rig.post("unload_model", {"model_id": model}, key=OTHER_KEY)

    assert answer.status == 404
