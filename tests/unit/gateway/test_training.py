"""Sequenced requests: queued at once, in any order, and never without taking their place."""

from __future__ import annotations

import pytest

from tinsmith import ids
from tinsmith.messages import ops
from tinsmith.messages.table import OPS

OTHER = "tml-bob"
RECIPIENT = "age1t9edsc9vxzyzanv5fdk7hepkfudv9nf6vualwdykudavgzvnjgpq9y9g3m"
SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN a@b"


async def submit(rig, path, body, **kwargs):
    """The body of the op that a request has become."""
    answer = await rig.post(path, body, **kwargs)
    assert answer.status == 200, answer.raw
    op = rig.bus.queued(OPS)[-1]
    assert answer.json == {
        "request_id": ids.future_id(op.model_id, op.seq),
        "model_id": op.model_id,
    }
    return op.body


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("optim_step", "optim_step_adam", ops.OptimStep),
        ("save_weights", "save_weights", ops.SaveWeights),
        ("save_weights_external", "save_weights_external", ops.SaveWeightsExternal),
        ("save_weights_for_sampler", "save_weights_for_sampler_named", ops.SaveWeightsForSampler),
        ("save_weights_for_sampler", "save_weights_for_sampler_ephemeral",
         ops.SaveWeightsForSampler),
        ("save_weights_for_sampler", "save_weights_for_sampler_inflight",
         ops.SaveWeightsForSampler),
    ],
)  # fmt: skip
async def test_recorded_requests_are_queued(rig, recorded, path, name, kind):
    body = await submit(rig, path, recorded(name, model_id=await rig.model()))

    assert isinstance(body, kind)


async def test_a_sampling_session_belongs_to_the_model_s_session(rig, recorded):
    session = await rig.session()
    request = recorded("save_weights_for_sampler_ephemeral", model_id=await rig.model(session))

    body = await submit(rig, "save_weights_for_sampler", request)

    assert body.sampling_session_id == ids.sampler_id(session, 0)


async def test_requests_are_taken_in_any_order_without_waiting(rig, recorded):
    model = await rig.model()
    message = recorded("forward_backward_cross_entropy", model_id=model)

    for seq in (2, 3, 4, 1, 5):
        message.seq_id = seq
        answer = await rig.post_proto(message)
        assert answer.json["request_id"] == f"{model}:{seq}"

    assert [op.seq for op in rig.bus.queued(OPS)] == [0, 2, 3, 4, 1, 5]


async def test_a_request_sent_again_gives_the_same_promise_and_no_more_work(rig, recorded):
    message = recorded("forward_backward_cross_entropy", model_id=await rig.model())

    answers = [await rig.post_proto(message) for _ in range(2)]

    assert answers[0].json == answers[1].json
    assert [op.seq for op in rig.bus.queued(OPS)] == [0, 1]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate: -1.0"),
        ("optim_step", {"adam_params": {"learning_rate": "x"}}, "$.adam_params.learning_rate"),
        ("optim_step", {"optimizer_params": {"type": "lion"}}, "'lion' is not supported"),
        ("save_weights", {"path": "a/b"}, "'a/b' cannot name a checkpoint"),
        ("save_weights", {"path": "a", "ttl_seconds": 2}, "ttl_seconds: 2 is outside 3600"),
        ("save_weights", {}, "missing required field `path`"),
        ("save_weights_for_sampler", {}, "exactly one is needed"),
        ("save_weights_for_sampler", {"path": "a", "kind": "live"}, "$.kind"),
        ("save_weights_external", {"path": "a/b"}, "'a/b' cannot name a checkpoint"),
        ("save_weights_external", {"path": "a", "ttl_seconds": 2}, "ttl_seconds: 2 is outside"),
        (
            "save_weights_external",
            {"path": "a", "age_encryption_recipients": [RECIPIENT, "age1x"]},
            "age_encryption_recipients[1]: 'age1x' is no age recipient (invalid Bech32",
        ),
        (
            "save_weights_external",
            {"path": "a", "age_encryption_recipients": [RECIPIENT] * 11},
            "age_encryption_recipients: 11 recipients are over the limit of 10",
        ),
        ("load_weights", {"path": "x"}, "not a checkpoint path"),
        ("load_weights", {"path": "x", "weights_access_token": "t"}, "weights_access_token"),
        ("load_weights", {}, "missing required field `path`"),
    ],
)
async def test_wrong_content_takes_its_place_and_fails_its_future(rig, path, fields, words):
    request = {"model_id": await rig.model(), "seq_id": 3} | fields

    body = await submit(rig, path, request)

    assert rig.bus.queued(OPS)[-1].seq == 3
    assert isinstance(body, ops.Refused), body
    assert (body.reason.category, words in body.reason.message) == ("user", True), body


async def test_recipients_are_passed_on_in_their_order(rig):
    request = {"model_id": await rig.model(), "seq_id": 1, "path": "a", "ttl_seconds": 3600}
    asked = {"age_encryption_recipients": [RECIPIENT, SSH]}

    body = await submit(rig, "save_weights_external", request | asked)

    assert body == ops.SaveWeightsExternal(name="a", ttl_s=3600, recipients=(RECIPIENT, SSH))


async def test_a_broken_tensor_takes_its_place_too(rig, recorded):
    answer = await rig.post_proto(
        recorded("forward_backward_image_chunk", model_id=await rig.model(), seq_id=9)
    )

    op = rig.bus.queued(OPS)[-1]
    assert (answer.status, op.seq, type(op.body)) == (200, 9, ops.Refused)


async def test_a_checkpoint_is_loaded_into_a_model(rig, recorded):
    model = await rig.model()
    request = recorded("load_weights_legacy", model_id=model, path=await rig.checkpoint(model))

    body = await submit(rig, "load_weights", request)

    assert body == ops.LoadWeights(path=request["path"], with_optimizer=False)


@pytest.mark.parametrize(
    ("kind", "fields", "code"),
    [
        ("sampler_weights", {}, "InvalidRequest"),
        ("weights", {"base_model": "big/model"}, "InvalidRequest"),
        ("weights", {"expires_ns": 1}, "Gone"),
        ("weights", {"owner": "someone else"}, "NotFound"),
    ],
)
async def test_a_checkpoint_that_cannot_be_loaded_fails_the_future(rig, kind, fields, code):
    model = await rig.model()
    path = await rig.checkpoint(model, kind, **fields)

    body = await submit(rig, "load_weights", {"model_id": model, "seq_id": 1, "path": path})

    assert body.reason.code == code


@pytest.mark.parametrize("path", ["optim_step", "save_weights", "load_weights"])
async def test_a_request_for_no_model_cannot_be_attributed(rig, path):
    model = ids.model_id(await rig.session(), 7)

    statuses = [
        (await rig.post(path, {"model_id": target, "seq_id": 1})).status
        for target in (model, "nonsense")
    ]

    assert statuses == [404, 400]


async def test_a_model_of_someone_else_is_not_there(rig, recorded):
    model = await rig.model(key=OTHER)

    answers = [
        await rig.post("optim_step", recorded("optim_step_adam", model_id=model)),
        await rig.post_proto(recorded("forward_backward_ppo", model_id=model)),
    ]

    assert [answer.status for answer in answers] == [404, 404]
    assert [op.seq for op in rig.bus.queued(OPS)] == [0]


async def test_a_full_queue_is_429_and_takes_no_place(rig, recorded):
    request = recorded("optim_step_adam", model_id=await rig.model())
    rig.bus.capacity = 0

    answer = await rig.post("optim_step", request)

    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    assert [op.seq for op in rig.bus.queued(OPS)] == [0]


async def test_a_broker_that_is_away_is_503(rig, recorded):
    request = recorded("optim_step_adam", model_id=await rig.model())
    await rig.post("optim_step", request)
    rig.bus.is_connected = False

    assert (await rig.post("optim_step", request | {"seq_id": 13})).status == 503
