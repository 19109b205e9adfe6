"""The sampler process: takes requests, has its engine answer them, stores the answers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from tinsmith import ids, tracing, whole
from tinsmith.bus import Bus, Wish
from tinsmith.cores import threads
from tinsmith.errors import BlobMissing, Busy, ConfigError, UserError, VersionUnmet
from tinsmith.messages import table
from tinsmith.messages.failures import to_failed
from tinsmith.messages.registry import ServedModel
from tinsmith.messages.sampling import SampleDone, SampleFailed
from tinsmith.messages.services import SampleReady
from tinsmith.metrics import names as metrics
from tinsmith.service import run_service
from tinsmith_sampler import measuring
from tinsmith_sampler.answering import answer
from tinsmith_sampler.cancelling import Cancellable
from tinsmith_sampler.checks import Limits
from tinsmith_sampler.condition import Condition
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.declining import Declined
from tinsmith_sampler.neighbours import Neighbours
from tinsmith_sampler.picking import Picker
from tinsmith_sampler.recording import Recorder
from tinsmith_sampler.residency import Residency
from tinsmith_sampler.scribe import Scribe
from tinsmith_sampler.telling import telling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tinsmith.bus import Delivery, Taken
    from tinsmith.config import Config, ModelConfig
    from tinsmith.errors import ServerError
    from tinsmith.messages.sampling import AdapterRef, Sample, SampleResult
    from tinsmith.service import ServiceContext
    from tinsmith_sampler.engine import Engine
    from tinsmith_sampler.model import TorchOptions
    from tinsmith_sampler.whole_models import WholeModels

WINDOW = 10_000  # requests of one share in the hands of all samplers
ACK_WAIT_S = 15.0  # a dead sampler's requests go to another after this


class _GiveBack(Exception):
    """Another sampler may be able to answer a request."""


class Sampler:
    """Serves one base model's queue with one engine, and one for each model trained whole."""

    def __init__(
        self, context: ServiceContext, engine: Engine, model: ModelConfig, wholes: WholeModels
    ) -> None:
        self._config = config = context.config.section(SamplerConfig)
        self._context = context
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
        self._running: dict[asyncio.Task[None], int] = {}  # rows of each, the oldest first
        self._condition = Condition()
        self._declined = Declined()
        self._neighbours = Neighbours(context.instance, model.name, config.pool)
        self._instance = context.instance
        self._environment = engine.environment
        self._recorder = Recorder(context.bus.samples, context.seals.of, config.log, context.load)
        self._picker = Picker(context.bus, model.name, config.canary_share)
        self._work = context.bus.shared_work(
            table.SAMPLES,
            f"pool-{self._pool}",
            self._wish,
            window=WINDOW,
            ack_wait_s=ACK_WAIT_S,
            pool=self._pool,
            sampler="*",
            seq="*",
        )

    async def run(self) -> None:
        """Runs until ``stop`` or cancellation; unfinished requests then go to other samplers."""
        async with AsyncExitStack() as held, asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(self._wholes.wait_failed(), name="whole models")
            held.push_async_callback(self._wholes.close)
            for subscription in (
                await self._bus.listen(table.SAMPLE_CANCELLED, self._in_hand.cancel),
                await self._bus.listen(table.SERVICE_ALIVE, self._neighbours.heard),
                await self._bus.table(table.SERVED).watch(self._neighbours.announced),
            ):
                held.push_async_callback(subscription.close)
            await held.enter_async_context(self._work.kept_alive())
            async with aclosing(self._work.taken()) as taken:
                async for one in taken:
                    task = tasks.create_task(self._serve(one), name=f"sample {one.subject}")
                    self._running[task] = 1
                    task.add_done_callback(self._finished)
            await self._drain()
            failing.cancel()

    def stop(self) -> None:
        """Take no more; ``run`` ends when what is worth finishing is finished."""
        self._work.stop()

    def _wish(self) -> Wish:
        """What is wanted of the work now: own shares first, and less while there is no free row."""
        load, running = self._engine.load(), len(self._running)
        is_busy = load.free_rows <= 0 or load.queued > 0 or running >= self._config.max_rows
        room = self._config.max_requests - running
        if self._neighbours.are_there():
            room = self._condition.room(room, running)
        priorities = self._neighbours.priorities(is_busy=is_busy)
        return Wish(room, self._declined.without(priorities))

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._work.wish_changed()

    async def _drain(self) -> None:
        """Go on with as many rows as are drawn at a time; give back what is behind them."""
        rows = 0
        for task, wanted in tuple(self._running.items()):
            if rows >= self._config.max_rows:
                task.cancel()
            rows += wanted
        if self._running:
            self._log.info("finishing", requests=len(self._running), limit_s=self._config.drain_s)
            await asyncio.wait(tuple(self._running), timeout=self._config.drain_s)
        for task in self._running:
            task.cancel()

    async def _fail(self, taken: Taken[Sample], error: ServerError) -> None:
        """Answer a request whose contents are lost."""
        sampler, seq = taken.subject.split(".")[-2:]
        sampler_id = ids.of_token(sampler)
        request_id = ids.future_id(sampler_id, int(seq))
        failed = SampleFailed(request_id=request_id, failure=to_failed(error))
        await self._bus.results.put_first(sampler_id, int(seq), failed)
        await self._bus.emit(table.SAMPLE_READY, SampleReady(request_id=request_id))

    async def _serve(self, taken: Taken[Sample]) -> None:
        try:
            if self._declined.has(taken) and self._may_give_back(taken):
                await self._decline(taken)
            elif (delivery := await self._work.opened(taken, self._fail)) is not None:
                await self._answer_once(delivery)
        except _GiveBack:
            await self._decline(taken)
        except asyncio.CancelledError:
            await taken.give_back()
            raise
        except Exception:  # noqa: BLE001 - the next attempt draws the same answer
            self._log.exception("result not stored or logged", subject=taken.subject)
            await taken.give_back(delay_s=1.0)

    async def _answer_once(self, delivery: Delivery[Sample]) -> None:
        request = delivery.message
        if (task := asyncio.current_task()) is not None:
            self._running[task] = request.num_samples
        digest = blake3(delivery.payload).hexdigest()
        about = {"request_id": request.request_id}
        with (
            tracing.span("sampler.answer", parent=delivery.traceparent, **about),
            metrics.SAMPLE_SECONDS.time(),
        ):
            result = await self._earlier(delivery) or await self._store(delivery, digest)
        self._log.debug("sample done", outcome=measuring.ended(result), **about)
        await self._bus.emit(table.SAMPLE_READY, SampleReady(request_id=request.request_id))
        await self._recorder.write(request, digest, result)
        await delivery.ack()
        await self._picker.pick(request, digest, result)

    async def _decline(self, taken: Taken[Sample]) -> None:
        """Back to the queue, for others: it is not asked for here for a while."""
        await taken.give_back(delay_s=self._declined.add(taken))

    def _may_give_back(self, taken: Taken[Sample]) -> bool:
        return self._declined.allows(taken) and self._neighbours.are_there()

    async def _earlier(self, delivery: Delivery[Sample]) -> SampleResult | None:
        """What an earlier attempt has stored before it ended: only the rest is to be done."""
        if delivery.attempts == 1:
            return None
        request = delivery.message
        return await self._bus.results.get(request.sampler_id, request.seq)

    async def _store(self, delivery: Delivery[Sample], digest: str) -> SampleResult:
        """Answer it; the result that is stored then, which may be an earlier one.

        Raises _GiveBack when it failed here, and another may do better.
        """
        request = delivery.message
        try:
            result: SampleResult = await self._result(request)
        except UserError as exc:
            self._log.info("request refused", request_id=request.request_id, error=str(exc))
            result = SampleFailed(request_id=request.request_id, failure=to_failed(exc))
        except Exception as exc:
            if not isinstance(exc, BlobMissing) and self._may_give_back(delivery):
                said = {"error": repr(exc), "attempt": delivery.attempts}
                self._log.warning("request given back", request_id=request.request_id, **said)
                raise _GiveBack from exc
            self._log.exception("request failed", request_id=request.request_id)
            result = SampleFailed(request_id=request.request_id, failure=to_failed(exc))
        if isinstance(result, SampleDone):
            origin = {"sampler": self._instance, "environment": self._environment}
            result = msgspec.structs.replace(result, request_blake3=digest, **origin)
        return await self._bus.results.put_first(request.sampler_id, request.seq, result)

    async def _result(self, request: Sample) -> SampleDone:
        try:
            return await self._answer(request)
        except VersionUnmet as exc:  # its memory was found wrong: begin anew, on proven bits
            self._log.warning("answer dropped", request_id=request.request_id, error=str(exc))
            return await self._answer(request)

    async def _answer(self, request: Sample) -> SampleDone:
        async with AsyncExitStack() as held:
            engine = await held.enter_async_context(self._with_weights(request.adapter))
            tell = await held.enter_async_context(telling(self._bus, request))
            work = answer(engine, request, self._limits, tell)
            with self._judged():
                return await self._in_hand.run(request.request_id, work)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """What happens in the block tells of the engine's condition."""
        try:
            yield
            self._condition.answered()
        except (UserError, Busy):
            raise
        except Exception as exc:
            self._condition.failed(exc)
            raise
        finally:
            self._context.trouble = self._condition.trouble
            is_stopping = self._context.stopping.is_set()
            self._context.is_taking = not (self._context.trouble or is_stopping)

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
    engine, options = await asyncio.to_thread(_engine, context, model, config)
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
    from tinsmith_sampler.whole_models import Lineages, WholeModels, new_engines

    get, folder = context.blobs.get, context.config.data_dir
    if not model.full:
        yield WholeModels(options, get, limit=0, folder=folder)
        return
    config, name = context.config.section(SamplerConfig), f"{context.instance}-weights"
    async with Bus.connect(context.config.bus, name=name, blobs=context.blobs) as bus:
        lineages = Lineages(bus, context.instance, context.load)
        context.health.checks.append(lineages.standing.readiness)
        new = await asyncio.to_thread(new_engines, model, config, folder)
        yield WholeModels(
            options, get, limit=config.max_whole, folder=folder, lineages=lineages, new_engine=new
        )


async def _run(
    context: ServiceContext, engine: Engine, model: ModelConfig, wholes: WholeModels
) -> None:
    sampler = Sampler(context, engine, model, wholes)
    running = asyncio.create_task(sampler.run(), name="sampler")
    stopping = asyncio.create_task(context.stopping.wait(), name="stopping")
    engine_dead = asyncio.create_task(engine.wait_ended(), name="engine")
    measuring.watch(engine)
    await context.ready(base_models=(model.name,))
    waited_for = {running, stopping, engine_dead}
    await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
    if context.stopping.is_set():
        context.is_taking = False
        await context.tell()  # others prefer its shares from now on
        sampler.stop()
        await asyncio.wait({running, engine_dead}, return_when=asyncio.FIRST_COMPLETED)
    for task in (running, engine_dead):
        if task.done():
            task.result()  # it failed: let the process say so, and be started anew
    for waiting in waited_for:
        waiting.cancel()
    await asyncio.gather(*waited_for, return_exceptions=True)


def _engine(
    context: ServiceContext, model: ModelConfig, config: SamplerConfig
) -> tuple[Engine, TorchOptions]:
    """The one place that chooses an engine. Imports torch, so it runs on a thread."""
    from tinsmith_sampler.model import TorchOptions, device_of

    options = TorchOptions(
        model_path=model.source,
        dtype=model.dtype,
        device=device_of(config.device),
        threads=threads(config.threads),
        max_rows=config.max_rows,
        kv_tokens=config.cache_tokens,
        context_length=model.context_length,
        max_lora_rank=config.max_lora_rank,
        quantization=model.quantization,
    )
    if config.engine == "sglang":
        from tinsmith_sampler.sglang.assembly import sglang_engine

        return sglang_engine(model, config, context.config.data_dir, context.load), options
    from tinsmith_sampler.torch_engine import TorchEngine

    return TorchEngine(options), options


async def _announce(context: ServiceContext, engine: Engine, model: ModelConfig) -> None:
    context.pool = context.config.section(SamplerConfig).pool
    context.labels = dict(zip(("engine", "device", "dtype"), engine.plane.split("/"), strict=False))
    served = ServedModel(
        name=model.name,
        role="sampler",
        vocab_size=engine.vocab_size,
        context_length=engine.context_length,
        tokenizer_id=model.tokenizer,
        pool=context.pool,
        labels=context.labels,
    )
    key = "-".join(filter(None, (ids.pool_token(model.name), "sampler", context.pool)))
    await context.bus.table(table.SERVED).put(key, served)


def main(config: Config) -> int:
    """Run the sampler; its exit code."""
    return run_service("sampler", serve, config)
