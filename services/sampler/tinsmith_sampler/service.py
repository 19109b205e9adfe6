"""The sampler process: takes requests, has its engine answer them, stores the answers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from tinsmith import ids, whole
from tinsmith.bus import Bus
from tinsmith.cores import threads
from tinsmith.errors import ConfigError, UserError, VersionUnmet
from tinsmith.messages import table
from tinsmith.messages.failures import to_failed
from tinsmith.messages.registry import ServedModel
from tinsmith.messages.sampling import SampleDone, SampleFailed
from tinsmith.messages.services import SampleReady
from tinsmith.service import run_service
from tinsmith_sampler.answering import answer
from tinsmith_sampler.cancelling import Cancellable
from tinsmith_sampler.checks import Limits
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.recording import Recorder
from tinsmith_sampler.residency import Residency
from tinsmith_sampler.scribe import Scribe
from tinsmith_sampler.telling import telling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinsmith.bus import Delivery, Taken
    from tinsmith.config import Config, ModelConfig
    from tinsmith.errors import ServerError
    from tinsmith.messages.sampling import AdapterRef, Sample, SampleResult
    from tinsmith.service import ServiceContext
    from tinsmith_sampler.engine import Engine
    from tinsmith_sampler.model import TorchOptions
    from tinsmith_sampler.whole_models import WholeModels

POOL_WINDOW = 10_000  # requests of one base model in the hands of all of its samplers
ACK_WAIT_S = 15.0  # a dead sampler's requests go to another after this


class Sampler:
    """Serves one base model's queue with one engine, and one for each model trained whole."""

    def __init__(
        self, context: ServiceContext, engine: Engine, model: ModelConfig, wholes: WholeModels
    ) -> None:
        config = context.config.section(SamplerConfig)
        self._bus = context.bus
        self._blobs = context.blobs
        self._log = context.log
        self._engine = engine
        self._adapters = Residency(engine, config.max_adapters)
        self._wholes = wholes
        self._limits = Limits(
            vocab_size=engine.vocab_size,
            context_length=engine.context_length,
            max_samples=config.max_samples,
            max_topk=config.max_topk,
        )
        self._pool = ids.pool_token(model.name)
        self._in_hand = Cancellable()
        self._slots = asyncio.Semaphore(config.max_requests)
        self._instance = context.instance
        self._environment = engine.environment
        self._recorder = Recorder(context.bus.samples, context.seals.of, config.log, context.load)

    async def run(self) -> None:
        """Runs until cancelled; unfinished requests then go to another sampler."""
        worklist = self._bus.work(
            table.SAMPLES,
            f"pool-{self._pool}",
            window=POOL_WINDOW,
            ack_wait_s=ACK_WAIT_S,
            pool=self._pool,
            sampler="*",
            seq="*",
        )
        async with AsyncExitStack() as held, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._wholes.wait_failed(), name="whole models")
            held.push_async_callback(self._wholes.close)
            heard = await self._bus.listen(table.SAMPLE_CANCELLED, self._in_hand.cancel)
            held.push_async_callback(heard.close)
            deliveries = await held.enter_async_context(
                aclosing(worklist.deliveries(on_lost=self._fail))
            )
            while True:
                await self._slots.acquire()  # before asking: another sampler may be idle
                delivery = await anext(deliveries)
                name = f"sample {delivery.message.request_id}"
                task = tasks.create_task(self._serve(delivery), name=name)
                task.add_done_callback(lambda _: self._slots.release())

    async def _fail(self, taken: Taken[Sample], error: ServerError) -> None:
        """Answer a request whose contents are lost."""
        sampler, seq = taken.subject.split(".")[-2:]
        sampler_id = ids.of_token(sampler)
        request_id = ids.future_id(sampler_id, int(seq))
        failed = SampleFailed(request_id=request_id, failure=to_failed(error))
        await self._bus.results.put_first(sampler_id, int(seq), failed)
        await self._bus.emit(table.SAMPLE_READY, SampleReady(request_id=request_id))

    async def _serve(self, delivery: Delivery[Sample]) -> None:
        request = delivery.message
        try:
            digest = blake3(delivery.payload).hexdigest()
            result = await self._earlier(delivery) or await self._store(request, digest)
            await self._bus.emit(table.SAMPLE_READY, SampleReady(request_id=request.request_id))
            await self._recorder.write(request, digest, result)
        except asyncio.CancelledError:
            await delivery.give_back()
            raise
        except Exception:  # noqa: BLE001 - the next attempt draws the same answer
            self._log.exception("result not stored or logged", request_id=request.request_id)
            await delivery.give_back(delay_s=1.0)
            return
        await delivery.ack()

    async def _earlier(self, delivery: Delivery[Sample]) -> SampleResult | None:
        """What an earlier attempt has stored before it ended: only the rest is to be done."""
        if delivery.attempts == 1:
            return None
        request = delivery.message
        return await self._bus.results.get(request.sampler_id, request.seq)

    async def _store(self, request: Sample, digest: str) -> SampleResult:
        """Answer it; the result that is stored then, which may be an earlier one."""
        result: SampleResult = await self._result(request)
        if isinstance(result, SampleDone):
            origin = {"sampler": self._instance, "environment": self._environment}
            result = msgspec.structs.replace(result, request_blake3=digest, **origin)
        return await self._bus.results.put_first(request.sampler_id, request.seq, result)

    async def _result(self, request: Sample) -> SampleDone | SampleFailed:
        log = self._log.bind(request_id=request.request_id)
        try:
            try:
                return await self._answer(request)
            except VersionUnmet as exc:  # its memory was found wrong: begin anew, on proven bits
                log.warning("answer dropped", error=str(exc))
                return await self._answer(request)
        except Exception as exc:
            if isinstance(exc, UserError):
                log.info("request refused", error=str(exc))
            else:
                log.exception("request failed")
            return SampleFailed(request_id=request.request_id, failure=to_failed(exc))

    async def _answer(self, request: Sample) -> SampleDone:
        async with AsyncExitStack() as held:
            engine = await held.enter_async_context(self._with_weights(request.adapter))
            tell = await held.enter_async_context(telling(self._bus, request))
            work = answer(engine, request, self._limits, tell)
            return await self._in_hand.run(request.request_id, work)

    @asynccontextmanager
    async def _with_weights(self, weights: AdapterRef | None) -> AsyncIterator[Engine]:
        """The engine that has them, for as long as the block."""
        if weights is None:
            yield self._engine
        elif whole.holds_whole(weights.files):
            async with self._wholes.hold(weights) as engine:
                yield engine
        else:
            async with self._adapters.hold(weights.version, lambda: self._fetch(weights)):
                yield self._engine

    async def _fetch(self, adapter: AdapterRef) -> dict[str, bytes]:
        return {name: await self._blobs.get(ref) for name, ref in adapter.files.items()}


async def serve(context: ServiceContext) -> None:
    """Load the engine, announce it, answer until ``context.stopping``."""
    config = context.config.section(SamplerConfig)
    model = context.config.model(config.model)
    if whole.is_whole(model.name):
        raise ConfigError(
            f"sampler.model: {model.name!r} is sampled from beside {whole.base_of(model.name)!r}; "
            "start a sampler of that"
        )
    engine, options = await asyncio.to_thread(_engine, model, config)
    await engine.start()
    try:
        scribe = await asyncio.to_thread(Scribe, model.source, engine.context_length)
        async with scribe.serving(context.bus, ids.pool_token(model.name)):
            await _serve_until_stopped(context, engine, model, options)
    finally:
        await engine.close()


async def _serve_until_stopped(
    context: ServiceContext, engine: Engine, model: ModelConfig, options: TorchOptions
) -> None:
    await _announce(context, engine, model)
    async with _wholes(context, model, options) as wholes:
        await _run(context, engine, model, wholes)


@asynccontextmanager
async def _wholes(
    context: ServiceContext, model: ModelConfig, options: TorchOptions
) -> AsyncIterator[WholeModels]:
    """What serves models that were trained whole, where such are trained."""
    from tinsmith_sampler.whole_models import Lineages, WholeModels

    get, folder = context.blobs.get, context.config.data_dir
    if not model.full:
        yield WholeModels(options, get, limit=0, folder=folder)
        return
    limit, name = context.config.section(SamplerConfig).max_whole, f"{context.instance}-weights"
    async with Bus.connect(context.config.bus, name=name, blobs=context.blobs) as bus:
        lineages = Lineages(bus, context.instance, context.load)
        yield WholeModels(options, get, limit=limit, folder=folder, lineages=lineages)


async def _run(
    context: ServiceContext, engine: Engine, model: ModelConfig, wholes: WholeModels
) -> None:
    running = asyncio.create_task(Sampler(context, engine, model, wholes).run(), name="sampler")
    stopping = asyncio.create_task(context.stopping.wait(), name="stopping")
    engine_dead = asyncio.create_task(engine.wait_ended(), name="engine")
    await context.ready(base_models=(model.name,))
    waited_for = {running, stopping, engine_dead}
    await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
    for task in (running, engine_dead):
        if task.done():
            task.result()  # it failed: let the process say so, and be started anew
    for waiting in waited_for:
        waiting.cancel()
    await asyncio.gather(*waited_for, return_exceptions=True)


def _engine(model: ModelConfig, config: SamplerConfig) -> tuple[Engine, TorchOptions]:
    """The one place that chooses an engine. Imports torch, so it runs on a thread."""
    from tinsmith_sampler.model import TorchOptions, device_of
    from tinsmith_sampler.torch_engine import TorchEngine

    options = TorchOptions(
        model_path=model.source,
        dtype=model.dtype,
        device=device_of(config.device),
        threads=threads(config.threads),
        max_rows=config.max_rows,
        kv_tokens=config.cache_tokens,
        context_length=model.context_length,
        quantization=model.quantization,
    )
    return TorchEngine(options), options


async def _announce(context: ServiceContext, engine: Engine, model: ModelConfig) -> None:
    served = ServedModel(
        name=model.name,
        role="sampler",
        vocab_size=engine.vocab_size,
        context_length=engine.context_length,
        tokenizer_id=model.tokenizer,
    )
    await context.bus.table(table.SERVED).put(f"{ids.pool_token(model.name)}-sampler", served)


def main(config: Config) -> int:
    """Run the sampler; its exit code."""
    return run_service("sampler", serve, config)
