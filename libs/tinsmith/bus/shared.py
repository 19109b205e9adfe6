"""Work that several take from in shares, each with preferences of its own.

Each share has one durable consumer that all takers ask with a priority: a message goes to the
waiting request with the lowest one. So whoever prefers a share gets its work while it asks for it,
and when it does not, because it has died or has enough, the next one gets it at once.

With room for all shares a taker has a poll waiting at each of them. With less, it looks at one
after the other and leaves a poll only where it has found nothing: work that lies there already is
taken one by one, as there is room, and what arrives in too many places at once is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tinsmith.bus.consumers import shared_consumer
from tinsmith.bus.pull import M, Taken, Worklist
from tinsmith.bus.wire import RETRY_PAUSE_S, TRANSIENT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js import JetStreamContext
    from nats.js.api import ConsumerConfig

    from tinsmith.blobs import BlobStore
    from tinsmith.messages.table import Queue

POLL_S = 5.0  # that a request waits at the broker; after it, priorities are thought about anew
LATE_S = 2.5  # behind that, its answer is lost
LOOK_S = 2.0  # for the answer of a request that does not wait
TICK_S = 1.0
MOST_AT_ONCE = 8  # messages of a share that is preferred to all others
FAIR_EVERY = 8  # looks, of which one goes by no preference
GROUP = "takers"

LOWEST, HIGHEST = 9, 0  # priorities, as the broker has them


@dataclass
class _Poll:
    number: int
    left: int  # messages it may still bring
    until: float
    is_look: bool


class Wish(NamedTuple):
    """What a taker wants now."""

    room: int  # messages that it could begin with at once
    priorities: Mapping[str, int]  # by share, from HIGHEST to LOWEST; others are not asked for


class SharedWork(Worklist[M]):
    """The work of one queue, of which each taker takes what it ``wishes``.

    Shares are the tokens that fill the hole ``share`` of the queue's subject.
    """

    def __init__(
        self,
        connection: tuple[Client, JetStreamContext],
        blobs: BlobStore,
        queue: Queue[M],
        config: ConsumerConfig,
        wishes: Callable[[], Wish],
    ) -> None:
        """``config`` is of any share; ``wishes`` is asked again and again."""
        super().__init__(connection, blobs, queue, config)
        self._wishes = wishes
        self._polls: dict[str, _Poll] = {}
        self._made: set[str] = set()  # shares whose consumer is there
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._inbox = self._client.new_inbox()
        self._count = 0
        self._connections = self._client.stats["reconnects"]
        self._is_open = True

    def wish_changed(self) -> None:
        """There is room again, or another preference."""
        self._arrived.put_nowait(None)

    def stop(self) -> None:
        """Take no more: ``taken`` ends when what is on its way was given back."""
        self._is_open = False
        self.wish_changed()

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Inside the block what was taken stays ours, also when no more is taken."""
        beating = asyncio.create_task(self._heart.beat(), name=f"heart {self._name}")
        try:
            yield
        finally:
            beating.cancel()

    async def taken(self) -> AsyncGenerator[Taken[M]]:
        """Yields work as it is wished for, until ``stop`` or cancellation; see ``kept_alive``.

        Raises:
            Fenced: other consumers have this work.
        """
        async with self._listening():
            while self._is_open:
                await self._ask()
                msg = await self._next()
                if msg is None or self._heart.has_just_woken():
                    continue  # of the latter: if it is not another's by now, it comes again
                taken: Taken[M] = Taken(msg, self._heart)
                self._heart.add(msg)
                if self._has_room():
                    yield taken
                else:
                    await taken.give_back()

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        async def on_message(msg: Msg) -> None:
            self._arrived.put_nowait(msg)

        # Unlimited pending bytes: the client would drop work silently.
        sub = await self._client.subscribe(
            f"{self._inbox}.>", cb=on_message, pending_bytes_limit=0, pending_msgs_limit=0
        )
        try:
            yield
        finally:
            await asyncio.shield(self._leave(sub))

    async def _leave(self, sub: Subscription) -> None:
        """The broker's requests of us end with the subscription; what it has sent is given back."""
        with contextlib.suppress(*TRANSIENT):
            await sub.drain()  # type: ignore[no-untyped-call]  # of nats-py
        while not self._arrived.empty():
            msg = self._arrived.get_nowait()
            if msg is not None and not _status(msg):
                await Taken(msg, self._heart).give_back()

    async def _next(self) -> Msg | None:
        """A message, or None when there is something to think about."""
        try:
            async with asyncio.timeout(TICK_S):
                msg = await self._arrived.get()
        except TimeoutError:
            return None
        if msg is None:
            return None
        if _status(msg):
            await self._after_status(msg)
            return None
        poll = self._polls.get(self._queue.tokens(msg.subject)["share"])
        if poll is not None:
            poll.left -= 1
        return msg

    async def _ask(self) -> None:
        """Poll wherever there is room for it; else look at one share."""
        self._forget_lost()
        if not self._has_room():
            return
        wish = self._wishes()
        room = wish.room - sum(poll.left for poll in self._polls.values())
        unasked = [share for share in wish.priorities if share not in self._polls]
        if room < len(unasked):
            if unasked and not any(poll.is_look for poll in self._polls.values()):
                await self._send(self._first(unasked, wish), wish, look=True)
            return
        best = sum(wish.priorities[share] == HIGHEST for share in unasked)
        more = min(MOST_AT_ONCE - 1, (room - len(unasked)) // max(1, best))
        for share in unasked:
            extra = more if wish.priorities[share] == HIGHEST else 0
            await self._send(share, wish, batch=1 + extra)

    def _has_room(self) -> bool:
        return self._is_open and self._wishes().room > 0

    def _first(self, unasked: list[str], wish: Wish) -> str:
        """The share to look at: a preferred one, and every so often any, each in its turn."""
        count = len(unasked)
        fair, rest = divmod(self._count, FAIR_EVERY)
        turn = self._count if rest else fair
        order = [wish.priorities[share] if rest else HIGHEST for share in unasked]
        turns = [(place - turn) % count for place in range(count)]
        return min(zip(order, turns, unasked, strict=True))[2]

    async def _send(self, share: str, wish: Wish, *, batch: int = 1, look: bool = False) -> None:
        await self._have(share)
        self._count += 1
        until = asyncio.get_running_loop().time() + (LOOK_S if look else POLL_S + LATE_S)
        self._polls[share] = _Poll(self._count, batch, until, is_look=look)
        waiting = {"no_wait": True} if look else {"expires": int(POLL_S * 1e9)}
        request = {"batch": batch, "group": GROUP, "priority": wish.priorities[share], **waiting}
        stream, name = self._queue.stream, self._name_of(share)
        try:
            await self._client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}",
                msgspec.json.encode(request),
                reply=f"{self._inbox}.{share}.{self._count}",
            )
        except TRANSIENT:
            await asyncio.sleep(RETRY_PAUSE_S)  # reconnecting; it is asked for again
            self._polls.pop(share, None)

    async def _after_status(self, msg: Msg) -> None:
        """A request has ended; a look that found nothing leaves a poll in its place."""
        share, number = msg.subject.rsplit(".", 2)[-2:]
        poll = self._polls.get(share)
        if poll is None or poll.number != int(number):
            return  # of one that was given up
        del self._polls[share]
        status = _status(msg)
        if status in ("409", "503"):  # the consumer was deleted, or the broker is not ready
            self._made.discard(share)
            await asyncio.sleep(RETRY_PAUSE_S)
        elif poll.is_look and share in (wish := self._wishes()).priorities:
            await self._send(share, wish)

    def _forget_lost(self) -> None:
        """Requests that are used up, or whose answer does not come any more."""
        now = asyncio.get_running_loop().time()
        if self._client.stats["reconnects"] != self._connections:
            self._connections = self._client.stats["reconnects"]
            self._polls.clear()
        self._polls = {
            share: poll for share, poll in self._polls.items() if poll.left > 0 and now < poll.until
        }

    async def _have(self, share: str) -> None:
        """Make the share's consumer, unless it is known to be there."""
        if share in self._made:
            return
        every = self._queue.tokens(self._config.filter_subject or "")
        subject = self._queue.subject(**every | {"share": share})
        config = replace(self._config, durable_name=self._name_of(share), filter_subject=subject)
        await self._ensure(shared_consumer(config, GROUP))
        self._made.add(share)

    def _name_of(self, share: str) -> str:
        return f"{self._name}-share-{share}"


def _status(msg: Msg) -> str:
    return (msg.headers or {}).get("Status", "")
