"""A registry table: the last value of each key, kept by the broker, watched by services.

nats-py's key-value ``keys()`` and ``watchall()`` sometimes miss entries and ordered consumers
stay silent for many seconds after a restart of the server, so both are done here with a plain
pull consumer that starts from the last value per subject and is made anew when it is lost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

import structlog
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError

from tinsmith.bus.consumers import IDLE_CONSUMER_S, passing_name
from tinsmith.bus.pull import ConsumerGone, Pull
from tinsmith.bus.subscription import Subscription
from tinsmith.bus.wire import (
    ERR_WRONG_LAST_SEQUENCE,
    RETRY_PAUSE_S,
    TRANSIENT,
    Rejected,
    last,
    publish,
)
from tinsmith.errors import BrokerUnavailable
from tinsmith.messages.base import Message, encode
from tinsmith.messages.table import REGISTRY_STREAM

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

    from tinsmith.messages.table import Entity

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)

SNAPSHOT_BATCH = 500
_ERR_NO_MESSAGE = 10043  # erased by someone else meanwhile
DELETED = b""  # the value that stands for "no entry"


class Table(Generic[M]):
    """All entries of one kind."""

    def __init__(self, connection: tuple[Client, JetStreamContext], entity: Entity[M]) -> None:
        self._connection = connection
        self._client, self._js = connection
        self._entity = entity

    async def put(self, key: str, value: M) -> None:
        """Set ``key``; the last writer wins."""
        await publish(self._connection, self._entity.subject(id=key), encode(value))

    async def create(self, key: str, value: M) -> M:
        """Set ``key`` unless it exists; the entry that holds now, so callers can compare."""
        subject = self._entity.subject(id=key)
        headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
        try:
            await publish(self._connection, subject, encode(value), headers=headers)
        except Rejected as exc:
            if exc.code != ERR_WRONG_LAST_SEQUENCE:
                raise
            existing = await self.get(key)
            if existing is None:  # deleted before: a tombstone stands in the way
                await self.put(key, value)
                return value
            return existing
        return value

    async def update(self, key: str, change: Callable[[M | None], M | None]) -> M | None:
        """Set ``key`` to what ``change`` makes of the entry; the entry that holds now.

        ``change`` gets None when there is no entry, is called again when another writer came in
        between, and answers None to leave everything as it is.
        """
        subject = self._entity.subject(id=key)
        while True:
            found = await last(self._js, REGISTRY_STREAM, subject)
            data = b"" if found is None else found.data
            present = self._entity.messages.decode(data) if data else None
            if (wanted := change(present)) is None or wanted == present:
                return present
            follows = 0 if found is None else found.seq or 0
            headers = {"Nats-Expected-Last-Subject-Sequence": str(follows)}
            try:
                await publish(self._connection, subject, encode(wanted), headers=headers)
            except Rejected as exc:
                if exc.code != ERR_WRONG_LAST_SEQUENCE:
                    raise
                continue
            return wanted

    async def get(self, key: str) -> M | None:
        """The entry, read from the broker."""
        found = await last(self._js, REGISTRY_STREAM, self._entity.subject(id=key))
        if found is None or not found.data:
            return None
        return self._entity.messages.decode(found.data)

    async def delete(self, key: str) -> None:
        """Remove ``key``; watchers see None."""
        await publish(self._connection, self._entity.subject(id=key), DELETED)

    async def erase(self, key: str) -> None:
        """As ``delete``, and overwrite what the broker's disk has of it.

        Raises:
            BrokerUnavailable: the broker is away.
        """
        while (
            found := await last(self._js, REGISTRY_STREAM, self._entity.subject(id=key))
        ) is not None and found.data:
            try:
                # Without NoErase the broker writes random bytes over the message.
                await self._js.delete_msg(REGISTRY_STREAM, found.seq or 0)
            except APIError as exc:
                if exc.err_code != _ERR_NO_MESSAGE:
                    raise
            except TRANSIENT as exc:
                msg = f"the broker did not confirm that {key} was erased; try again"
                raise BrokerUnavailable(msg) from exc
        await self.delete(key)

    async def watch(self, on_change: Callable[[str, M | None], None]) -> Subscription:
        """Call ``on_change(key, value)`` for every entry, then for every change.

        Returns when all entries of this moment were delivered. After a loss of the broker
        everything is delivered again: ``on_change`` must be idempotent.
        """
        caught_up = asyncio.Event()
        task = asyncio.create_task(
            self._follow(on_change, caught_up), name=f"watch {self._entity.template}"
        )
        waiting = asyncio.create_task(caught_up.wait(), name="first snapshot")
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            waiting.cancel()
        if task.done():
            task.result()
        return Subscription.of_task(task)

    async def _follow(
        self, on_change: Callable[[str, M | None], None], caught_up: asyncio.Event
    ) -> None:
        while True:
            try:
                info = await self._js.add_consumer(REGISTRY_STREAM, self._consumer())
                if not info.num_pending:
                    caught_up.set()
                pull = Pull(self._client, REGISTRY_STREAM, info.name, batch=SNAPSHOT_BATCH)
                async for msg in pull.messages():
                    self._deliver(msg, on_change)
                    if msg.metadata.num_pending == 0:
                        caught_up.set()
            except ConsumerGone:
                continue
            except TRANSIENT as exc:
                if self._client.is_closed:  # nats-py makes an error of a cancellation then
                    return
                log.warning("watch interrupted", entity=self._entity.template, error=str(exc))
                await asyncio.sleep(RETRY_PAUSE_S * 5)

    def _consumer(self) -> ConsumerConfig:
        return ConsumerConfig(
            name=passing_name(),
            filter_subject=self._entity.wildcard,
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
            inactive_threshold=IDLE_CONSUMER_S,
        )

    def _deliver(self, msg: Msg, on_change: Callable[[str, M | None], None]) -> None:
        key = msg.subject.rpartition(".")[2]
        on_change(key, self._entity.messages.decode(msg.data) if msg.data else None)
