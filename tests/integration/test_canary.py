"""What samplers draw is scored again by a trainer, on a real broker: who agrees, who does not."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tests.integration.auditing import bus_of
from tests.integration.conftest import MODEL, start, stop
from tests.integration.steps import new_model, step
from tests.integration.test_pools import PATIENCE_S, Installation, until
from tests.integration.test_whole import WHOLE, session
from tests.integration.test_whole import new_model as new_whole_model
from tests.integration.trainer.test_ownership import STEP, Client, forward_backward, train, trainer
from tinker import types as T

from tinsmith import ids
from tinsmith.adapters import version_of
from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.messages import sampling, table
from tinsmith.messages.base import BlobRef
from tinsmith.metrics import names as metrics
from tinsmith.paths import DataDir
from tinsmith.pools import share_of
from tinsmith_sampler import service
from tinsmith_trainer.canary import Canary
from tinsmith_trainer.checkpoint_files import to_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DRAWN = 24  # tokens of a continuation


@asynccontextmanager
async def watching(running):
    """A canary on the trainer, as its service has one."""
    canary = Canary(running.context, running.engine, running.compute, running.service)
    watching = asyncio.create_task(canary.run())
    try:
        yield canary
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def figures(canary, part):
    return canary._windows[part].figures


async def until_scored(canary, tokens):
    await until(lambda: figures(canary, "staleness").tokens >= tokens)


async def saved(running, client, blobs):
    """The model as a sampler gets it."""
    files = to_files(running.engine.snapshot(client.model), with_optimizer=False)
    refs = {name: await blobs.put(data) for name, data in files.items()}
    return sampling.AdapterRef(version=version_of(refs), files=refs, model_id=client.model)


class Samplers(Installation):
    """Samplers that pick all that they draw."""

    async def draw(self, adapter):
        """One continuation; the request's answer."""
        seq, self._seq = self._seq, self._seq + 1
        request = sampling.Sample(
            request_id=ids.future_id(self._sampler, seq), sampler_id=self._sampler, seq=seq,
            base_model=MODEL, adapter=adapter, prompt=np.arange(5, 9 + seq, dtype="<i4").tobytes(),
            params=sampling.SamplingParams(max_tokens=DRAWN, seed=seq, ignore_eos=True),
        )  # fmt: skip
        await self.bus.enqueue(
            table.SAMPLES, request, pool=ids.pool_token(MODEL), share=share_of("", request),
            sampler=ids.token(self._sampler), seq=str(seq),
        )  # fmt: skip
        return await self.answer(seq)


@pytest.fixture
def samplers(bus, blobs, model_folder):
    return Samplers(bus, blobs, model_folder)


@pytest.fixture
def engines(monkeypatch):
    """The engines that samplers in this process make."""
    made, real = [], service._engine

    def noted(*args):
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(service, "_engine", noted)
    return made


def corrupt(engine, version):
    """As bits that flip in memory do, where the engine computes with them."""
    generator = torch.Generator().manual_seed(0)
    for delta in engine._adapters[version].deltas.values():
        weight = delta.up.weight()
        delta.up.replace(weight + torch.randn(weight.shape, generator=generator))


async def test_an_old_sampler_is_stale_and_a_corrupted_one_raises_the_alarm(
    broker, bus, blobs, model_folder, samplers, engines
):
    client = Client(bus)
    async with (
        trainer(broker, blobs, str(model_folder)) as running,
        watching(running) as canary,
        samplers.sampler("one", canary_share=1.0),
    ):
        await samplers.draw(None)
        await until_scored(canary, DRAWN)
        of_base = figures(canary, "numerics"), figures(canary, "staleness")

        await client.create()
        await train(client, 1, 4)
        adapter = await saved(running, client, blobs)
        await samplers.draw(adapter)
        await until_scored(canary, 2 * DRAWN)
        on_policy = figures(canary, "numerics"), figures(canary, "staleness")

        await train(client, 5, 10)
        await samplers.draw(adapter)
        await until_scored(canary, 3 * DRAWN)
        off_policy = figures(canary, "numerics"), figures(canary, "staleness")
        healthy = metrics.CANARY_OVER.labels("numerics")._value.get()

        corrupt(engines[-1][0], adapter.version)
        with capture_logs() as logs:
            answer = await samplers.draw(adapter)
            await until_scored(canary, 4 * DRAWN)
        corrupted = figures(canary, "numerics")
        load = dict(running.context.load)

    for numerics, _ in (of_base, on_policy, off_policy):
        assert 0 < numerics.dlogp < 1e-4
        assert abs(numerics.k1) < 1e-4
        assert 0 <= numerics.k3 < 1e-8
    assert of_base[1][1:] == on_policy[1][1:] == (0, 0, 0)
    assert off_policy[1].k3 > 1e-3
    assert healthy == 0
    assert isinstance(answer, sampling.SampleDone)  # the client got it all the same
    assert corrupted.k3 > 0.01
    assert metrics.CANARY_OVER.labels("numerics")._value.get() == 1
    assert load["canary_numerics_kl"] == corrupted.k3
    (warning,) = [one for one in logs if one["event"] == "numerics over its threshold"]
    assert warning["log_level"] == "warning"
    assert (warning["sampler"], warning["weight_version"]) == ("one", adapter.version)


def picked(adapter, index):
    """A continuation that somebody may have drawn."""
    tokens = np.arange(5, 45, dtype="<i4")
    logprobs = np.full(30, -3.0, dtype="<f4")
    return sampling.SamplePicked(
        request_id="s:sample:0:1", index=index, adapter=adapter, tokens=tokens.tobytes(),
        logprobs=logprobs.tobytes(),
    )  # fmt: skip


@asynccontextmanager
async def world(folder):
    """A broker and blobs of their own: (broker, bus, blobs)."""
    data = DataDir(folder)
    data.prepare()
    broker = Broker(data.nats, data.run)
    broker.start()
    try:
        blobs = BlobStore.open("", default=folder / "blobs")
        async with Bus.connect(BusConfig(url=broker.url), name="test", blobs=blobs) as bus:
            await bus.ensure()
            yield broker, bus, blobs
    finally:
        broker.kill()


async def logged(folder, model_folder, client, *, canary_scores):
    """All entries of the log of a run, in which a canary scores before every op, or never."""
    async with (
        world(folder) as (broker, bus, blobs),
        trainer(broker, blobs, str(model_folder), snapshot_s=1e6) as running,
        watching(running) as canary,
    ):
        client.bus, scored, adapter = bus, 0, None
        await client.create()
        await client.result(0)
        for seq in range(1, 9):
            if canary_scores:
                if seq % 4 == 1:
                    adapter = await saved(running, client, blobs)
                for one in (None, adapter):  # a gradient is there before every second op
                    pool = ids.pool_token(MODEL)
                    await bus.emit(table.SAMPLE_PICKED, picked(one, seq), pool=pool)
                    scored += 30
                    await until_scored(canary, scored)
            await client.send(seq, forward_backward(5 + seq) if seq % 2 else STEP)
            await client.result(seq)
        entries = [entry async for entry in bus.log.entries(client.model)]
        return entries, figures(canary, "staleness").tokens


async def test_a_run_that_is_scored_all_the_time_has_the_log_of_one_that_is_not(
    tmp_path, model_folder
):
    client = Client(None)
    alone, none = await logged(tmp_path / "a", model_folder, client, canary_scores=False)
    scored, tokens = await logged(tmp_path / "b", model_folder, client, canary_scores=True)

    assert (none, tokens) == (0, 8 * 2 * 30)
    assert scored == alone
    assert len(alone) == 10  # an owner and nine ops


async def test_what_cannot_be_scored_is_nobodys_error(broker, bus, blobs, model_folder):
    client = Client(bus)
    async with trainer(broker, blobs, str(model_folder)) as running, watching(running) as canary:
        await client.create()
        await client.result(0)
        wrong = [
            sampling.SamplePicked(request_id="r", index=0, tokens=tokens, logprobs=logprobs)
            for tokens, logprobs in (
                (b"", b""),
                (np.array([1, 2**31 - 1], "<i4").tobytes(), b"\0" * 4),
                (np.array([1, -1], "<i4").tobytes(), b"\0" * 4),
                (np.array([1, 2], "<i4").tobytes(), b"\0" * 8),
                (b"\0" * 7, b"\0" * 4),
            )
        ]
        outcomes = [await canary._outcome(one) for one in wrong]
        deleted = {"adapter_config.json": BlobRef("0" * 64, 1)}
        adapter = sampling.AdapterRef(version="v", files=deleted, model_id=client.model)
        gone = await canary._outcome(picked(adapter, 0))
        still = await canary._outcome(picked(None, 0))
        last = await train(client, 1, 2)

    assert outcomes == ["failed"] * len(wrong)
    assert gone == "outdated"
    assert still == "scored"
    assert last.metrics["optimizer_steps"] == 1


@pytest.fixture(scope="module")
def server(tmp_path_factory, model_folder):
    """A server whose trainers score all that is drawn from adapters and from whole models."""
    folder = tmp_path_factory.mktemp("canary")
    extra = "full = true\n[sampler]\ncanary_share = 1.0\n"
    running = start(folder, model_folder=model_folder, extra=extra)
    yield running
    stop(running)


async def told(server, base_model, work):
    """What the trainer's first ping says that has figures, after ``work`` with a client."""
    loads, has_told = [], threading.Event()

    def hear(alive):
        if alive.base_models == (base_model,) and "canary_staleness_kl" in alive.load:
            loads.append(alive.load)
            has_told.set()

    def works():
        with session(server) as client:  # whose models are gone at its end
            work(client)
            return has_told.wait(PATIENCE_S)

    async with bus_of(server) as bus:
        heard = await bus.listen(table.SERVICE_ALIVE, hear)
        assert await asyncio.to_thread(works)
        await heard.close()
    return loads[0]


def draw(sampler):
    params = T.SamplingParams(max_tokens=DRAWN, seed=1)
    prompt = T.ModelInput.from_ints(list(range(5, 15)))
    sampler.sample(prompt, num_samples=4, sampling_params=params).result()


async def test_a_server_tells_of_both_parts_in_its_pings(server):
    def work(client):
        model = new_model(client)
        step(model)
        sampler = model.save_weights_and_get_sampling_client().result()
        step(model)
        draw(sampler)

    load = await told(server, MODEL, work)

    assert load["canary_staleness_kl"] > 0
    assert load["canary_numerics_kl"] < 1e-8
    assert load["canary_numerics_dlogp"] < 1e-4


async def test_a_model_that_is_trained_whole_is_scored_while_its_weights_are_the_newest(server):
    def work(client):
        model = new_whole_model(client)
        step(model, lr=1e-3)
        old = model.save_weights_and_get_sampling_client().result()
        step(model, lr=1e-3)
        draw(old)  # these weights are gone, so that nothing could be told apart
        draw(model.save_weights_and_get_sampling_client().result())

    load = await told(server, WHOLE, work)

    assert load["canary_staleness_dlogp"] == 0
    assert 0 < load["canary_numerics_dlogp"] < 1e-4
