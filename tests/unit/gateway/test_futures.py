"""Polls: woken by pings, saved by re-checks, and told the truth when nobody works."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
import pytest

from tinsmith import ids
from tinsmith.errors import BlobMissing
from tinsmith.messages import ops, sampling
from tinsmith.messages.base import Failed, Tensor
from tinsmith.messages.services import QueuePlace
from tinsmith.messages.table import OPS, SAMPLES
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.liveness import Hearing

MODEL = "tiny/model"
OTHER = "tml-bob"
PROTOBUF = "application/x-protobuf"


@pytest.fixture
async def op(rig, recorded):
    """A queued optimizer step."""
    await rig.post("optim_step", recorded("optim_step_adam", model_id=await rig.model()))
    return rig.bus.queued(OPS)[-1]


@pytest.fixture
async def sample(rig, recorded):
    """A queued sampling request."""
    body = recorded("asample_topk", sampling_session_id=await rig.sampler())
    await rig.post("asample", body)
    return rig.bus.queued(SAMPLES)[0]


@pytest.fixture
def patient(rig, monkeypatch):
    """A gateway that holds polls for so long that only a ping or a re-check can end them."""

    def set_waits(**waits):
        config = msgspec.structs.replace(rig.gateway.config, long_poll_s=20.0, **waits)
        monkeypatch.setattr(rig.gateway.futures, "_config", config)

    return set_waits


def request_id(op):
    return ids.future_id(op.model_id, op.seq)


async def held(rig, count=1):
    """Waits until so many polls are held."""
    while len(rig.gateway.futures.waiters) < count:
        await asyncio.sleep(0.001)


async def test_a_result_is_returned_and_stays(rig, op):
    await rig.bus.finish_op(op, ops.OptimStepDone(metrics={"lr": 1.0}))

    answers = [await rig.poll(request_id(op)) for _ in range(2)]

    assert [a.status for a in answers] == [200, 200]
    assert answers[0].json == answers[1].json
    assert answers[0].json["metrics"]["lr"] == 1.0


async def test_a_training_result_is_protobuf(rig, recorded):
    message = recorded("forward_backward_cross_entropy", model_id=await rig.model())
    future = (await rig.post_proto(message)).json["request_id"]
    logprobs = Tensor("float32", (1,), np.zeros(1, "<f4").tobytes())
    done = ops.ForwardBackwardDone(logprobs=(logprobs,), metrics={"loss:sum": 1.0})
    await rig.bus.finish_op(rig.bus.queued(OPS)[-1], done)

    answer = await rig.poll(future)

    assert (answer.status, answer.headers["Content-Type"]) == (200, PROTOBUF)


async def test_a_large_result_is_returned(rig, op):
    data = bytes(4 << 20)
    done = ops.ForwardBackwardDone(
        logprobs=(Tensor("float32", (1 << 20,), data),), metrics={"loss:sum": 1.0}
    )
    await rig.bus.finish_op(op, done)

    announced = (await rig.poll(request_id(op))).json
    body = {"request_id": request_id(op), "allow_metadata_only": False}
    answer = await rig.post("retrieve_future", body)

    assert announced["status"] == "complete_metadata"
    assert announced["response_payload_size"] == len(answer.raw) > len(data)


async def test_a_sample_is_protobuf(rig, sample):
    await rig.bus.finish_sample(sample, sampling.SampleDone(request_id=sample.request_id))

    answer = await rig.poll(sample.request_id)

    assert (answer.status, answer.headers["Content-Type"]) == (200, PROTOBUF)


async def test_a_model_from_a_checkpoint_answers_as_load_weights(rig):
    path = await rig.checkpoint(await rig.model())
    body = {"session_id": await rig.session(), "model_seq_id": 0, "path": path}
    future = (await rig.post("load_weights", body)).json["request_id"]
    created = rig.bus.queued(OPS)[-1]
    done = ops.CreateModelDone(model_id=created.model_id, lora=ops.LoraShape())
    await rig.bus.finish_op(created, done)

    answer = (await rig.poll(future)).json

    assert answer == {"type": "load_weights", "path": path, "model_id": created.model_id}


@pytest.mark.parametrize("category", ["user", "server", "unknown"])
async def test_a_failure_is_200_with_its_category(rig, op, category):
    await rig.bus.finish_op(op, Failed(category=category, message="it broke"))

    answer = await rig.poll(request_id(op))

    assert (answer.status, answer.json) == (200, {"error": "it broke", "category": category})


async def test_a_failed_sample_is_200_with_its_category(rig, sample):
    failure = Failed(category="user", message="too long")
    failed = sampling.SampleFailed(request_id=sample.request_id, failure=failure)
    await rig.bus.finish_sample(sample, failed)

    answer = await rig.poll(sample.request_id)

    assert answer.json == {"error": "too long", "category": "user"}


async def released(rig, op):
    """The answer to a poll that was held until the gateway ended all waiting."""
    poll = asyncio.create_task(rig.poll(request_id(op)))
    await held(rig)
    rig.gateway.futures.release()
    return await poll


async def test_what_is_not_done_yet_is_held_and_then_408(rig, op, patient):
    patient()
    await rig.announce("trainer", MODEL)

    answer = await released(rig, op)

    assert (answer.status, answer.json) == (
        408,
        {"type": "try_again", "request_id": request_id(op), "queue_state": "active"},
    )


async def test_a_ping_wakes_the_polls_of_its_op_only(rig, op, patient):
    patient(recheck_s=20.0)
    polls = [asyncio.create_task(rig.poll(request_id(op))) for _ in range(3)]
    other = asyncio.create_task(rig.poll(ids.future_id(op.model_id, 0)))
    await held(rig, 4)

    await rig.bus.finish_op(op, ops.OptimStepDone())

    assert [answer.status for answer in await asyncio.gather(*polls)] == [200] * 3
    assert not other.done()
    rig.gateway.futures.release()
    assert (await other).status == 408


async def test_a_ping_wakes_the_poll_of_a_sample(rig, sample, patient):
    patient(recheck_s=20.0)
    poll = asyncio.create_task(rig.poll(sample.request_id))
    await held(rig)

    await rig.bus.finish_sample(sample, sampling.SampleDone(request_id=sample.request_id))

    assert (await poll).status == 200


async def test_a_lost_ping_is_made_up_for_by_a_recheck(rig, op, patient):
    patient(recheck_s=0.05)
    poll = asyncio.create_task(rig.poll(request_id(op)))
    await held(rig)

    await rig.bus.finish_op(op, ops.OptimStepDone(), ping=False)

    assert (await poll).status == 200


async def test_a_ping_during_the_first_look_is_not_lost(rig, op, patient, monkeypatch):
    patient(recheck_s=20.0)
    get = rig.bus.log.get

    async def slow_get(*args):
        found = await get(*args)
        monkeypatch.setattr(rig.bus.log, "get", get)
        await rig.bus.finish_op(op, ops.OptimStepDone())
        return found

    monkeypatch.setattr(rig.bus.log, "get", slow_get)

    assert (await rig.poll(request_id(op))).status == 200


async def test_an_op_finished_between_the_two_looks_is_found(rig, op, monkeypatch):
    is_queued = rig.bus.is_queued

    async def late(*args, **kwargs):
        await rig.bus.finish_op(op, ops.OptimStepDone(), ping=False)
        return await is_queued(*args, **kwargs)

    monkeypatch.setattr(rig.bus, "is_queued", late)
    rig.gateway.unfinished.done(request_id(op))  # as if it had not heard of it

    assert (await rig.poll(request_id(op))).status == 200


async def test_polls_that_leave_leave_nothing_behind(rig, op):
    await asyncio.gather(*(rig.poll(request_id(op)) for _ in range(5)))

    assert rig.gateway.futures.waiters._events == {}


async def test_what_was_never_asked_for_is_404(rig, op, sample):
    futures = [ids.future_id(op.model_id, 99), ids.future_id(sample.sampler_id, 99)]

    answers = [await rig.poll(future) for future in futures]

    assert [answer.status for answer in answers] == [404, 404]
    assert futures[0] in answers[0].detail


async def test_what_is_no_request_id_is_400(rig):
    assert (await rig.poll("req-1")).status == 400


async def test_a_future_of_someone_else_is_not_there(rig, op, sample):
    await rig.bus.finish_op(op, ops.OptimStepDone())

    answers = [await rig.poll(f, key=OTHER) for f in (request_id(op), sample.request_id)]

    assert [answer.status for answer in answers] == [404, 404]


async def test_without_a_worker_the_client_is_told_why_it_waits(rig, op, sample, monkeypatch):
    monkeypatch.setattr(rig.gateway.hearing, "since", time.monotonic() - 60)
    await rig.announce("trainer", "big/model")

    answers = [await rig.poll(future) for future in (request_id(op), sample.request_id)]

    assert [(a.status, a.json["queue_state"]) for a in answers] == [(408, "paused_capacity")] * 2
    reasons = [a.json["queue_state_reason"] for a in answers]
    assert reasons == [
        f"no {role} for model '{MODEL}' is running; waiting for one"
        for role in ("trainer", "sampler")
    ]


async def test_without_a_sampler_for_long_the_sample_fails(rig, sample, monkeypatch):
    monkeypatch.setattr(rig.gateway.hearing, "since", time.monotonic() - 601)

    answer = await rig.poll(sample.request_id)

    assert (answer.status, answer.json["category"]) == (200, "server")
    assert f"no sampler has served '{MODEL}' for 601 s" in answer.json["error"]


async def test_training_that_would_still_happen_is_never_called_failed(rig, op, monkeypatch):
    monkeypatch.setattr(rig.gateway.hearing, "since", time.monotonic() - 601)

    answer = await rig.poll(request_id(op))

    assert (answer.status, answer.json["queue_state"]) == (408, "paused_capacity")
    assert f"no trainer for model '{MODEL}' is running" in answer.json["queue_state_reason"]


async def test_a_model_that_no_trainer_has_room_for_is_told_so(rig, op):
    await rig.announce("trainer", MODEL, load={"room": 0, "models": 2})

    answer = await rig.poll(request_id(op))

    assert (answer.status, answer.json["queue_state"]) == (408, "paused_capacity")
    assert "full (1 running, with 2 models)" in answer.json["queue_state_reason"]


async def test_a_model_in_the_hands_of_a_full_trainer_is_at_work(rig, op):
    await rig.announce("trainer", MODEL, load={"room": 0, "models": 2})
    rig.bus.log.owners[op.model_id] = ops.Owned(
        model_id=op.model_id, epoch=1, trainer_id="t", prev_blake3=""
    )

    assert (await rig.poll(request_id(op))).json["queue_state"] == "active"


async def test_a_trainers_trouble_reaches_those_who_wait_for_it(rig, op):
    await rig.announce("trainer", MODEL, trouble="training waits for room")

    answer = await rig.poll(request_id(op))

    assert (answer.status, answer.json["queue_state"]) == (408, "paused_capacity")
    assert answer.json["queue_state_reason"] == "training waits for room"


async def test_a_result_is_given_out_even_when_no_worker_is_left(rig, op, monkeypatch):
    await rig.bus.finish_op(op, ops.OptimStepDone())
    monkeypatch.setattr(rig.gateway.hearing, "since", time.monotonic() - 601)

    assert "metrics" in (await rig.poll(request_id(op))).json


async def test_a_poll_ends_by_itself(rig, op):
    assert (await rig.poll(request_id(op))).status == 408


async def test_a_broker_that_is_away_makes_the_poll_wait_and_not_fail(rig, op, patient):
    await rig.poll(request_id(op))
    patient()
    rig.bus.is_connected = False

    answer = await released(rig, op)

    assert (answer.status, answer.json["queue_state"]) == (408, "paused_capacity")
    assert "is it running?" in answer.json["queue_state_reason"]


async def test_a_broker_that_is_away_when_the_owner_is_looked_up_fails_nothing(rig, op):
    rig.gateway.registry.runs.apply(ids.token(op.model_id), None)
    rig.bus.is_connected = False

    assert (await rig.poll(request_id(op))).status == 408


async def test_a_broker_that_comes_back_ends_the_wait(rig, op, patient):
    patient(recheck_s=0.05)
    rig.bus.is_connected = False
    poll = asyncio.create_task(rig.poll(request_id(op)))
    await held(rig)

    rig.bus.is_connected = True
    await rig.bus.finish_op(op, ops.OptimStepDone(), ping=False)

    assert (await poll).status == 200


async def test_a_result_that_cannot_be_read_is_a_failed_future(rig, op, monkeypatch):
    await rig.bus.finish_op(op, ops.OptimStepDone())

    async def missing(*_record):
        raise BlobMissing("blob 12 is not in the store")

    monkeypatch.setattr(rig.bus.log, "result", missing)
    answer = await rig.poll(request_id(op))

    assert (answer.status, answer.json["category"]) == (200, "server")
    assert "blob 12" in answer.json["error"]


async def test_an_error_nobody_foresaw_is_a_failed_future_and_no_5xx(rig, op, monkeypatch):
    async def crash(*_args):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(rig.bus.log, "get", crash)
    answer = await rig.poll(request_id(op))

    assert (answer.status, answer.json["category"]) == (200, "server")
    assert "secret" not in answer.json["error"]
    assert answer.headers["X-Request-Id"] in answer.json["error"]


async def test_polling_is_a_sign_of_life(rig, op):
    rig.gateway.sessions._heard.clear()

    await rig.poll(request_id(op))

    assert ids.session_of(op.model_id) in rig.gateway.sessions._heard


async def test_a_gateway_that_stops_lets_its_polls_go(rig, op, patient):
    patient(recheck_s=20.0)
    stopping = asyncio.Event()
    watch = asyncio.create_task(rig.gateway.keep_watch(stopping))
    poll = asyncio.create_task(rig.poll(request_id(op)))
    await held(rig)

    stopping.set()

    assert (await poll).status == 408
    await watch


async def test_closing_a_gateway_leaves_no_listeners_on_the_bus(fake, seals):
    from tinsmith_gateway.gateway import Gateway

    gateway = Gateway.build(GatewayConfig(), fake, ["tml-a"], seals)
    await gateway.start()
    assert fake.listeners > 9

    await gateway.close()

    assert fake.listeners == 0


def test_a_gateway_that_has_just_started_waits_before_it_misses_anybody():
    assert Hearing().silent_s(None) < 1


@pytest.mark.parametrize(("turns", "state"), [(3, "paused_capacity"), (0, "active")])
async def test_a_model_behind_others_is_told_its_place(rig, op, turns, state):
    place = QueuePlace(turns=turns, tokens=700 * turns)
    await rig.announce("trainer", MODEL, places={op.model_id: place})

    answer = await rig.poll(request_id(op))

    assert (answer.status, answer.json["queue_state"]) == (408, state)
    assert ("3 of their turns (2100 tokens)" in answer.raw.decode()) == bool(turns)
