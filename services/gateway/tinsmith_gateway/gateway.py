"""One gateway: its parts, put together, and what they do in the background."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from tinsmith.messages.table import SERVICE_ALIVE, SESSION_ALIVE
from tinsmith_gateway import figures
from tinsmith_gateway.abandoned import Abandoned
from tinsmith_gateway.auth import Keyring
from tinsmith_gateway.completions import Completions
from tinsmith_gateway.dashboard.desk import Desk as Dashboard
from tinsmith_gateway.futures import Futures
from tinsmith_gateway.holding import Holding
from tinsmith_gateway.limits import Limits
from tinsmith_gateway.liveness import Hearing, Services
from tinsmith_gateway.models import Models
from tinsmith_gateway.openai.desk import Desk
from tinsmith_gateway.registry import Registry
from tinsmith_gateway.routing import Routing
from tinsmith_gateway.sessions import Sessions
from tinsmith_gateway.signing import Signer
from tinsmith_gateway.tokens import Tokens
from tinsmith_gateway.unfinished import Unfinished
from tinsmith_gateway.waiters import wait_for
from tinsmith_gateway.whereabouts import Whereabouts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.bus import Bus
    from tinsmith.messages.services import SessionAlive
    from tinsmith.sealing import Seals
    from tinsmith_gateway.config import GatewayConfig

TICK_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """Everything that a request needs; nothing in here is lost with the process."""

    config: GatewayConfig
    bus: Bus
    seals: Seals
    keys: Keyring
    hearing: Hearing
    services: Services
    registry: Registry
    models: Models
    sessions: Sessions
    futures: Futures
    completions: Completions
    signer: Signer
    tokens: Tokens | None  # None: clients present their keys
    unfinished: Unfinished
    routing: Routing
    holding: Holding
    abandoned: Abandoned
    openai: Desk
    dashboard: Dashboard
    _subscriptions: AsyncExitStack = field(default_factory=AsyncExitStack)

    @classmethod
    def build(
        cls, config: GatewayConfig, bus: Bus, api_keys: Iterable[str], seals: Seals
    ) -> Gateway:
        """The parts, connected; ``start`` brings them to life."""
        hearing = Hearing()
        services = Services(hearing)
        registry = Registry(bus)
        models = Models(registry.served)
        sessions = Sessions(bus, registry.sessions, hearing, timeout_s=config.session_timeout_s)
        unfinished = Unfinished(bus, registry, Limits(config, registry.api_keys))
        routing = Routing(config.pools, registry)
        tokens = Tokens(bus, config.token_lifetime_s) if config.exchange_keys else None
        return cls(
            config=config,
            bus=bus,
            seals=seals,
            keys=Keyring(api_keys, registry.api_keys, tokens, is_open=config.open_mode),
            hearing=hearing,
            services=services,
            registry=registry,
            models=models,
            sessions=sessions,
            futures=Futures(
                bus, Whereabouts(bus, registry, models, seals), services, unfinished, config
            ),
            completions=Completions(bus, config),
            signer=Signer(bus),
            tokens=tokens,
            unfinished=unfinished,
            routing=routing,
            holding=Holding(bus, unfinished, routing),
            abandoned=Abandoned(bus, registry, models, sessions, unfinished),
            openai=Desk(bus, registry, sessions),
            dashboard=Dashboard(bus, registry, seals, config.operators),
        )

    async def start(self) -> None:
        """Fills the views and listens; the gateway can answer afterwards."""
        for subscription in (
            await self.bus.listen(SERVICE_ALIVE, self.services.heard),
            await self.bus.listen(SESSION_ALIVE, self._on_session_alive),
        ):
            self._subscriptions.push_async_callback(subscription.close)
        await self.registry.start()
        await self.dashboard.watching.start()
        if self.tokens is not None:
            await self.tokens.start()
        await self.unfinished.start()
        await self.futures.start()
        await self.completions.start()
        await self.openai.start()

    async def close(self) -> None:
        """The opposite of ``start``."""
        await self.openai.close()
        await self.completions.close()
        await self.futures.close()
        await self.unfinished.close()
        await self.dashboard.watching.close()
        await self.registry.close()
        await self._subscriptions.aclose()

    async def keep_watch(self, stopping: asyncio.Event) -> None:
        """What is to be done beside requests, until ``stopping``; then lets held polls go."""
        async with asyncio.TaskGroup() as tasks:
            beside = (
                tasks.create_task(self.holding.run(), name="let samples go"),
                tasks.create_task(self.abandoned.run(), name="cancel the abandoned"),
                tasks.create_task(figures.keep(self), name="figures"),
            )
            while not stopping.is_set():
                self.hearing.tick(is_connected=self.bus.is_connected)
                await self.sessions.expire_silent()
                await wait_for(stopping, TICK_S)
            for task in beside:
                task.cancel()
        self.futures.release()
        self.completions.release()

    def _on_session_alive(self, alive: SessionAlive) -> None:
        self.sessions.touch(alive.session_id)


GATEWAY = web.AppKey("gateway", Gateway)
