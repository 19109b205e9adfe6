"""The figures that a gateway keeps of the whole server: what waits, and who is there.

Every gateway tells the same ones, as each counts what all of them take in.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from tinsmith.errors import BrokerUnavailable
from tinsmith.messages.table import HELD, OPS, SAMPLES
from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from tinsmith_gateway.gateway import Gateway

log = structlog.get_logger(__name__)

LOOK_S = 10.0


async def keep(gateway: Gateway) -> None:
    """Keep them up to date until cancelled."""
    metrics.POLLS_HELD.set_function(lambda: len(gateway.futures.waiters))
    while True:
        _count(gateway)
        await _look(gateway)
        await asyncio.sleep(LOOK_S)


def _count(gateway: Gateway) -> None:
    for kind, count in gateway.unfinished.counts().items():
        metrics.UNFINISHED.labels(kind).set(count)
    active = sum(session.status == "active" for session in gateway.registry.sessions)
    metrics.SESSIONS.set(active)
    for served in gateway.registry.served:
        alive = gateway.services.serving(served.role, served.name, gateway.config.service_stale_s)
        metrics.WORKERS.labels(served.role, served.name).set(len(alive))


async def _look(gateway: Gateway) -> None:
    for queue in (OPS, SAMPLES, HELD):
        try:
            depth = await gateway.bus.depth(queue)
        except BrokerUnavailable as error:
            log.debug("queue not looked at", stream=queue.stream, error=str(error))
            return
        metrics.QUEUE_MESSAGES.labels(queue.stream).set(depth.messages)
        metrics.QUEUE_BYTES.labels(queue.stream).set(depth.size)
        metrics.QUEUE_OLDEST_SECONDS.labels(queue.stream).set(depth.oldest_s)
