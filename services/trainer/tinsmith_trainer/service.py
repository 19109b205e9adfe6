"""The trainer process: takes models in, trains them, gives them up."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from tinsmith import ids, logs, whole
from tinsmith.bus import Bus
from tinsmith.errors import BrokerUnavailable, ConfigError, Fenced, Forgotten
from tinsmith.lifeline import EXIT_STARTUP
from tinsmith.messages import table
from tinsmith.messages.registry import ServedModel
from tinsmith.metrics import names as metrics
from tinsmith.service import run_service
from tinsmith_trainer.canary import Canary
from tinsmith_trainer.compute import Compute
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.crew import Crew, Orders, Others, follow
from tinsmith_trainer.executor import Executor
from tinsmith_trainer.holdings import Holdings
from tinsmith_trainer.loading import load
from tinsmith_trainer.ownership import Left, OwnedModel
from tinsmith_trainer.patience import Patience, PatientWriter
from tinsmith_trainer.recovery import Recovery
from tinsmith_trainer.seat import given
from tinsmith_trainer.shares import MOST_RANKS
from tinsmith_trainer.snapshots import SnapshotPolicy
from tinsmith_trainer.troubles import Troubles
from tinsmith_trainer.workload import tell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinsmith.config import Config, ModelConfig
    from tinsmith.messages.registry import Run, Session
    from tinsmith.service import ServiceContext
    from tinsmith_trainer.engine import TrainingEngine
    from tinsmith_trainer.holdings import Held
    from tinsmith_trainer.publishing import Publishing
    from tinsmith_trainer.recovery import Recovered
    from tinsmith_trainer.seat import Seat

PLACEMENT_WINDOW = 100_000  # models of one base model over all of its trainers


class Trainer:
    """Owns the models that the broker has placed here, up to a limit."""

    def __init__(
        self,
        context: ServiceContext,
        executor: Executor,
        compute: Compute,
        environment: dict[str, str],
    ) -> None:
        self._context = context
        self._bus = context.bus
        self._log = context.log
        self._config = context.config.section(TrainerConfig)
        self._executor = executor
        self._compute = compute
        self._environment = environment
        self._owned: dict[str, OwnedModel] = {}
        self._holding: dict[str, asyncio.Task[None]] = {}  # those that are being rebuilt too
        self._taking: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._over: set[str] = set()  # sessions that have ended, models that were unloaded
        self._troubles = Troubles()
        is_whole = whole.is_whole(environment["base_model"])
        self._holdings = Holdings(1 if is_whole else self._config.max_models, context.load)
        self._patience = Patience(context)

    def has(self, model_id: str) -> bool:
        """Whether the model is in its hands, and as its log says."""
        return model_id in self._owned

    def is_as_saved(self, model_id: str, op_seq: int | None) -> bool:
        """See ``Executor.is_as_saved``."""
        return self._executor.is_as_saved(model_id, op_seq)

    async def run(self) -> None:
        """Runs until cancelled, or until all models have been left."""
        # Outside of the group: models that are being given up still need the torch thread.
        computing = asyncio.create_task(self._compute.serve(), name="compute")
        telling = asyncio.create_task(tell(self._context, self._compute), name="tell")
        sessions = await self._bus.table(table.SESSIONS).watch(self._on_session)
        runs = await self._bus.table(table.RUNS).watch(self._on_run)
        try:
            async with asyncio.TaskGroup() as tasks:
                taking = tasks.create_task(self._take_models(tasks), name="take models")
                self._taking = taking
                try:
                    await asyncio.wait({taking})
                finally:  # before models are given back: they would be offered to this trainer
                    taking.cancel()
                    await asyncio.wait({taking})
        finally:
            await runs.close()
            await sessions.close()
            telling.cancel()
            computing.cancel()

    async def leave(self) -> None:
        """Take no more models, and hand over those that are here, each as soon as it is written.

        ``run`` ends then; who has no time to wait for that cancels it, and they go as they are.
        """
        self._is_leaving = True
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.wait({self._taking})
        self._log.info("leaving", models=len(self._holding), limit_s=self._config.drain_s)
        for model_id, holding in self._holding.items():
            if (owned := self._owned.get(model_id)) is not None:
                owned.leave()
            else:
                holding.cancel()

    async def _take_models(self, tasks: asyncio.TaskGroup) -> None:
        pool = ids.pool_token(self._environment["base_model"])
        placements = self._bus.work(
            table.PLACEMENTS,
            f"pool-{pool}",
            window=PLACEMENT_WINDOW,
            ack_wait_s=self._config.placement_timeout_s,
            pool=pool,
            model="*",
        )
        async with aclosing(placements.deliveries()) as deliveries:
            while True:
                await self._holdings.room()  # before asking: another trainer may have some
                held = self._holdings.take(await anext(deliveries))
                if held is not None:
                    self._begin(tasks, held)

    def _begin(self, tasks: asyncio.TaskGroup, held: Held) -> None:
        holding = tasks.create_task(self._hold(held), name=f"model {held.model_id}")
        self._holding[held.model_id] = holding
        holding.add_done_callback(lambda _: self._holding.pop(held.model_id, None))

    async def _hold(self, placement: Held) -> None:
        """Own one model from its placement to its end, whichever way it ends."""
        model_id = placement.model_id
        log = self._log.bind(model_id=model_id)
        try:
            await self._own(model_id)
        except Fenced as lost:
            metrics.LOST.labels("fenced").inc()
            log.warning("model lost to another trainer", error=str(lost))
            placement.let_go()
        except Forgotten as gone:
            metrics.LOST.labels("forgotten").inc()
            log.warning("model dropped for good", error=str(gone))
            await self._clear_queue(model_id)
            await placement.ack()
        except Left:
            metrics.LOST.labels("left").inc()
            log.info("model left to another trainer")
            await placement.give_back()
        except asyncio.CancelledError:
            await placement.give_back()
            raise
        except Exception as exc:  # one model's trouble must not end the others
            metrics.LOST.labels("failed").inc()
            log.exception("model dropped; it will be recovered from its log")
            await placement.give_back(delay_s=self._troubles.add(model_id, exc))
        else:
            self._troubles.forget(model_id)
            await placement.ack()
            log.info("model released")

    async def _own(self, model_id: str) -> None:
        if self._is_over(model_id) and not await self._is_asked(model_id):
            return
        log = self._log.bind(model_id=model_id)
        seal = await self._context.seals.of(model_id)
        if seal.why_closed is not None:
            raise seal.why_closed
        writer = await self._patience.until_written(
            lambda: self._bus.log.take(
                model_id, self._context.instance, self._environment, seal=seal
            )
        )
        began = asyncio.get_running_loop().time()
        try:
            recovery = Recovery(model_id, self._bus.log, seal, self._executor, log)
            recovered = await self._recovered(model_id, recovery)
            if recovered.next_seq and recovered.broken is None:
                await self._executor.take_over(model_id)
            owned = OwnedModel(
                model_id,
                bus=self._bus,
                writer=PatientWriter(writer, self._patience),
                executor=self._executor,
                recovered=recovered,
                snapshots=self._snapshot_policy(recovered.repeated, began),
                logger=log,
            )
            self._owned[model_id] = owned
            if self._is_over(model_id):
                owned.end()
            how = "new" if not recovered.next_seq else "broken" if recovered.broken else "recovered"
            metrics.TAKEN.labels(how).inc()
            log.info("model taken", epoch=writer.epoch, next_seq=recovered.next_seq)
            await owned.run()
            await self._executor.end_lineage(model_id)
        finally:
            self._owned.pop(model_id, None)
            if not self._is_leaving:  # else nobody needs its memory, and the next owner waits
                await asyncio.shield(self._executor.drop(model_id))

    async def _recovered(self, model_id: str, recovery: Recovery) -> Recovered:
        if (reason := self._troubles.why_give_up(model_id)) is None:
            with metrics.RECOVERY_SECONDS.time():
                recovered = await recovery.run()
        else:
            recovered = await recovery.give_up(reason)
        self._troubles.reached(model_id, recovered.next_seq)
        return recovered

    def _snapshot_policy(self, repeated: int, began: float) -> SnapshotPolicy:
        """After so many changes were repeated since ``began``."""
        clock = asyncio.get_running_loop().time
        return SnapshotPolicy(
            steps=self._config.snapshot_steps,
            seconds=self._config.snapshot_s,
            clock=clock,
            steps_before=repeated,
            seconds_before=clock() - began if repeated else 0.0,
        )

    def _is_over(self, model_id: str) -> bool:
        return not self._over.isdisjoint((model_id, ids.session_of(model_id)))

    async def _clear_queue(self, model_id: str) -> None:
        """Drop what is left for a forgotten model: it cannot be opened, its futures have failed."""
        try:
            await self._bus.withdraw(table.OPS, model=ids.token(model_id), seq="*")
        except BrokerUnavailable as error:  # it only takes room
            self._log.warning("queue not cleared", model_id=model_id, error=str(error))

    async def _is_asked(self, model_id: str) -> bool:
        return await self._bus.is_queued(table.OPS, model=ids.token(model_id), seq="*")

    def _on_session(self, key: str, session: Session | None) -> None:
        if session is not None and session.status == "active":
            return
        self._end(key)

    def _on_run(self, _: str, run: Run | None) -> None:
        if run is not None and run.unloaded_ns:
            self._end(run.model_id)

    def _end(self, session_or_model: str) -> None:
        self._over.add(session_or_model)
        for model_id, owned in self._owned.items():
            if self._is_over(model_id):
                owned.end()


async def serve(context: ServiceContext) -> None:
    """Load the base model, announce it, train until ``context.stopping``."""
    config = context.config.section(TrainerConfig)
    model = context.config.model(config.model)
    seat = given(os.environ)
    ranks = _ranks(config, seat)
    if ranks == 1:
        await _serve(context, *await asyncio.to_thread(load, model, config))
        return
    if config.mixing == "mixed":
        raise ConfigError(
            f"trainer.mixing: passes of {ranks} ranks are one model's each; set it to "
            '"auto" or "exact", or trainer.ranks to 1'
        )
    with Crew(model, config, context.config.logs) if seat is None else Others(seat) as crew:
        engine, environment = await asyncio.to_thread(load, model, config, crew.seat)
        crew.ready()
        await _serve(context, engine, environment)
        await asyncio.to_thread(crew.dismiss, engine)


def _ranks(config: TrainerConfig, seat: Seat | None) -> int:
    if seat is None:
        return config.ranks
    if config.ranks not in (1, seat.size):
        raise ConfigError(
            f"trainer.ranks: {config.ranks}, and torchrun has started {seat.size}; leave it out"
        )
    if seat.size > MOST_RANKS:
        raise ConfigError(f"WORLD_SIZE: {seat.size} ranks are more than {MOST_RANKS}; use fewer")
    return seat.size


async def _serve(
    context: ServiceContext, engine: TrainingEngine, environment: dict[str, str]
) -> None:
    config = context.config.section(TrainerConfig)
    model = context.config.model(config.model)
    compute = Compute(engine if _is_mixed(config, environment) else None)
    async with _publishing(context, model, config) as (publishing, keeping):
        executor = Executor(
            engine,
            compute,
            context.bus,
            context.blobs,
            base_model=model.name,
            patience_s=config.checkpointer_patience_s,
            base_blake3=environment["base_blake3"],
            publishing=publishing,
        )
        await _announce(context, engine)
        trainer = Trainer(context, executor, compute, environment)
        running = asyncio.create_task(trainer.run(), name="trainer")
        canary = Canary(context, engine, compute, trainer)
        comparing = asyncio.create_task(canary.run(), name="canary")
        stopping = asyncio.create_task(context.stopping.wait(), name="stopping")
        await context.ready(base_models=(model.name,))
        working = (running, comparing, *keeping)
        await asyncio.wait({stopping, *working}, return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()  # it failed: let the process say so
        context.is_taking = False
        comparing.cancel()
        try:
            await trainer.leave()
            await asyncio.wait({running}, timeout=config.drain_s)
        finally:  # a second signal does not wait
            running.cancel()
            await asyncio.gather(running, comparing, return_exceptions=True)
    await asyncio.to_thread(compute.close)  # a pass may take its time; what was told goes out


def _is_mixed(config: TrainerConfig, environment: dict[str, str]) -> bool:
    if config.mixing == "auto":
        return environment["ranks"] == "1" and not environment["device"].startswith("cpu")
    return config.mixing == "mixed"


@asynccontextmanager
async def _publishing(
    context: ServiceContext, model: ModelConfig, config: TrainerConfig
) -> AsyncIterator[tuple[Publishing | None, tuple[asyncio.Task[None], ...]]]:
    """Of a model that is trained whole, with what must run; adapters go as files.

    It has a connection of its own.
    """
    if not whole.is_whole(model.name):
        yield None, ()
        return
    from tinsmith_trainer.publishing import Publishing

    name = f"{context.instance}-weights"
    async with Bus.connect(context.config.bus, name=name, blobs=context.blobs) as bus:
        publishing = Publishing(
            bus, context.instance, context.load, patience_s=config.checkpointer_patience_s
        )
        keeping = asyncio.create_task(publishing.run(), name="publishing")
        try:
            yield publishing, (keeping,)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def _announce(context: ServiceContext, engine: TrainingEngine) -> None:
    info = engine.info
    served = ServedModel(
        name=info.name,
        role="trainer",
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        tokenizer_id=info.tokenizer_id,
        arch=info.arch,
        eos_tokens=info.eos_tokens,
    )
    key = f"{ids.pool_token(info.name)}-trainer"
    await context.bus.table(table.SERVED).put(key, served)


def main(config: Config) -> int:
    """Run the trainer, or another rank of one than the first; its exit code."""
    try:
        seat = given(os.environ)
    except ConfigError as error:
        logs.report("trainer", error)
        return EXIT_STARTUP
    if seat is None or seat.rank == 0:
        return run_service("trainer", serve, config)
    settings = config.section(TrainerConfig)
    return follow(Orders(seat, config.model(settings.model), settings, config.logs))
