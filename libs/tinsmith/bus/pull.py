"""The pull loop: how a service takes work from a stream without ever hanging or losing any.

One outstanding pull with an idle heartbeat. Two missed heartbeats mean that the server or the
pull is gone, and the loop asks again; nats-py's ``fetch`` can hang for its whole timeout then.
Taken messages are kept in progress by a timer until they are acknowledged, however long the
work on them takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import nats.errors
import structlog
from nats.js.errors import BadRequestError, NotFoundError

from tinsmith import tracing
from tinsmith.bus.cancelling import cancellable
from tinsmith.bus.claims import resolve
from tinsmith.bus.wire import RETRY_PAUSE_S, TRANSIENT, at
from tinsmith.errors import BlobMissing, Fenced, SealBroken, ServerError
from tinsmith.messages.base import BlobRef, Message, encode
from tinsmith.metrics import names as metrics
from tinsmith.sealing.seal import PLAIN, aside

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import ConsumerConfig

    from tinsmith.blobs import BlobStore
    from tinsmith.messages.table import Queue
    from tinsmith.sealing import Seal

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)

EXPIRES_S = 5.0  # in a cluster a request outlives who made it
HEARTBEAT_S = 1.0
MISSED_HEARTBEATS = 2.5
POSTPONE_S = 2.0
BLOB_TRIES = 4  # to read what is not in the blob store
BEATS = 3  # in the time after which the broker gives a silent taker's message to another

_ERR_SUPERSEDED = {10099, 10100}  # a work queue has one consumer per subject


class Unreadable(ServerError):
    """A message that nobody can make anything of."""


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
                    msg = await cancellable(sub.next_msg(HEARTBEAT_S * MISSED_HEARTBEATS))
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

    def __init__(self, ack_wait_s: float) -> None:
        self._taken: dict[str, Msg] = {}  # by reply subject: unique to one delivery
        self._interval_s = ack_wait_s / BEATS
        self._beaten = math.inf  # no beat is due yet
        self._woken = -math.inf

    def has_just_woken(self) -> bool:
        """Whether messages that arrive now may be others' by now: this process was suspended."""
        now = asyncio.get_running_loop().time()
        if now - self._beaten > self._interval_s * BEATS:
            self._woken = now
        return now - self._woken < self._interval_s

    def add(self, msg: Msg) -> None:
        """Start to keep ``msg`` alive."""
        self._taken[msg.reply] = msg
        if (msg.metadata.num_delivered or 1) > 1:
            metrics.BUS_REDELIVERED.labels(msg.metadata.stream).inc()

    def remove(self, msg: Msg) -> None:
        """Stop; it was acknowledged, given back, or its pull has ended."""
        self._taken.pop(msg.reply, None)

    async def beat(self) -> None:
        """Runs until cancelled."""
        while True:
            self._beaten = asyncio.get_running_loop().time()
            await asyncio.sleep(self._interval_s)
            self.has_just_woken()
            for msg in list(self._taken.values()):
                with contextlib.suppress(*TRANSIENT):  # late is harmless: work is idempotent
                    await msg.in_progress()


@dataclass(frozen=True, eq=False)
class Taken(Generic[M]):
    """One message taken from a queue; finish it by exactly one of ack, give_back, drop."""

    _msg: Msg
    _heart: Heart

    @property
    def subject(self) -> str:
        """Where it lay."""
        return self._msg.subject

    @property
    def attempts(self) -> int:
        """How often it was delivered."""
        return self._msg.metadata.num_delivered or 1

    @property
    def traceparent(self) -> str:
        """The trace that it belongs to; empty when it was queued outside of one."""
        return (self._msg.headers or {}).get(tracing.HEADER, "")

    @property
    def size(self) -> int:
        """Bytes of it in memory; what came by reference is not there yet."""
        return len(self._msg.data)

    def shed(self) -> None:
        """Keep no bytes of it: it is read from the queue again when it is needed."""
        self._msg.data = b""

    def replaced_by(self, message: M) -> Delivery[M]:
        """It, with ``message`` in the place of what cannot be read."""
        return Delivery(self._msg, self._heart, message, encode(message), b"", None)

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


@dataclass(frozen=True, eq=False)
class Delivery(Taken[M]):
    """A message that was read."""

    message: M
    payload: bytes  # the encoded message, opened
    stored: bytes  # the same as it lies in the queue; empty when it came by reference
    ref: BlobRef | None  # where it lies then


OnLost = Callable[[Taken[M], ServerError], Awaitable[None]]


class Worklist(Generic[M]):
    """The work of one durable consumer of a queue, decoded, kept alive while in hand."""

    def __init__(
        self,
        connection: tuple[Client, JetStreamContext],
        blobs: BlobStore,
        queue: Queue[M],
        config: ConsumerConfig,
        seal: Seal = PLAIN,
    ) -> None:
        self._seal = seal
        self._client, self._js = connection
        self._blobs = blobs
        self._queue = queue
        self._config = config
        self._heart = Heart(config.ack_wait or 30.0)

    async def deliveries(self, on_lost: OnLost[M] | None = None) -> AsyncGenerator[Delivery[M]]:
        """As ``taken``, but read. What cannot be read now comes again later.

        What cannot be read at all is dropped, after ``on_lost(it, why)`` has answered it.
        """
        async with contextlib.aclosing(self.taken()) as taken:
            async for one in taken:
                if (delivery := await self.opened(one, on_lost)) is not None:
                    yield delivery

    async def opened(self, taken: Taken[M], on_lost: OnLost[M] | None = None) -> Delivery[M] | None:
        """It, read; None for what cannot be, which is dealt with as ``deliveries`` says."""
        try:
            return await self.read(taken)
        except ServerError as exc:
            await self._without(taken, exc, on_lost)
            return None

    async def taken(self) -> AsyncGenerator[Taken[M]]:
        """Yields work until cancelled; survives restarts of the broker.

        At most the consumer's window of deliveries is out at a time: finish some to get more.

        Raises:
            Fenced: another consumer has superseded this one.
        """
        beating = asyncio.create_task(self._heart.beat(), name=f"heart {self._name}")
        try:
            while True:
                await self._ensure(self._config)
                with contextlib.suppress(ConsumerGone):
                    pull = Pull(self._client, self._queue.stream, self._name, batch=1)
                    async for msg in pull.messages():
                        if self._heart.has_just_woken():
                            continue  # if it is not another's by now, it comes again
                        self._heart.add(msg)
                        yield Taken(msg, self._heart)
        finally:
            beating.cancel()

    @property
    def _name(self) -> str:
        return str(self._config.durable_name)

    async def _ensure(self, config: ConsumerConfig) -> None:
        """Create the consumer, or find it as it was; waits while the broker is away.

        Raises:
            Fenced: the work has another consumer now.
        """
        while True:
            try:
                await self._js.add_consumer(self._queue.stream, config)
            except BadRequestError as exc:
                if exc.err_code in _ERR_SUPERSEDED:
                    name = config.durable_name
                    msg = f"consumer {name}: another one has taken over its work"
                    raise Fenced(msg) from exc
                raise
            except TRANSIENT as exc:
                log.warning("consumer not ready", consumer=config.durable_name, error=str(exc))
                await asyncio.sleep(RETRY_PAUSE_S * 5)
            else:
                return

    async def read(self, taken: Taken[M]) -> Delivery[M]:
        """Fetch and decode what was taken.

        Raises:
            BlobMissing: its bytes are not where they should be.
            ServerError: they cannot be read now; that may change.
            Unreadable: nobody can make anything of them.
            Forgotten: the run, whose work it is, was forgotten.
        """
        msg = taken._msg  # noqa: SLF001 - a part of this module
        ref, stored = await resolve(msg, self._blobs)
        if ref is None and not stored:  # shed
            seq = msg.metadata.sequence.stream
            stored = await at(self._js, self._queue.stream, seq) or b""
        try:
            payload = await aside(self._seal.open, stored)
            message = self._queue.messages.decode(payload)
        except (msgspec.ValidationError, SealBroken) as exc:
            # From a newer service, or damaged.
            raise Unreadable(f"a message on {msg.subject} cannot be read: {exc}") from exc
        inline = stored if ref is None else b""
        return Delivery(msg, self._heart, message, payload, inline, ref)

    async def _without(
        self, taken: Taken[M], error: ServerError, on_lost: OnLost[M] | None
    ) -> None:
        said = log.bind(subject=taken.subject, error=str(error))
        is_lost = isinstance(error, BlobMissing) and taken.attempts >= BLOB_TRIES
        if not is_lost and not isinstance(error, Unreadable):  # the blob store may be away
            said.warning("message postponed")
            await taken.give_back(delay_s=POSTPONE_S)
            return
        said.error("message dropped")  # no redelivery can help, and it must not block the queue
        try:
            if on_lost is not None:
                await on_lost(taken, error)
        except ServerError as exc:
            log.warning("message not answered yet", subject=taken.subject, error=str(exc))
            await taken.give_back(delay_s=POSTPONE_S)
        else:
            await taken.drop()

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
