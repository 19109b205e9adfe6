"""The bus: one connection to NATS and everything a service does with it."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from blake3 import blake3

from tinsmith import tracing
from tinsmith.bus import access, backlog, streams
from tinsmith.bus import rpc as core
from tinsmith.bus.anchors import Anchors
from tinsmith.bus.audit import AuditTrail
from tinsmith.bus.books import Books
from tinsmith.bus.cancelling import CancellableClient
from tinsmith.bus.claimed import Claims
from tinsmith.bus.claims import check_in, resolve
from tinsmith.bus.consumers import work_consumer
from tinsmith.bus.facts import Facts
from tinsmith.bus.lineages import Lineages
from tinsmith.bus.log import CommitLog
from tinsmith.bus.pruning import Pruning
from tinsmith.bus.pull import Worklist
from tinsmith.bus.results import ResultStore
from tinsmith.bus.samples import SampleLog
from tinsmith.bus.shared import SharedWork
from tinsmith.bus.table import Table
from tinsmith.bus.wire import (
    ERR_MAX_PER_SUBJECT,
    TRANSIENT,
    Rejected,
    StreamFull,
    last,
    publish,
)
from tinsmith.errors import BrokerUnavailable, Busy
from tinsmith.messages.base import Message, encode
from tinsmith.metrics import names as metrics
from tinsmith.sealing.seal import PLAIN, aside

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from nats.aio.client import Client

    from tinsmith.blobs import BlobStore
    from tinsmith.bus.shared import Wish
    from tinsmith.bus.subscription import Subscription
    from tinsmith.config import BusConfig
    from tinsmith.messages.table import Entity, Event, Queue, Rpc
    from tinsmith.sealing import Seal

log = structlog.get_logger(__name__)

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
M = TypeVar("M", bound=Message)

PING_INTERVAL_S = 10
PENDING_BYTES = 32 << 20  # what may wait in the client while it reconnects
CALL_TIMEOUT_S = 5.0


class Bus:
    """One service's connection. Made by ``Bus.connect``."""

    def __init__(self, client: Client, blobs: BlobStore, config: BusConfig) -> None:
        self._client = client
        self._connection = (client, client.jetstream())
        self._blobs = blobs
        self._config = config
        self.closed = asyncio.Event()
        """Set when the connection is closed for good: the process should end, not limp."""
        self.log = CommitLog(self._connection, blobs)
        self.anchors = Anchors(self._connection)
        self.results = ResultStore(self._connection, blobs)
        self.audit = AuditTrail(self._connection)
        self.books = Books(self._connection)
        self.facts = Facts(self._connection)
        self.lineages = Lineages(self._connection)
        self.samples = SampleLog(self._connection, blobs)
        self.claims = Claims(self._connection)
        self.pruning = Pruning(self._connection, self.log, self.anchors)

    @classmethod
    @asynccontextmanager
    async def connect(cls, config: BusConfig, *, name: str, blobs: BlobStore) -> AsyncIterator[Bus]:
        """Connect as ``name``; reconnects by itself for as long as it lives.

        Raises:
            BrokerUnavailable: nothing answers at ``config.url`` within the configured time.
        """
        events = _ConnectionEvents(name)
        client = await _open(config, name, events)
        bus = cls(client, blobs, config)
        events.closed = bus.closed
        events.is_quiet = False
        try:
            yield bus
        finally:
            events.is_quiet = True
            await _close(client)

    @property
    def blobs(self) -> BlobStore:
        """Where what is too large for the broker lies."""
        return self._blobs

    @property
    def is_connected(self) -> bool:
        """Whether the broker is reachable right now."""
        return self._client.is_connected

    async def ensure(self) -> None:
        """Create or update all streams. Raises StartupError when they do not fit."""
        try:
            await streams.ensure(self._connection[1], self._config)
        except TRANSIENT as exc:
            msg = (
                f"bus.url: {self._config.url} answers, but JetStream on it does not "
                f"({exc}); start nats-server with JetStream enabled"
            )
            raise BrokerUnavailable(msg) from exc

    async def call(
        self, rpc: Rpc[Q, R], request: Q, *, timeout_s: float = CALL_TIMEOUT_S, **tokens: str
    ) -> R:
        """See ``tinsmith.bus.rpc.call``."""
        return await core.call(self._client, rpc, request, timeout_s=timeout_s, **tokens)

    async def serve(
        self, rpc: Rpc[Q, R], handler: Callable[[Q], Awaitable[R]], **tokens: str
    ) -> Subscription:
        """See ``tinsmith.bus.rpc.serve``."""
        return await core.serve(self._client, rpc, handler, **tokens)

    async def emit(self, event: Event[M], message: M, **tokens: str) -> None:
        """See ``tinsmith.bus.rpc.emit``."""
        await core.emit(self._client, event, message, **tokens)

    async def listen(
        self, event: Event[M], handler: Callable[[M], None], **tokens: str
    ) -> Subscription:
        """See ``tinsmith.bus.rpc.listen``."""
        return await core.listen(self._client, event, handler, **tokens)

    async def enqueue(
        self, queue: Queue[M], message: M, seal: Seal = PLAIN, /, **tokens: str
    ) -> bool:
        """Put work on a queue, once, durably; ``tokens`` fill the holes of its subject.

        False when work with these tokens was queued already, which stays; ``queued_as`` says what
        it is, unless it has been done since. A repeat right after that does nothing either.

        Raises:
            Busy: the queue is full.
            BrokerUnavailable: the broker is away.
            StorageFull: the blob store or the broker is full.
            Forgotten, SealBroken: as ``seal`` does.
        """
        encoded = await aside(seal.seal, encode(message))
        payload, headers = await check_in(encoded, self._blobs)
        subject = queue.subject(**tokens)
        # The digest keeps a different message under the same name from being taken for a repeat.
        headers["Nats-Msg-Id"] = f"{subject}:{blake3(encoded).hexdigest(16)}"
        headers |= tracing.carried()
        try:
            await publish(self._connection, subject, payload, headers=headers)
        except Rejected as exc:
            if exc.code == ERR_MAX_PER_SUBJECT:
                return False
            raise _busy(exc) from exc
        except StreamFull as exc:  # back-pressure, and no trouble: it empties by itself
            raise _busy(exc) from exc
        return True

    async def queued_as(self, queue: Queue[M], seal: Seal = PLAIN, /, **tokens: str) -> M | None:
        """The work with these tokens that waits or is being worked on."""
        found = await last(self._connection[1], queue.stream, queue.subject(**tokens))
        if found is None:
            return None
        _, stored = await resolve(found, self._blobs)
        return queue.messages.decode(await aside(seal.open, stored))

    async def is_queued(self, queue: Queue[M], **tokens: str) -> bool:
        """Whether work with these tokens waits or is being worked on."""
        found = await last(self._connection[1], queue.stream, queue.subject(**tokens))
        return found is not None

    async def subjects(self, queue: Queue[M]) -> set[str]:
        """See ``tinsmith.bus.backlog.subjects``."""
        return await backlog.subjects(self._client, queue)

    async def depth(self, queue: Queue[Any]) -> backlog.Depth:
        """See ``tinsmith.bus.backlog.depth``."""
        return await backlog.depth(self._client, queue)

    async def move_first(
        self, source: Queue[M], target: Queue[M], **tokens: str
    ) -> dict[str, str] | None:
        """See ``tinsmith.bus.backlog.move_first``; tokens may be ``*``.

        Raises:
            Busy: the target is full.
            BrokerUnavailable: the broker is away.
        """
        try:
            return await backlog.move_first(
                self._connection, source, target, source.subject(**tokens)
            )
        except (Rejected, StreamFull) as exc:
            raise _busy(exc) from exc
        except TRANSIENT as exc:
            msg = f"the broker did not move a message of {source.stream} ({type(exc).__name__})"
            raise BrokerUnavailable(msg) from exc

    async def withdraw(self, queue: Queue[M], **tokens: str) -> None:
        """Take work off a queue; who has it in hand already may finish it all the same.

        Raises:
            BrokerUnavailable: the broker is away.
        """
        try:
            await self._connection[1].purge_stream(queue.stream, subject=queue.subject(**tokens))
        except TRANSIENT as exc:
            msg = f"the broker did not take a message off {queue.stream} ({type(exc).__name__})"
            raise BrokerUnavailable(msg) from exc

    def work(
        self,
        queue: Queue[M],
        consumer: str,
        *,
        window: int,
        ack_wait_s: float,
        seal: Seal = PLAIN,
        **tokens: str,
    ) -> Worklist[M]:
        """The work whose subjects match ``tokens``, shared by all who name ``consumer``.

        At most ``window`` messages are out at a time over all of them; one that is neither
        finished nor kept alive for ``ack_wait_s`` goes to another. Only one ``consumer`` can
        exist for the same work: see ``Worklist.supersede``.
        """
        config = work_consumer(queue, consumer, window=window, ack_wait_s=ack_wait_s, **tokens)
        return Worklist(self._connection, self._blobs, queue, config, seal)

    def shared_work(
        self,
        queue: Queue[M],
        consumer: str,
        wishes: Callable[[], Wish],
        *,
        window: int,
        ack_wait_s: float,
        **tokens: str,
    ) -> SharedWork[M]:
        """As ``work``, in shares that are taken as ``wishes`` says; with a window for each."""
        tokens["share"] = "*"
        config = work_consumer(queue, consumer, window=window, ack_wait_s=ack_wait_s, **tokens)
        return SharedWork(self._connection, self._blobs, queue, config, wishes)

    def table(self, entity: Entity[M]) -> Table[M]:
        """The registry table of ``entity``."""
        return Table(self._connection, entity)


def _busy(exc: Exception) -> Busy:
    return Busy(f"the queue is full ({exc}); send the same request again in a second")


class _ConnectionEvents:
    """What the connection tells us; errors by the thousand become one line a second."""

    def __init__(self, name: str) -> None:
        self._log = log.bind(connection=name)
        self._quiet_until = 0.0
        self._suppressed = 0
        self.closed: asyncio.Event | None = None
        self.is_quiet = True  # while connecting and closing, errors are the caller's to report

    async def on_error(self, exc: Exception) -> None:
        if self.is_quiet:
            return
        now = asyncio.get_running_loop().time()
        if now < self._quiet_until:
            self._suppressed += 1
            return
        self._quiet_until = now + 1.0
        self._log.warning("bus error", error=repr(exc), suppressed=self._suppressed)
        self._suppressed = 0

    async def on_disconnect(self) -> None:
        if not self.is_quiet:
            metrics.BUS_DISCONNECTS.inc()
            self._log.warning("bus disconnected")

    async def on_reconnect(self) -> None:
        metrics.BUS_RECONNECTS.inc()
        self._log.info("bus reconnected")

    async def on_close(self) -> None:
        if self.closed is not None:
            self.closed.set()


async def _open(config: BusConfig, name: str, events: _ConnectionEvents) -> Client:
    client = CancellableClient()
    try:
        async with asyncio.timeout(config.connect_timeout_s):
            await client.connect(
                config.url.split(","),
                name=name,
                error_cb=events.on_error,
                disconnected_cb=events.on_disconnect,
                reconnected_cb=events.on_reconnect,
                closed_cb=events.on_close,
                # The first connection fails fast; later ones are retried for ever by nats-py.
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.25,  # type: ignore[arg-type]  # it is slept for
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES,
                **access.options(config),
            )
    except BaseException as exc:
        with contextlib.suppress(*TRANSIENT):
            await client.close()  # somebody may have answered, and said nothing
        if not isinstance(exc, TRANSIENT):
            raise
        msg = (
            f"bus.url: no NATS server answers at {config.url} ({type(exc).__name__}); start one "
            "with 'tinsmith up', or set TINSMITH_NATS_URL"
        )
        raise BrokerUnavailable(msg) from exc
    return client


async def _close(client: Client) -> None:
    try:
        await client.drain()
    except TRANSIENT:
        with contextlib.suppress(*TRANSIENT):  # nothing is left to close
            await client.close()
