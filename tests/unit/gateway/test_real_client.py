"""The unmodified ``tinker`` client against the gateway; only what lies behind the bus is played.

The played trainer and sampler compute nothing: they answer each message with numbers made from
its own, so that what the client gets shows what has arrived.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from tinsmith import ids
from tinsmith.messages import ops, sampling
from tinsmith.messages.base import Failed, Tensor
from tinsmith.messages.registry import Sampler
from tinsmith.messages.table import OPS, RUNS, SAMPLERS, SAMPLES
from tinsmith_gateway.config import MIB, GatewayConfig

tinker = pytest.importorskip("tinker")

MODEL = "tiny/model"
pytestmark = [
    # The client's own: pydantic warns of its field names, its loop thread leaves transports open.
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(params=[False, True], ids=["plain", "zstd"])
def is_compressed(request):
    return request.param


@pytest.fixture
def config(is_compressed):
    return GatewayConfig(
        long_poll_s=1.0, max_body_bytes=4 * MIB, compress_training_requests=is_compressed
    )


@pytest.fixture
async def workers(rig):
    """Answers everything that is queued, for as long as the test runs."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(train(rig)), group.create_task(draw(rig))]
        yield
        for task in tasks:
            task.cancel()


@pytest.fixture
async def service(rig, workers, monkeypatch):
    """A client in threads of its own; ``TINKER_*`` is all that its user sets."""
    monkeypatch.setenv("TINKER_BASE_URL", rig.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-alice")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    client = await asyncio.to_thread(tinker.ServiceClient)
    yield client
    await asyncio.to_thread(lambda: client.close("success").result())


async def train(rig):
    seen = set()
    while True:
        op = await rig.bus.take(OPS, seen)
        await rig.bus.finish_op(op, await op_result(rig, op))


async def op_result(rig, op):  # noqa: C901 - one case per kind of op
    body = op.body
    match body:
        case ops.CreateModel():
            return ops.CreateModelDone(model_id=op.model_id, lora=body.lora)
        case ops.ForwardBackward():
            logprobs = tuple(scored(datum) for datum in body.data)
            metrics = {"loss:sum": float(len(logprobs)), "tokens:sum": 0.0}
            return ops.ForwardBackwardDone(logprobs=logprobs, metrics=metrics)
        case ops.OptimStep():
            return ops.OptimStepDone(metrics={"lr": body.learning_rate, "grad_norm": math.nan})
        case ops.SaveWeights():
            return ops.SaveWeightsDone(path=await rig.checkpoint(op.model_id, name=body.name))
        case ops.SaveWeightsForSampler(name=None):
            await ephemeral(rig, op.model_id, body.sampling_session_id)
            return ops.SaveWeightsForSamplerDone(sampling_session_id=body.sampling_session_id)
        case ops.SaveWeightsForSampler():
            path = await rig.checkpoint(op.model_id, "sampler_weights", body.name)
            return ops.SaveWeightsForSamplerDone(path=path)
        case ops.LoadWeights():
            return ops.LoadWeightsDone(path=body.path)
        case ops.Refused():
            return body.reason
    raise AssertionError(body)


def scored(datum):
    """Minus each target as its log-probability."""
    target = datum.inputs["target_tokens"]
    values = -np.frombuffer(target.data, "<i8").astype("<f4")
    return Tensor("float32", target.shape, values.tobytes())


async def ephemeral(rig, model_id, sampler_id):
    run = await rig.bus.table(RUNS).get(ids.token(model_id))
    entry = Sampler(
        sampler_id=sampler_id,
        session_id=run.session_id,
        owner=run.owner,
        created_ns=1,
        base_model=run.base_model,
    )
    await rig.bus.table(SAMPLERS).put(ids.token(sampler_id), entry)


async def draw(rig):
    seen = set()
    while True:
        asked = await rig.bus.take(SAMPLES, seen)
        await rig.bus.finish_sample(asked, sample_result(asked))


def sample_result(asked):
    if asked.params.max_tokens == 13:
        failure = Failed(category="user", message="max_tokens: 13 is unlucky")
        return sampling.SampleFailed(request_id=asked.request_id, failure=failure)
    prompt = np.frombuffer(asked.prompt, "<i4")
    scores = np.concatenate([[np.nan], -prompt[1:]]).astype("<f4")
    sequence = sampling.Sequence(
        tokens=prompt[::-1].tobytes(), logprobs=scores[::-1].tobytes(), stop_reason="stop"
    )
    return sampling.SampleDone(
        request_id=asked.request_id,
        sequences=(sequence,) * asked.num_samples,
        prompt_logprobs=scores.tobytes() if asked.prompt_logprobs else None,
    )


def datum(*targets, length=None):
    length = length or len(targets)
    targets = (targets * length)[:length]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(range(1, length + 1))),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=list(targets), dtype="int64", shape=[length]),
            "weights": tinker.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
        },
    )


def error_of(future):
    with pytest.raises(tinker.RequestFailedError) as caught:
        future.result()
    return caught.value


def logprobs(output):
    return [one["logprobs"].to_numpy().tolist() for one in output.loss_fn_outputs]


async def test_a_training_loop_runs(service):
    def loop():
        training = service.create_lora_training_client(MODEL, rank=8).result()
        passed = training.forward_backward([datum(1, 2), datum(3)], "cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=0.5))
        saved = training.save_state("step1")
        return passed.result(), stepped.result(), saved.result(), training

    passed, stepped, saved, training = await asyncio.to_thread(loop)

    assert logprobs(passed) == [[-1.0, -2.0], [-3.0]]
    assert passed.metrics["loss:sum"] == 2.0
    assert stepped.metrics["lr"] == 0.5
    assert math.isnan(stepped.metrics["grad_norm"])
    assert saved.path == f"tinker://{training.model_id}/weights/step1"


async def test_chunks_that_arrive_out_of_order_give_one_result_in_order(service, rig):
    def loop():
        training = service.create_lora_training_client(MODEL, rank=8).result()
        # About 1.6 MB each: three chunks.
        data = [datum(n, length=80_000) for n in range(1, 8)]
        passed = training.forward_backward(data, "cross_entropy")
        return passed.result(), training.optim_step(tinker.AdamParams()).result()

    passed, _ = await asyncio.to_thread(loop)

    assert [row[0] for row in logprobs(passed)] == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
    assert passed.metrics["loss:sum"] == 7.0


async def test_a_datum_over_the_limit_fails_its_future_and_the_next_call_works(service):
    def loop():
        training = service.create_lora_training_client(MODEL, rank=8).result()
        too_large = training.forward_backward([datum(1, length=2_000_000)], "cross_entropy")
        fine = training.forward_backward([datum(5)], "cross_entropy")
        return error_of(too_large), fine.result()

    error, passed = await asyncio.to_thread(loop)

    assert "limit of 4194304 bytes" in str(error)
    assert logprobs(passed) == [[-5.0]]


async def test_a_user_s_mistake_raises_at_once_and_the_next_call_works(service):
    def loop():
        training = service.create_lora_training_client(MODEL, rank=8).result()
        wrong = training.optim_step(tinker.AdamParams(learning_rate=-1.0))
        fine = training.optim_step(tinker.AdamParams(learning_rate=0.25))
        return error_of(wrong), fine.result()

    error, stepped = await asyncio.to_thread(loop)

    assert (error.category, "learning_rate: -1.0" in str(error)) == ("user", True)
    assert stepped.metrics["lr"] == 0.25


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
async def test_training_resumes_from_a_checkpoint(service):
    def loop():
        first = service.create_lora_training_client(MODEL, rank=8).result()
        path = first.save_state("step1").result().path
        second = service.create_training_client_from_state_with_optimizer(path).result()
        second.load_state(path).result()
        return first, second, second.forward([datum(4)], "cross_entropy").result()

    first, second, passed = await asyncio.to_thread(loop)

    assert (first.model_id[-7:], second.model_id[-7:]) == ("train:0", "train:1")
    assert logprobs(passed) == [[-4.0]]
    assert second.get_info().model_data.model_name == MODEL


async def test_saved_weights_are_sampled_from(service):
    params = tinker.SamplingParams(max_tokens=4, stop=["\n"])
    prompt = tinker.ModelInput.from_ints([7, 8, 9])

    def loop():
        training = service.create_lora_training_client(MODEL, rank=8).result()
        named = training.save_weights_for_sampler("s").result().path
        clients = [
            service.create_sampling_client(base_model=MODEL).result(),
            service.create_sampling_client(model_path=named).result(),
            training.save_weights_and_get_sampling_client().result(),
        ]
        samples = [c.sample(prompt, num_samples=2, sampling_params=params) for c in clients]
        return [s.result() for s in samples], clients[0].compute_logprobs(prompt).result()

    samples, scores = await asyncio.to_thread(loop)

    tokens = [[s.tokens for s in one.sequences] for one in samples]
    assert tokens == [[[9, 8, 7], [9, 8, 7]]] * 3
    assert scores == [None, -8.0, -9.0]


async def test_a_sample_that_fails_raises(service):
    def loop():
        client = service.create_sampling_client(base_model=MODEL).result()
        params = tinker.SamplingParams(max_tokens=13)
        prompt = tinker.ModelInput.from_ints([7])
        return error_of(client.sample(prompt, num_samples=1, sampling_params=params))

    error = await asyncio.to_thread(loop)

    assert "13 is unlucky" in str(error)


async def test_a_model_that_is_not_served_is_refused_by_name(service):
    def loop():
        return service.create_lora_training_client("big/model", rank=8).result()

    with pytest.raises(tinker.BadRequestError, match="served are 'tiny/model'"):
        await asyncio.to_thread(loop)


async def test_the_rest_client_reads_every_list(service, rig):
    def loop():
        training = service.create_lora_training_client(MODEL, rank=8).result()
        path = training.save_state("step1").result().path
        # Without an address the client shares one connection over the whole process.
        rest = tinker.RestClient(base_url=rig.url)
        return (
            {
                "runs": rest.list_training_runs().result().training_runs,
                "run": rest.get_training_run(training.model_id).result(),
                "checkpoints": rest.list_checkpoints(training.model_id).result().checkpoints,
                "all": rest.list_user_checkpoints().result().checkpoints,
                "weights": rest.get_weights_info_by_tinker_path(path).result(),
                "models": rest.get_server_capabilities().result().supported_models,
                "sessions": rest.list_sessions().result().sessions,
            },
            training.model_id,
            path,
        )

    found, model, path = await asyncio.to_thread(loop)

    assert [run.training_run_id for run in found["runs"]] == [model]
    assert found["run"].last_checkpoint.tinker_path == path
    assert [c.tinker_path for c in found["checkpoints"] + found["all"]] == [path, path]
    assert (found["weights"].base_model, found["weights"].lora_rank) == (MODEL, 8)
    assert [m.model_name for m in found["models"]] == [MODEL]
    assert found["sessions"] == [ids.session_of(model)]


async def test_closing_the_client_ends_its_session(service, rig):
    def loop():
        service.create_sampling_client(base_model=MODEL).result()
        service.close("success", detail="done").result()

    await asyncio.to_thread(loop)

    (session,) = rig.gateway.registry.sessions
    assert (session.status, session.detail) == ("finished", "success: done")
