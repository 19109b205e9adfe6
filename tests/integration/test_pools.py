"""Several samplers on one broker: pools, one that fails, and who answers what."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest
import structlog
from tests.integration.conftest import MODEL
from tests.integration.contexts import context_of

from tinsmith import ids
from tinsmith.config import Config, ModelConfig
from tinsmith.errors import ServerError
from tinsmith.messages import sampling, table
from tinsmith.pools import share_of
from tinsmith_sampler import neighbours, service
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.torch_engine import TorchEngine

PATIENCE_S = 90
MANY = 40
SILENT = structlog.wrap_logger(
    structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
)  # a traceback with all its locals takes seconds

pytestmark = pytest.mark.slow


class Installation:
    """Samplers in this process, and requests to them."""

    def __init__(self, bus, blobs, model_folder):
        self.bus = bus
        self._blobs = blobs
        self._models = (ModelConfig(name=MODEL, path=str(model_folder)),)
        self._sampler = ids.sampler_id(ids.new_session_id(), 0)
        self._seq = 0

    @asynccontextmanager
    async def sampler(self, instance, **settings):
        config = Config(models=self._models, sections=(SamplerConfig(threads=1, **settings),))
        context = context_of(instance, self.bus, self._blobs, config, SILENT)
        serving = asyncio.create_task(service.serve(context))
        pinging = asyncio.create_task(ping(context))
        try:
            await until(lambda: context.alive is not None or serving.done())
            yield context
            context.stopping.set()
            async with asyncio.timeout(PATIENCE_S):
                await serving
        finally:
            pinging.cancel()
            serving.cancel()

    async def ask(self, *, pool=""):
        """Queue one request; its number."""
        seq, self._seq = self._seq, self._seq + 1
        request = sampling.Sample(
            request_id=ids.future_id(self._sampler, seq),
            sampler_id=self._sampler,
            seq=seq,
            base_model=MODEL,
            prompt=(5 + seq).to_bytes(4, "little"),
            params=sampling.SamplingParams(max_tokens=2, seed=seq),
        )
        await self.bus.enqueue(
            table.SAMPLES,
            request,
            pool=ids.pool_token(MODEL),
            share=share_of(pool, request),
            sampler=ids.token(self._sampler),
            seq=str(seq),
        )
        return seq

    async def answer(self, seq):
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.bus.results.get(self._sampler, seq)) is None:
                await asyncio.sleep(0.02)
            return found

    async def answers(self, count, **options):
        asked = [await self.ask(**options) for _ in range(count)]
        return [await self.answer(seq) for seq in asked]


async def ping(context):
    while True:
        await context.tell()
        await asyncio.sleep(0.1)


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def installation(bus, blobs, model_folder):
    return Installation(bus, blobs, model_folder)


def samplers(answers):
    return {answer.sampler for answer in answers}


async def test_a_pool_has_its_own_requests_and_those_of_one_that_is_gone(installation, monkeypatch):
    monkeypatch.setattr(neighbours, "STALE_S", 1.0)
    async with installation.sampler("sampler-big", pool="big") as big:
        async with installation.sampler("sampler-plain"):
            to_big = await installation.answers(MANY, pool="big")
            to_default = await installation.answers(MANY)
        # Now the other one has to see to these, and it does.
        orphans = await installation.answers(4)

    assert samplers(to_big) == {"sampler-big"}
    assert samplers(to_default) == {"sampler-plain"}
    assert samplers(orphans) == {"sampler-big"}
    assert big.alive.labels == {"engine": "torch", "device": "cpu", "dtype": "float32"}
    rows = [await installation.bus.table(table.SERVED).get(key(pool)) for pool in ("", "-big")]
    assert [row.pool for row in rows] == ["", "big"]


def key(pool):
    return f"{ids.pool_token(MODEL)}-sampler{pool}"


async def test_one_whose_engine_fails_leaves_the_work_to_others(installation, monkeypatch):
    async with installation.sampler("sampler-bad") as bad:
        async with installation.sampler("sampler-good") as good:
            with monkeypatch.context() as broken:
                break_one(broken, bad)
                answers = await installation.answers(MANY)
                trouble, is_taking = bad.trouble, bad.is_taking
            # It is tried again with one request at a time, and then is like any other.
            while bad.trouble:
                answers += await installation.answers(4)
            recovered = bad.is_taking
        alone = await installation.answers(4)

    assert all(isinstance(answer, sampling.SampleDone) for answer in answers + alone)
    assert "the last time with: out of order" in trouble
    assert not is_taking
    assert (good.trouble, bad.trouble, recovered) == ("", "", True)
    assert samplers(alone) == {"sampler-bad"}


async def test_the_only_one_says_at_once_what_its_engine_said(installation, monkeypatch):
    async with installation.sampler("sampler-bad") as bad:
        with monkeypatch.context() as broken:
            break_one(broken, bad)
            failed = await installation.answers(8)
        rest = await installation.answers(2)

    assert {answer.failure.message for answer in failed} == {"out of order"}
    assert all(isinstance(answer, sampling.SampleDone) for answer in rest)


ENGINES = {}


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """Notes the engine of each sampler."""
    made = service.Sampler.__init__

    def noted(self, context, engine, *args):
        ENGINES[context.instance] = engine
        made(self, context, engine, *args)

    monkeypatch.setattr(service.Sampler, "__init__", noted)


def break_one(patch, context):
    generate = TorchEngine.generate

    async def failing(self, row):
        if self is ENGINES[context.instance]:
            raise ServerError("out of order")
        return await generate(self, row)

    patch.setattr(TorchEngine, "generate", failing)
