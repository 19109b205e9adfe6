"""A number is taken by one request: the same one may come again, another is refused by name."""

from __future__ import annotations

import msgspec
import pytest
from aiohttp import web

from tinsmith import ids
from tinsmith.errors import InvalidRequest
from tinsmith.messages import ops
from tinsmith.messages.base import Failed
from tinsmith.messages.table import OPS
from tinsmith_gateway.app import build_app, build_runner
from tinsmith_gateway.gateway import Gateway
from tinsmith_gateway.sameness import check_same, digest
from tinsmith_gateway.wire import training

STEP = {"adam_params": {"learning_rate": 0.25}}
MODEL = f"{'a' * 26}:train:0"


def op(body, seq=3):
    return ops.Op(model_id=MODEL, seq=seq, body=body)


@pytest.fixture
async def other_gateway(rig, config, fake, seals):
    """The address of a second gateway on the same bus."""
    gateway = Gateway.build(config, fake, ["tml-alice"], seals)
    await gateway.start()
    runner = build_runner(build_app(gateway))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    gateway.futures.release()
    await runner.cleanup()
    await gateway.close()


async def finish(rig, body, result):
    """What a trainer does with the newest op."""
    queued = rig.bus.queued(OPS)[-1]
    assert isinstance(queued.body, body)
    await rig.bus.finish_op(queued, result)


@pytest.mark.parametrize("is_done", [False, True])
async def test_another_body_under_a_taken_number_is_400_by_any_gateway(rig, other_gateway, is_done):
    request = {"model_id": await rig.model(), "seq_id": 1} | STEP
    await rig.post("optim_step", request)
    if is_done:
        await finish(rig, ops.OptimStep, ops.OptimStepDone())
    changed = request | {"adam_params": {"learning_rate": 0.5}}
    for url in (rig.url, other_gateway):
        rig.url = url
        refused = await rig.post("optim_step", changed)
        again = await rig.post("optim_step", request)

        assert (refused.status, again.status) == (400, 200)
        assert f"seq_id: request 1 of model {request['model_id']} was sent before" in refused.detail
        assert "as optim_step with another learning_rate" in refused.detail
        assert again.json["request_id"] == f"{request['model_id']}:1"


async def test_another_kind_under_a_taken_number_is_400(rig, recorded):
    model = await rig.model()
    await rig.post("optim_step", {"model_id": model, "seq_id": 1} | STEP)
    refused = await rig.post_proto(recorded("forward_backward_cross_entropy", model_id=model))

    assert refused.status == 400
    assert "was sent before, as optim_step, and is forward_backward now" in refused.detail


async def test_another_model_under_a_taken_number_is_400(rig, new_model):
    session = await rig.session()
    await rig.post("create_model", new_model(session))
    refused = [
        await rig.post("create_model", new_model(session, rank=16)),
        await rig.post("create_model", new_model(session, user_metadata={"a": "b"})),
    ]

    assert [answer.status for answer in refused] == [400, 400]
    assert all("model_seq_id" in answer.detail for answer in refused)
    assert (await rig.post("create_model", new_model(session))).status == 200


async def test_a_refused_request_that_was_done_stays_the_one_that_is_answered(rig):
    request = {"model_id": await rig.model(), "seq_id": 1} | STEP
    await rig.post("optim_step", request)
    await finish(rig, ops.OptimStep, ops.OptimStepDone(metrics={"lr": 0.25}))
    await rig.post("optim_step", request | {"adam_params": {"learning_rate": 0.5}})
    answer = await rig.poll(f"{request['model_id']}:1")

    assert answer.json["metrics"]["lr"] == 0.25
    assert (await rig.post("optim_step", request)).status == 200


async def test_the_client_counts_sampling_sessions_on_when_it_repeats_a_save(rig, recorded):
    session = await rig.session()
    request = recorded("save_weights_for_sampler_ephemeral", model_id=await rig.model(session))
    first = await rig.post("save_weights_for_sampler", request)
    request["sampling_session_seq_id"] += 1
    again = await rig.post("save_weights_for_sampler", request)

    assert (again.status, again.json) == (200, first.json)
    assert rig.bus.queued(OPS)[-1].body.sampling_session_id == ids.sampler_id(session, 0)


async def test_metadata_in_another_order_is_the_same_request(rig):
    model = await rig.model()
    request = {"model_id": model, "seq_id": 1, "path": "x", "user_metadata": {"a": "1", "b": "2"}}
    await rig.post("save_weights", request)
    turned = request | {"user_metadata": {"b": "2", "a": "1"}}

    assert (await rig.post("save_weights", turned)).status == 200


async def test_a_load_may_be_repeated_when_its_checkpoint_has_come_or_gone(rig):
    model = await rig.model()
    request = {"model_id": model, "seq_id": 1, "path": f"tinker://{model}/weights/step1"}
    early = await rig.post("load_weights", request)
    await rig.checkpoint(model)
    assert (await rig.post("load_weights", request)).json == early.json
    await rig.post("load_weights", request | {"seq_id": 2})
    await rig.checkpoint(model, expires_ns=1)

    assert (await rig.post("load_weights", request | {"seq_id": 2})).status == 200
    assert (
        await rig.post("load_weights", request | {"seq_id": 2, "optimizer": True})
    ).status == 400


@pytest.mark.parametrize(
    "body",
    [
        ops.OptimStep(learning_rate=0.5),
        ops.ForwardBackward(data=(), loss_fn="x", loss_config={"a": float("nan")}),
        ops.SaveWeights(name="x"),
        ops.Refused(reason=Failed(category="user", message="m")),
    ],
)
def test_a_body_is_the_same_as_itself_read_back(body):
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(op(body)), type=ops.Op)

    check_same(op(body), read)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ops.SaveWeightsForSampler(name="y"), "another name"),
        (ops.SaveWeightsForSampler(sampling_session_id="s"), "another name and sampling_session"),
        (ops.SaveWeightsForSampler(name="x", ttl_s=3600), "another ttl_s"),
        (ops.SaveWeights(name="x"), "and is save_weights now"),
    ],
)
def test_a_save_under_another_name_is_another_request(asked, words):
    with pytest.raises(InvalidRequest, match=words):
        check_same(op(asked), op(ops.SaveWeightsForSampler(name="x")))


def test_the_shape_of_a_model_from_a_checkpoint_is_the_checkpoints():
    first, again = (
        ops.CreateModel(base_model="m", checkpoint="tinker://x", lora=ops.LoraShape(rank=rank))
        for rank in (8, 16)
    )

    assert digest(first) == digest(again)
    with pytest.raises(InvalidRequest, match=r"model_seq_id: .* another with_optimizer"):
        check_same(op(msgspec.structs.replace(first, with_optimizer=True), 0), op(first, 0))


def test_a_refused_body_is_the_one_that_was_asked_for():
    load = ops.LoadWeights(path="tinker://x")
    refused = training.refused(InvalidRequest("gone"), asked_blake3=digest(load))

    assert digest(refused) == digest(load)
    assert digest(training.refused(InvalidRequest("gone"))) != digest(load)
