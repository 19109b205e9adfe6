"""Which blobs the broker's messages refer to by claims, and how much its streams hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinsmith.bus.claims import HEADER
from tinsmith.bus.history import kept
from tinsmith.bus.wire import TRANSIENT, following
from tinsmith.errors import BrokerUnavailable
from tinsmith.messages import table

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nats.aio.client import Client
    from nats.js import JetStreamContext

_RESULTS = (table.RESULT_STREAM, table.RESULT_TEMPLATE.wildcard)
_SAMPLES = (table.SAMPLE_LOG_STREAM, table.SAMPLE_LOG_TEMPLATE.wildcard)
_QUEUES = tuple(
    (queue.stream, queue.wildcard)
    # As work moves, so that what moves meanwhile is met: held samples become queued ones.
    for queue in sorted(table.QUEUES, key=lambda queue: queue is not table.HELD)
)


class Held(NamedTuple):
    """What a stream has."""

    stream: str
    messages: int
    size: int  # bytes on disk


class Claims:
    """Read anew at every call; the logs of runs have their references in their entries."""

    def __init__(self, connection: tuple[Client, JetStreamContext]) -> None:
        self._connection = connection
        self._js = connection[1]

    async def in_flight(self) -> AsyncIterator[str]:
        """Digests of what waits on queues or is in hand, then of results that can be read.

        Raises:
            BrokerUnavailable: no answer.
        """
        for stream, subject in _QUEUES:
            after = 0
            # One by one: a queue that is worked on takes no second reader.
            while found := await following(self._js, stream, subject, after):
                after = found.seq or 0
                if claim := (found.headers or {}).get(HEADER):
                    yield _digest(claim)
        async for digest in self._in(*_RESULTS):
            yield digest

    async def of_samples(self) -> AsyncIterator[str]:
        """Digests of the records in the log of samples. Raises BrokerUnavailable: no answer."""
        async for digest in self._in(*_SAMPLES):
            yield digest

    async def _in(self, stream: str, subject: str) -> AsyncIterator[str]:
        async for msg in kept(self._connection, stream, subject, headers_only=True):
            if claim := (msg.headers or {}).get(HEADER):
                yield _digest(claim)

    async def streams(self) -> list[Held]:
        """What each stream of ours holds. Raises BrokerUnavailable: no answer."""
        try:
            infos = [await self._js.stream_info(name) for name in table.STREAMS]
        except TRANSIENT as exc:
            msg = f"the broker did not tell what its streams hold ({type(exc).__name__})"
            raise BrokerUnavailable(msg) from exc
        return [
            Held(info.config.name or "", info.state.messages, info.state.bytes) for info in infos
        ]


def _digest(claim: str) -> str:
    return claim.partition(":")[0]
