"""The frame that every service runs in: signals, the bus, readiness, liveness, exit codes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import msgspec
import structlog
import uvloop

from tinsmith import __version__, lifeline, logs, tracing
from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus
from tinsmith.errors import BrokerUnavailable, TinsmithError
from tinsmith.health import Health, Readiness
from tinsmith.lifeline import EXIT_BROKER_LOST, EXIT_FAILED, EXIT_OK, EXIT_STARTUP
from tinsmith.messages.services import QueuePlace, ServiceAlive, ServiceName
from tinsmith.messages.table import SERVICE_ALIVE
from tinsmith.metrics import names as metrics
from tinsmith.metrics.config import MetricsConfig
from tinsmith.metrics.exposition import Exposition
from tinsmith.metrics.pages import telling
from tinsmith.paths import DataDir
from tinsmith.sealing import Seals
from tinsmith.tracing.config import TracingConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from tinsmith.config import Config

ALIVE_INTERVAL_S = 2.0
ABANDON_S = 2.0  # how long a start that was called off may take to clean up


@dataclass(kw_only=True)
class ServiceContext:
    """What a service's main coroutine is given."""

    name: ServiceName
    config: Config
    bus: Bus
    blobs: BlobStore
    seals: Seals
    instance: str
    """Unique to this process; a legal subject token."""
    stopping: asyncio.Event
    """Set by SIGTERM and SIGINT: stop taking work, finish what is begun, return."""
    log: structlog.stdlib.BoundLogger
    load: dict[str, float] = field(default_factory=dict)
    """Figures that the next liveness ping carries."""
    trouble: str = ""
    """Why it cannot get on for now, in words for its clients; the next ping carries it."""
    places: dict[str, QueuePlace] = field(default_factory=dict)
    """Which models wait for a turn; the next ping carries it."""
    pool: str = ""
    """Label of a sampler's like; see ``tinsmith.pools``."""
    labels: dict[str, str] = field(default_factory=dict)
    """What a sampler is: engine, dtype, device."""
    is_taking: bool = True
    """Whether it takes new work; the next ping carries it."""
    alive: ServiceAlive | None = None
    """The last liveness ping; None until the service is ready."""
    health: Health = field(default_factory=Health)
    """Whether it can do its work; its parts add their checks."""
    exposition: Exposition = field(init=False)
    """Its metrics; an engine that has some of its own adds a collector."""
    metrics_url: str = ""
    """Where its metrics and its health are told."""

    def __post_init__(self) -> None:
        """The metrics of the service it is."""
        self.exposition = Exposition(self.name)

    async def ready(self, *, base_models: tuple[str, ...] = (), url: str = "") -> None:
        """Say that the service does its work from now on: to the bus, the log and the parent.

        ``url`` is where clients reach it, for a service that listens.
        """
        self.alive = ServiceAlive(
            service=self.name,
            instance=self.instance,
            version=__version__,
            base_models=base_models,
            load=self.load,
            pool=self.pool,
            labels=self.labels,
            metrics_url=self.metrics_url,
        )
        self.exposition.base_model = base_models[0] if len(base_models) == 1 else ""
        await self.bus.emit(SERVICE_ALIVE, self.alive)
        told = {"base_models": base_models, "url": url, "metrics_url": self.metrics_url}
        self.log.info("ready", **{key: value for key, value in told.items() if value})
        lifeline.tell_ready({"service": self.name, **told})

    async def tell(self) -> None:
        """How it is now, to the bus, if it is ready."""
        if self.alive is not None:
            alive = msgspec.structs.replace(
                self.alive, trouble=self.trouble, places=self.places, is_taking=self.is_taking
            )
            await self.bus.emit(SERVICE_ALIVE, alive)


class _Stop:
    """SIGTERM and SIGINT: the first asks, the second cancels.

    Before the service is ready nothing is begun that would have to be finished, so the first
    cancels; a thread that loads a model cannot be cancelled, and is not waited for.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.event = asyncio.Event()
        self._is_ready = is_ready
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self._is_ready():
            self._loop.call_later(ABANDON_S, os._exit, EXIT_OK)
        if self._task is not None and (self.event.is_set() or not self._is_ready()):
            self._task.cancel()
        self.event.set()


def run_service(
    name: ServiceName, main: Callable[[ServiceContext], Awaitable[None]], config: Config
) -> int:
    """Run one service until it is told to stop; returns the process's exit code."""
    lifeline.tie_to_parent()
    instance = f"{name}-{secrets.token_hex(4)}"
    logs.configure(config.logs, service=name, instance=instance)
    frame = _Frame(name, config, instance)
    try:
        uvloop.run(frame.run(main))
    except asyncio.CancelledError:
        return EXIT_FAILED if frame.was_ready else EXIT_OK
    except Exception as error:  # noqa: BLE001 - the process's border; every kind has its exit code
        return frame.exit_code(_first_leaf(error))
    return EXIT_OK


class _Frame:
    """One run of a service."""

    def __init__(self, name: ServiceName, config: Config, instance: str) -> None:
        self._name = name
        self._config = config
        self._instance = instance
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger("tinsmith.service")
        self._context: ServiceContext | None = None
        self._is_broker_lost = False

    @property
    def was_ready(self) -> bool:
        return self._context is not None and self._context.alive is not None

    async def run(self, main: Callable[[ServiceContext], Awaitable[None]]) -> None:
        stop = _Stop(lambda: self.was_ready)
        folder = DataDir(self._config.data_dir)
        folder.check()
        blobs = BlobStore.configured(self._config.blobs, default=folder.blobs)
        tracer = tracing.serving(
            self._config.section(TracingConfig), service=self._name, instance=self._instance
        )
        async with (
            tracer,
            Bus.connect(self._config.bus, name=self._instance, blobs=blobs) as bus,
        ):
            await bus.ensure()
            async with Seals.serving(bus, self._config) as seals:
                self._context = context = ServiceContext(
                    name=self._name,
                    config=self._config,
                    bus=bus,
                    blobs=blobs,
                    seals=seals,
                    instance=self._instance,
                    stopping=stop.event,
                    log=self._log,
                )
                try:
                    await _watched(context, main)
                except BaseException:
                    # Asked here because leaving the blocks closes the connection anyway.
                    self._is_broker_lost = bus.closed.is_set()
                    raise
        if not stop.event.is_set():
            msg = f"{self._name} ended although nobody told it to stop"
            raise RuntimeError(msg)
        self._log.info("stopped")

    def exit_code(self, error: BaseException) -> int:
        """Report ``error`` where its reader looks: standard error or the log."""
        if self._is_broker_lost:
            self._log.error("broker lost", error=str(error))
            return EXIT_BROKER_LOST
        if isinstance(error, TinsmithError) and not self.was_ready:
            logs.report(self._name, error)
            return EXIT_STARTUP
        self._log.error("failed", exc_info=error)
        return EXIT_FAILED


async def _watched(
    context: ServiceContext, main: Callable[[ServiceContext], Awaitable[None]]
) -> None:
    """Run ``main``; meanwhile its metrics and its health are told, and it is pinged for."""
    metrics.INFO.labels(__version__, context.instance).set(1)
    metrics.BUS_CONNECTED.set_function(lambda: context.bus.is_connected)
    context.health.checks.append(lambda: _readiness(context))
    config = context.config.section(MetricsConfig)
    async with telling(config, context.exposition, context.health) as context.metrics_url:
        await _beside(main(context), ping=_ping(context), watch=_watch(context.bus))


def _readiness(context: ServiceContext) -> Readiness:
    """What every service needs."""
    reasons = {
        "the message broker cannot be reached; is NATS running?": not context.bus.is_connected,
        "it is still starting": context.alive is None,
        "it is stopping": context.stopping.is_set(),
        context.trouble: bool(context.trouble),
    }
    return Readiness(missing=tuple(reason for reason, is_so in reasons.items() if is_so))


async def _beside(main: Awaitable[None], **others: Coroutine[None, None, None]) -> None:
    """Await ``main`` while the others run; the first failure of any ends all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(other, name=name) for name, other in others.items()]
        await main
        for task in tasks:
            task.cancel()


async def _ping(context: ServiceContext) -> None:
    while True:
        await asyncio.sleep(ALIVE_INTERVAL_S)
        await context.tell()


async def _watch(bus: Bus) -> NoReturn:
    await bus.closed.wait()
    msg = "the connection to NATS was closed for good; see the bus errors above"
    raise BrokerUnavailable(msg)


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
