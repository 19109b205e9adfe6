"""Creating models, and what is told about base models."""

from __future__ import annotations

import pytest

from tinsmith import ids
from tinsmith.messages import ops
from tinsmith.messages.registry import Run
from tinsmith.messages.table import OPS, PLACEMENTS, RUNS
from tinsmith_gateway import versions

MODEL = "tiny/model"
OTHER = "tml-bob"


async def test_a_new_model_is_registered_queued_and_placed(rig, new_model):
    session = await rig.session()

    answer = await rig.post("create_model", new_model(session, user_metadata={"run": "1"}))

    model = f"{session}:train:0"
    lora = ops.LoraShape(rank=8, seed=1)
    run = await rig.bus.table(RUNS).get(ids.token(model))
    assert answer.json == {"request_id": f"{model}:0", "model_id": model}
    assert (run.base_model, run.lora, run.user_metadata) == (MODEL, lora, {"run": "1"})
    assert rig.bus.queued(OPS) == [
        ops.Op(model_id=model, seq=0, body=ops.CreateModel(base_model=MODEL, lora=lora))
    ]
    assert rig.bus.queued(PLACEMENTS) == [ops.Placement(model_id=model, base_model=MODEL)]


async def test_the_recorded_request_is_taken(rig, recorded):
    body = recorded("create_model", session_id=await rig.session())

    assert (await rig.post("create_model", body)).status == 200


async def test_a_request_sent_again_gives_the_same_promise_and_no_more_work(rig, new_model):
    body = new_model(await rig.session())

    answers = [await rig.post("create_model", body) for _ in range(2)]

    assert answers[0].json == answers[1].json
    assert (len(rig.bus.queued(OPS)), len(rig.bus.queued(PLACEMENTS))) == (1, 1)


async def test_a_request_that_broke_off_is_completed_by_its_repetition(rig, new_model):
    body = new_model(await rig.session())
    rig.bus.capacity = 0
    assert (await rig.post("create_model", body)).status == 429
    rig.bus.capacity = 10

    assert (await rig.post("create_model", body)).status == 200
    assert (len(rig.bus.queued(OPS)), len(rig.bus.queued(PLACEMENTS))) == (1, 1)


async def test_a_number_that_another_model_has_is_refused(rig, new_model):
    session = await rig.session()
    await rig.model(session)

    answer = await rig.post("create_model", new_model(session, 0, 16))

    assert (answer.status, "model_seq_id" in answer.detail) == (400, True)


async def test_a_variant_of_a_base_model_is_echoed_but_not_placed(rig, new_model):
    body = new_model(await rig.session(), base_model=f"{MODEL}:peft:262144")

    model = (await rig.post("create_model", body)).json["model_id"]

    info = (await rig.post("get_info", {"model_id": model})).json
    assert info["model_data"]["model_name"] == f"{MODEL}:peft:262144"
    assert [p.base_model for p in rig.bus.queued(PLACEMENTS)] == [MODEL]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base_model": "big/model"}, "'big/model' is not served for training; served are 'tiny/"),
        ({"lora_config": {"rank": 48}}, "lora_config.rank: 48"),
        ({"lora_config": {"rank": 64}}, "power of two from 1 to 32"),
        ({"lora_config": None}, "lora_config: missing"),
        ({"optimizer_config": {"type": "lion"}}, "'lion' is not supported; use 'adamw'"),
        ({"optimizer_config": {"type": "dimuon", "version": 2}}, "version: 2 is not supported"),
        ({"base_model": f"{MODEL}:full"}, f"'{MODEL}:full' is not served for training"),
        ({"model_seq_id": -1}, "$.model_seq_id"),
    ],
)
async def test_a_model_that_cannot_be_is_refused_at_once(rig, new_model, fields, words):
    answer = await rig.post("create_model", new_model(await rig.session(), **fields))

    assert answer.status == 400
    assert words in answer.detail
    assert rig.bus.queued(OPS) == []


async def test_a_session_of_someone_else_gets_no_models(rig, new_model):
    body = new_model(await rig.session(key=OTHER))

    assert (await rig.post("create_model", body)).status == 404


async def test_a_model_s_info_has_what_the_client_needs(rig):
    model = await rig.model()

    info = (await rig.post("get_info", {"model_id": model})).json

    data = {"model_name": MODEL, "arch": "llama", "tokenizer_id": "tiny/tokenizer"}
    assert (info["model_data"], info["lora_rank"], info["is_lora"]) == (data, 8, True)


@pytest.mark.parametrize("key", ["tml-alice", OTHER])
async def test_nobody_is_told_of_models_that_are_not_theirs(rig, key):
    model = await rig.model(key=OTHER) if key == "tml-alice" else await rig.model()

    answer = await rig.post("get_info", {"model_id": model}, key=key)

    assert (answer.status, model in answer.detail) == (404, True)


async def test_capabilities_tell_what_is_served(rig):
    told = (await rig.get("get_server_capabilities")).json

    assert told["client_versions"] == versions.RANGE
    assert told["supported_models"] == [
        {"model_name": MODEL, "max_context_length": 64, "trainable": True, "sampleable": True}
    ]


@pytest.mark.parametrize(
    ("form", "with_optimizer"), [("create", False), ("create_with_optimizer", True)]
)
async def test_a_model_from_a_checkpoint_has_its_shape(rig, recorded, form, with_optimizer):
    path = await rig.checkpoint(await rig.model())
    session = await rig.session()
    body = recorded(f"load_weights_{form}", session_id=session, path=path)

    answer = await rig.post("load_weights", body)

    model = answer.json["model_id"]
    created = rig.bus.queued(OPS)[-1]
    run = await rig.bus.table(RUNS).get(ids.token(model))
    assert (answer.status, created.model_id, created.seq) == (200, model, 0)
    assert (created.body.checkpoint, created.body.with_optimizer) == (path, with_optimizer)
    assert isinstance(run, Run)
    assert run.lora == created.body.lora == ops.LoraShape(rank=8)


@pytest.mark.parametrize(
    ("kind", "fields", "extra", "status", "words"),
    [
        ("sampler_weights", {}, {}, 400, "'sampler_weights', but create_training_client_from_sta"),
        ("weights", {"expires_ns": 1}, {}, 410, "expired on 1970-01-01"),
        ("weights", {"base_model": "big/model"}, {}, 400, "'big/model' is not served"),
        ("weights", {}, {"base_model": "big/model"}, 400, "of base model 'tiny/model'"),
        ("weights", {}, {"weights_access_token": "t"}, 400, "weights_access_token"),
        ("weights", {}, {"path": "tinker://x/weights/y"}, 400, "not a checkpoint path"),
    ],
)
async def test_a_checkpoint_that_cannot_be_trained_is_refused_at_once(
    rig, kind, fields, extra, status, words
):
    path = await rig.checkpoint(await rig.model(), kind, **fields)
    body = {"session_id": await rig.session(), "model_seq_id": 0, "path": path} | extra

    answer = await rig.post("load_weights", body)

    assert (answer.status, words in answer.detail) == (status, True), answer.raw


async def test_a_checkpoint_that_is_missing_or_not_yours_is_not_found(rig):
    mine, theirs = await rig.model(), await rig.model(key=OTHER)
    missing = ids.CheckpointPath(mine, "weights", "other")
    for path in (str(missing), await rig.checkpoint(theirs)):
        body = {"session_id": await rig.session(), "model_seq_id": 0, "path": path}

        assert (await rig.post("load_weights", body)).status == 404


async def test_the_owner_in_a_checkpoint_s_entry_counts(rig):
    theirs = await rig.model(key=OTHER)
    run = await rig.bus.table(RUNS).get(ids.token(await rig.model()))
    path = await rig.checkpoint(theirs, owner=run.owner)

    assert (await rig.post("weights_info", {"tinker_path": path})).status == 200
    assert (await rig.post("weights_info", {"tinker_path": path}, key=OTHER)).status == 404
