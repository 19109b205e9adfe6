"""Sampling sessions and sampling requests."""

from __future__ import annotations

import pytest

from tinsmith import ids
from tinsmith.messages.table import SAMPLERS, SAMPLES

MODEL = "tiny/model"
OTHER = "tml-bob"


async def open_sampler(rig, **fields):
    session = fields.pop("session", None) or await rig.session()
    body = {"session_id": session, "sampling_session_seq_id": 0} | fields
    return await rig.post("create_sampling_session", body)


async def weights(rig, kind="sampler_weights", **fields):
    return await rig.checkpoint(await rig.model(), kind, **fields)


async def test_a_session_on_a_base_model_has_no_adapter(rig, recorded):
    session = await rig.session()
    body = recorded("create_sampling_session_base_model", session_id=session, base_model=MODEL)

    answer = await rig.post("create_sampling_session", body)

    sampler = ids.sampler_id(session, body["sampling_session_seq_id"])
    stored = await rig.bus.table(SAMPLERS).get(ids.token(sampler))
    assert answer.json["sampling_session_id"] == sampler
    assert (stored.base_model, stored.model_path, stored.adapter) == (MODEL, None, None)


async def test_a_session_on_saved_weights_has_their_adapter(rig):
    path = await weights(rig)

    answer = await open_sampler(rig, model_path=path)

    sampler = answer.json["sampling_session_id"]
    stored = await rig.bus.table(SAMPLERS).get(ids.token(sampler))
    assert set(stored.adapter.files) == {"adapter_model.safetensors", "adapter_config.json"}
    assert (await rig.get(f"samplers/{sampler}")).json == {
        "sampler_id": sampler,
        "base_model": MODEL,
        "model_path": path,
    }


async def test_a_session_asked_for_again_is_the_same(rig):
    session = await rig.session()

    answers = [await open_sampler(rig, session=session, base_model=MODEL) for _ in range(2)]

    assert answers[0].json == answers[1].json


async def test_a_number_that_another_session_has_is_refused(rig):
    session = await rig.session()
    await open_sampler(rig, session=session, base_model=MODEL)

    answer = await open_sampler(rig, session=session, model_path=await weights(rig))

    assert (answer.status, "sampling_session_seq_id" in answer.detail) == (400, True)


async def test_training_weights_are_refused_and_the_remedy_is_told(rig):
    answer = await open_sampler(rig, model_path=await weights(rig, "weights"))

    assert answer.status == 400
    assert "'weights', but sampling needs 'sampler_weights'" in answer.detail
    assert "save_weights_for_sampler" in answer.detail


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({}, 400, "base_model, model_path: both are missing"),
        ({"base_model": "big/model"}, 400, "not served for sampling; served are 'tiny/model'"),
        ({"model_path": "tinker://x/y/z"}, 400, "not a checkpoint path"),
    ],
)
async def test_a_session_on_nothing_is_refused(rig, fields, status, words):
    answer = await open_sampler(rig, **fields)

    assert (answer.status, words in answer.detail) == (status, True), answer.raw


async def test_a_base_model_that_is_not_that_of_the_weights_is_refused(rig):
    answer = await open_sampler(rig, base_model="big/model", model_path=await weights(rig))

    assert (answer.status, "'tiny/model'" in answer.detail) == (400, True)


async def test_weights_that_are_not_there_are_404_and_expired_ones_410(rig):
    path = await weights(rig, name="old", expires_ns=1)

    assert (await open_sampler(rig, model_path=path)).status == 410
    assert (await open_sampler(rig, model_path=path.upper())).status == 400
    assert (await open_sampler(rig, model_path=path.replace("old", "OLD"))).status == 404


async def test_weights_of_someone_else_are_not_there(rig):
    theirs = await rig.checkpoint(await rig.model(key=OTHER), "sampler_weights")

    assert (await open_sampler(rig, model_path=theirs)).status == 404


async def test_a_request_is_queued_and_promised_as_many_sequences(rig, recorded):
    sampler = await rig.sampler()
    body = recorded("asample_stop_strings", sampling_session_id=sampler)

    answer = await rig.post("asample", body)

    (message,) = rig.bus.queued(SAMPLES)
    assert answer.json == {
        "request_id": f"{sampler}:0",
        "sample_sequence_ids": [f"{sampler}:0:0", f"{sampler}:0:1"],
    }
    assert (message.request_id, message.base_model) == (f"{sampler}:0", MODEL)


async def test_a_request_carries_the_adapter_of_its_session(rig, recorded):
    opened = await open_sampler(rig, model_path=await weights(rig))
    sampler = opened.json["sampling_session_id"]

    await rig.post("asample", recorded("asample_topk", sampling_session_id=sampler))

    stored = await rig.bus.table(SAMPLERS).get(ids.token(sampler))
    assert rig.bus.queued(SAMPLES)[0].adapter == stored.adapter


async def test_a_request_sent_again_is_the_same_work(rig, recorded):
    body = recorded("asample_compute_logprobs", sampling_session_id=await rig.sampler())

    answers = [await rig.post("asample", body) for _ in range(2)]

    assert answers[0].json == answers[1].json
    assert len(rig.bus.queued(SAMPLES)) == 1


async def test_a_full_queue_is_429(rig, recorded):
    body = recorded("asample_topk", sampling_session_id=await rig.sampler())
    rig.bus.capacity = 0

    answer = await rig.post("asample", body)

    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_samples": 9}, "num_samples: 9 is outside 1 to 8"),
        ({"topk_prompt_logprobs": 5}, "topk_prompt_logprobs: 5 is outside 0 to 4"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "'image' is not supported"),
        ({"prompt": {"chunks": [{"tokens": [256]}]}}, "prompt[0]: token 256 is outside 0 to 255"),
        ({"prompt": {"chunks": [{"tokens": [1] * 65}]}}, "over the model's context of 64"),
        ({"sampling_session_id": None}, "sampling_session_id: missing"),
        ({"sampling_session_id": "x"}, "sampling_session_id: 'x'"),
    ],
)
async def test_a_request_that_cannot_be_served_is_400(rig, recorded, fields, words):
    body = recorded("asample_topk", sampling_session_id=await rig.sampler()) | fields

    answer = await rig.post("asample", body)

    assert (answer.status, words in answer.detail) == (400, True), answer.raw
    assert rig.bus.queued(SAMPLES) == []


async def test_tokens_to_score_for_another_prompt_are_400(rig, recorded):
    body = recorded("asample_target_and_alt_tokens", sampling_session_id=await rig.sampler())
    body |= {"target_prompt_logprobs": body["target_prompt_logprobs"] | {"shape": [4, 1]}}

    answer = await rig.post("asample", body)

    assert (answer.status, "target_prompt_logprobs" in answer.detail) == (400, True)


async def test_a_session_of_someone_else_is_not_there(rig, recorded):
    sampler = await rig.sampler(key=OTHER)

    body = recorded("asample_topk", sampling_session_id=sampler)

    assert (await rig.post("asample", body)).status == 404
    assert (await rig.get(f"samplers/{sampler}")).status == 404
