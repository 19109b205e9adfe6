"""The pull loop: how a service takes work from a stream without ever hanging or losing any.

One outstanding pull with an idle heartbeat. Two missed heartbeats mean that the server or the
pull is gone, and the loop asks again; nats-py's ``fetch`` can hang for its whole timeout then.
Taken messages are kept in progress by a timer until they are acknowledged, however long the
work on them takes.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import nats.errors
import structlog
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import BadRequestError, NotFoundError

from tinsmith.bus.claims import resolve
from tinsmith.bus.wire import RETRY_PAUSE_S, TRANSIENT
from tinsmith.errors import Fenced, ServerError
from tinsmith.messages.base import BlobRef, Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

    from tinsmith.blobs import BlobStore
    from tinsmith.messages.table import Queue

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)

EXPIRES_S = 30.0
HEARTBEAT_S = 1.0
MISSED_HEARTBEATS = 2.5
POSTPONE_S = 2.0

_ERR_SUPERSEDED = {10099, 10100}  # a work queue has one consumer per subject


class ConsumerGone(Exception):
    """The durable consumer was deleted, or its stream was."""


class Pull:
    """Raw messages of one consumer, asked for in batches, for as long as it exists."""

    def __init__(self, client: Client, stream: str, consumer: str, *, batch: int) -> None:
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._batch = batch
        self._inbox = client.new_inbox()

    async def messages(self) -> AsyncIterator[Msg]:
        """Yields until cancelled.

        Raises:
            ConsumerGone: the consumer does not exist (any more).
        """
        # Unlimited pending bytes: a slow taker must never make the client drop work silently.
        sub = await self._client.subscribe(self._inbox, pending_bytes_limit=0)
        try:
            left = 0
            while True:
                if left <= 0:
                    left = await self._ask()
                try:
                    msg = await sub.next_msg(timeout=HEARTBEAT_S * MISSED_HEARTBEATS)
                except nats.errors.TimeoutError:
                    left = 0
                    continue
                if not (msg.headers and "Status" in msg.headers):
                    left -= 1
                    yield msg
                else:
                    left = await self._after_status(msg, left)
        finally:
            with contextlib.suppress(*TRANSIENT):
                await sub.unsubscribe()

    async def _ask(self) -> int:
        request = {
            "batch": self._batch,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        try:
            await self._client.publish(
                self._subject, msgspec.json.encode(request), reply=self._inbox
            )
        except TRANSIENT:
            await asyncio.sleep(RETRY_PAUSE_S)  # reconnecting; the next try asks again
            return 0
        return self._batch

    async def _after_status(self, msg: Msg, left: int) -> int:
        headers = msg.headers or {}
        status, description = headers.get("Status", ""), headers.get("Description", "")
        if status == "100":  # idle heartbeat
            return left
        if status == "409" and "Deleted" in description:
            raise ConsumerGone(description)
        if status == "503":  # JetStream not ready, or no such consumer
            await asyncio.sleep(RETRY_PAUSE_S)
            raise ConsumerGone(description or "no responder")
        if status not in ("404", "408"):
            await asyncio.sleep(RETRY_PAUSE_S)
        return 0


class Heart:
    """Keeps taken messages in progress until they are finished."""

    def __init__(self) -> None:
        self._taken: dict[str, Msg] = {}  # by reply subject: unique to one delivery

    def add(self, msg: Msg) -> None:
        """Start to keep ``msg`` alive."""
        self._taken[msg.reply] = msg

    def remove(self, msg: Msg) -> None:
        """Stop; it was acknowledged, given back, or its pull has ended."""
        self._taken.pop(msg.reply, None)

    async def beat(self, interval_s: float) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            for msg in list(self._taken.values()):
                with contextlib.suppress(*TRANSIENT):  # late is harmless: work is idempotent
                    await msg.in_progress()


@dataclass(frozen=True, eq=False)
class Delivery(Generic[M]):
    """One message taken from a queue; finish it by exactly one of ack, give_back, drop."""

    message: M
    payload: bytes  # the encoded message
    ref: BlobRef | None  # where ``payload`` lies, when it came by reference
    attempts: int
    _msg: Msg
    _heart: Heart

    async def ack(self) -> None:
        """Done: the broker forgets it. A lost ack only means that it comes again."""
        await self._finish(self._msg.ack())

    async def give_back(self, delay_s: float = 0.0) -> None:
        """Not now: it comes again, here or elsewhere, after ``delay_s``."""
        await self._finish(self._msg.nak(delay=delay_s or None))

    def let_go(self) -> None:
        """Stop keeping it alive: it goes to another taker when its time is up."""
        self._heart.remove(self._msg)

    async def drop(self) -> None:
        """Never again: the message can't be understood."""
        await self._finish(self._msg.term())

    async def _finish(self, answer: object) -> None:
        self._heart.remove(self._msg)
        with contextlib.suppress(*TRANSIENT):
            await answer  # type: ignore[misc]  # one of three coroutines of nats-py


class Worklist(Generic[M]):
    """The work of one durable consumer of a queue, decoded, kept alive while in hand."""

    def __init__(
        self,
        connection: tuple[Client, JetStreamContext],
        blobs: BlobStore,
        queue: Queue[M],
        config: ConsumerConfig,
    ) -> None:
        self._client, self._js = connection
        self._blobs = blobs
        self._queue = queue
        self._config = config
        self._heart = Heart()

    async def deliveries(self) -> AsyncIterator[Delivery[M]]:
        """Yields work until cancelled; survives restarts of the broker.

        At most the consumer's window of deliveries is out at a time: finish some to get more.

        Raises:
            Fenced: another consumer has superseded this one.
        """
        beat_s = (self._config.ack_wait or 30.0) / 3
        beating = asyncio.create_task(self._heart.beat(beat_s), name=f"heart {self._name}")
        try:
            while True:
                await self._ensure()
                with contextlib.suppress(ConsumerGone):
                    pull = Pull(self._client, self._queue.stream, self._name, batch=1)
                    async for msg in pull.messages():
                        self._heart.add(msg)
                        if (delivery := await self._decode(msg)) is not None:
                            yield delivery
        finally:
            beating.cancel()

    @property
    def _name(self) -> str:
        return str(self._config.durable_name)

    async def _ensure(self) -> None:
        """Create the consumer, or find it as it was; waits while the broker is away.

        Raises:
            Fenced: the work has another consumer now.
        """
        while True:
            try:
                await self._js.add_consumer(self._queue.stream, self._config)
            except BadRequestError as exc:
                if exc.err_code in _ERR_SUPERSEDED:
                    msg = f"consumer {self._name}: another one has taken over its work"
                    raise Fenced(msg) from exc
                raise
            except TRANSIENT as exc:
                log.warning("consumer not ready", consumer=self._name, error=str(exc))
                await asyncio.sleep(RETRY_PAUSE_S * 5)
            else:
                return

    async def _decode(self, msg: Msg) -> Delivery[M] | None:
        try:
            ref, payload = await resolve(msg, self._blobs)
        except ServerError as exc:  # the blob store is away or damaged: it may come back
            log.error("message postponed", subject=msg.subject, error=str(exc))  # noqa: TRY400
            self._heart.remove(msg)
            with contextlib.suppress(*TRANSIENT):
                await msg.nak(delay=POSTPONE_S)
            return None
        try:
            message = self._queue.messages.decode(payload)
        except msgspec.ValidationError as exc:
            # From a newer service, or damaged: no redelivery can help, so it must not block
            # the queue; the sender's future ends when its session does.
            log.error("message dropped", subject=msg.subject, error=str(exc))  # noqa: TRY400
            self._heart.remove(msg)
            with contextlib.suppress(*TRANSIENT):
                await msg.term()
            return None
        attempts = msg.metadata.num_delivered or 1
        return Delivery(message, payload, ref, attempts, msg, self._heart)

    async def remove(self) -> None:
        """Delete the consumer; its unfinished messages stay in the queue."""
        await self._delete(self._name)

    async def supersede(self, earlier: Iterable[str]) -> None:
        """Take the work over from the first of ``earlier`` consumers that exists.

        What that one had out is delivered anew at once, and it gets nothing any more: without
        this, a dead owner's messages would have to wait for their time to be up.
        """
        for name in earlier:
            if await self._delete(name):
                return

    async def _delete(self, name: str) -> bool:
        try:
            return await self._js.delete_consumer(self._queue.stream, name)
        except NotFoundError:
            return False


def work_consumer(
    queue: Queue[M], name: str, *, window: int, ack_wait_s: float, **tokens: str
) -> ConsumerConfig:
    """A durable consumer over the part of ``queue`` whose subject holds ``tokens``.

    ``max_deliver`` stays unlimited: on a work queue a message that ran out of deliveries would
    stay for ever and later ones would overtake it.
    """
    return ConsumerConfig(
        durable_name=name,
        filter_subject=queue.subject(**tokens),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_ack_pending=window,
        max_deliver=-1,
    )
