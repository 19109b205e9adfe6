"""Limits of one request, and of what an owner has waiting: each is named, with the remedy."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith import ids
from tinsmith.messages import ops, sampling
from tinsmith.messages.table import OPS, SAMPLES
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb

OTHER = "tml-bob"


@pytest.fixture
def config():
    return GatewayConfig(
        long_poll_s=0.3, recheck_s=0.1, max_datums=2, max_request_tokens=40, max_unfinished=3
    )


def training(model, seq, *lengths):
    text = pb.EncodedTextChunk
    data = [
        pb.Datum(model_input=[pb.Chunk(encoded_text=text(tokens=b"\1\0\0\0" * n))]) for n in lengths
    ]
    return pb.ForwardBackwardRequest(model_id=model, seq_id=seq, data=data, loss_fn="cross_entropy")


def step(model, seq):
    return {"model_id": model, "seq_id": seq, "adam_params": {}}


def draw(sampler, seq=1, samples=1, tokens=4):
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": tokens},
    }


async def finish(rig, model, seq, *, ping=True):
    done = ops.OptimStepDone(metrics={})
    await rig.bus.finish_op(ops.Op(model_id=model, seq=seq, body=ops.OptimStep()), done, ping=ping)


@pytest.mark.parametrize(
    ("lengths", "limit", "setting"),
    [((1, 1, 1), "limit of 2", "max_datums"), ((20, 21), "limit of 40", "max_request_tokens")],
)
async def test_a_training_request_over_a_limit_fails_in_its_place(rig, lengths, limit, setting):
    model = await rig.model()

    answer = await rig.post_proto(training(model, 1, *lengths))

    assert answer.status == 200
    reason = rig.bus.queued(OPS)[-1].body.reason
    assert (reason.code, reason.category) == ("TooLarge", "user")
    assert limit in reason.message
    assert f"gateway.{setting}" in reason.message


async def test_a_training_request_at_the_limits_is_taken(rig):
    model = await rig.model()

    await rig.post_proto(training(model, 1, 20, 20))

    assert isinstance(rig.bus.queued(OPS)[-1].body, ops.ForwardBackward)


@pytest.mark.parametrize(
    ("samples", "tokens", "status"), [(2, 19, 200), (2, 20, 413), (1, 99, 413)]
)
async def test_a_sampling_request_counts_its_prompt_and_all_continuations(
    rig, samples, tokens, status
):
    answer = await rig.post("asample", draw(await rig.sampler(), 1, samples, tokens))

    assert answer.status == status
    if status == 413:
        assert "limit of 40" in answer.detail
        assert "gateway.max_request_tokens" in answer.detail


async def test_too_much_at_once_is_429_until_some_is_done(rig):
    model = await rig.model()
    for seq in (1, 2):
        assert (await rig.post("optim_step", step(model, seq))).status == 200

    refused = await rig.post("optim_step", step(model, 3))
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    assert "3 of this key, at the limit of 3" in refused.detail
    assert "gateway.max_unfinished" in refused.detail

    await finish(rig, model, 0)
    assert (await rig.post("optim_step", step(model, 3))).status == 200


async def test_samples_and_models_count_too_and_other_owners_do_not(rig):
    model, sampler = await rig.model(), await rig.sampler()
    for seq in (1, 2):
        assert (await rig.post("asample", draw(sampler, seq))).status == 200

    assert (await rig.post("asample", draw(sampler, 3))).status == 429
    assert (await rig.post("optim_step", step(model, 1))).status == 429
    other = await rig.sampler(key=OTHER)
    assert (await rig.post("asample", draw(other), key=OTHER)).status == 200

    asked = rig.bus.queued(SAMPLES)[0]
    result = sampling.SampleDone(request_id=asked.request_id, sequences=())
    await rig.bus.finish_sample(asked, result)
    assert (await rig.post("asample", draw(sampler, 3))).status == 200


async def test_a_request_that_is_sent_again_is_counted_once(rig):
    model = await rig.model()
    for _ in range(5):
        assert (await rig.post("optim_step", step(model, 1))).status == 200

    assert (await rig.post("optim_step", step(model, 2))).status == 200


async def test_what_all_others_wait_for_is_let_in(rig):
    """Chunks come out of order: refused for ever, the first would stop the rest for ever."""
    model = await rig.model()
    await finish(rig, model, 0)
    for seq in (2, 3, 4):
        assert (await rig.post("optim_step", step(model, seq))).status == 200

    assert (await rig.post("optim_step", step(model, 5))).status == 429
    assert (await rig.post("optim_step", step(model, 1))).status == 200


async def test_counting_down_does_not_get_around_the_limit(rig):
    model = await rig.model()
    await finish(rig, model, 0)

    statuses = [(await rig.post("optim_step", step(model, seq))).status for seq in range(20, 8, -1)]

    assert statuses == [200] * 6 + [429] * 6


async def test_a_lost_ping_is_made_up_for_by_a_look_at_the_queue(rig):
    model = await rig.model()
    for seq in (1, 2):
        await rig.post("optim_step", step(model, seq))
    await finish(rig, model, 0, ping=False)

    assert (await rig.post("optim_step", step(model, 3))).status == 200


async def test_what_was_polled_is_counted_no_longer(rig):
    model = await rig.model()
    owner = rig.gateway.keys.owner("tml-alice")
    assert rig.gateway.unfinished.count(owner) == 1
    done = ops.CreateModelDone(model_id=model, lora=ops.LoraShape(rank=8))
    await rig.bus.finish_op(rig.bus.queued(OPS)[0], done, ping=False)

    assert (await rig.poll(f"{model}:0")).status == 200
    assert rig.gateway.unfinished.count(owner) == 0


async def test_nothing_is_kept_of_what_is_done(rig):
    model = await rig.model()
    await finish(rig, model, 0)
    await asyncio.gather(*(rig.post("optim_step", step(model, seq)) for seq in (1, 2, 3)))
    for seq in (1, 2, 3):
        await finish(rig, model, seq)

    unfinished = rig.gateway.unfinished
    assert ids.session_of(model) not in repr((unfinished.__dict__, unfinished._tally.__dict__))
