"""Reading what a stream keeps: a stretch of it in order, and which subjects it has."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

import msgspec

from tinsmith.bus.consumers import reading_consumer
from tinsmith.bus.pull import ConsumerGone, Pull
from tinsmith.bus.wire import READ_PATIENCE_S, RETRY_PAUSE_S, TRANSIENT
from tinsmith.bus.wire import last as last_message
from tinsmith.errors import BrokerUnavailable, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import ConsumerConfig, ConsumerInfo

BATCH = 100
SILENCE_S = 30.0  # without a message, then the caller hears of it
LOOK_S = 2.0  # without a message, then whether there is one is asked again
_ERR_NO_STREAM = 10059


async def stretch(
    connection: tuple[Client, JetStreamContext],
    stream: str,
    subject: str,
    *,
    first: int,
    last: int,
    headers_only: bool = False,
) -> AsyncIterator[Msg]:
    """The messages on ``subject`` from stream sequence ``first`` to ``last``, which is one of them.

    Between batches nothing is open, so that the caller may take its time over a message, or stop
    early. A consumer that the broker has forgotten meanwhile is replaced.

    Raises:
        BrokerUnavailable: the broker was silent for too long, or the rest has been deleted.
    """
    client, js = connection
    clock = asyncio.get_running_loop().time
    consumer, heard = "", clock()
    while first <= last:
        if not consumer:
            wanted = reading_consumer(subject, first, headers_only=headers_only)
            found = await _consumer(js, stream, wanted)
            if not found.num_pending and not await _has(js, stream, subject, first):
                raise BrokerUnavailable(f"{stream} was deleted up to {last} meanwhile; read again")
            consumer = found.name
        batch = await _batch(client, stream, consumer, last)
        if not batch and clock() - heard > SILENCE_S:
            reason = f"the broker sent nothing of {stream} for {SILENCE_S:g} s; is it running?"
            raise BrokerUnavailable(reason)
        for msg in batch:
            yield msg
            first = msg.metadata.sequence.stream + 1
        if batch:
            heard = clock()
        if len(batch) < BATCH:
            consumer = ""


async def kept(
    connection: tuple[Client, JetStreamContext],
    stream: str,
    subject: str,
    *,
    first: int = 1,
    headers_only: bool = False,
) -> AsyncIterator[Msg]:
    """As ``stretch``, up to the last message that is there at the beginning; maybe none."""
    end = await last_message(connection[1], stream, subject)
    if end is not None:
        through = end.seq or 0
        async for msg in stretch(
            connection, stream, subject, first=first, last=through, headers_only=headers_only
        ):
            yield msg


async def _batch(client: Client, stream: str, consumer: str, last: int) -> list[Msg]:
    """The next messages, up to ``last``; fewer than ``BATCH`` when no more come for now."""
    messages = cast("AsyncGenerator[Msg]", Pull(client, stream, consumer, batch=BATCH).messages())
    found: list[Msg] = []
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError, ConsumerGone):
        async with asyncio.timeout(LOOK_S) as limit, contextlib.aclosing(messages):
            async for msg in messages:
                limit.reschedule(loop.time() + LOOK_S)
                found.append(msg)
                if len(found) == BATCH or msg.metadata.sequence.stream >= last:
                    break
    return found


async def _has(js: JetStreamContext, stream: str, subject: str, first: int) -> bool:
    """Whether there is a message from ``first`` on: a consumer's replica may not have it yet."""
    end = await last_message(js, stream, subject)
    return end is not None and (end.seq or 0) >= first


async def count(js: JetStreamContext, stream: str, subject: str) -> int:
    """How many messages the stream has on ``subject``. Raises BrokerUnavailable."""
    return (await _consumer(js, stream, reading_consumer(subject, 1))).num_pending or 0


async def subjects(client: Client, stream: str, matching: str) -> dict[str, int]:
    """The subjects in the stream that match, each with its number of messages.

    Raises:
        NotFound: the broker has no such stream.
        BrokerUnavailable: JetStream did not answer.
    """
    found: dict[str, int] = {}
    while True:
        page = await _page(client, stream, {"subjects_filter": matching, "offset": len(found)})
        new = page.state.subjects or {}
        found |= new
        if not new or len(found) >= page.total:
            return found


class _State(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _Error(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Info(msgspec.Struct):
    """What of the broker's answer matters here."""

    state: _State = msgspec.field(default_factory=_State)
    total: int = 0  # of all pages
    error: _Error | None = None


async def _page(client: Client, stream: str, request: dict[str, str | int]) -> _Info:
    """One page of a list that the broker cuts at 100,000; nats-py asks for the first only."""
    try:
        answer = await client.request(
            f"$JS.API.STREAM.INFO.{stream}", msgspec.json.encode(request), timeout=READ_PATIENCE_S
        )
    except TRANSIENT as exc:
        msg = f"the broker did not list {stream} ({type(exc).__name__}); does it run JetStream?"
        raise BrokerUnavailable(msg) from exc
    info = msgspec.json.decode(answer.data, type=_Info)
    if info.error is None:
        return info
    if info.error.err_code == _ERR_NO_STREAM:
        msg = f"the broker has no stream {stream}: no service of Tinsmith has run against it yet"
        raise NotFound(msg)
    raise BrokerUnavailable(f"the broker did not list {stream}: {info.error.description}")


async def _consumer(js: JetStreamContext, stream: str, config: ConsumerConfig) -> ConsumerInfo:
    deadline = asyncio.get_running_loop().time() + READ_PATIENCE_S
    while True:
        try:
            return await js.add_consumer(stream, config)
        except TRANSIENT as exc:
            if asyncio.get_running_loop().time() > deadline:
                msg = f"the broker did not let {stream} be read within {READ_PATIENCE_S:g} s"
                raise BrokerUnavailable(msg) from exc
        await asyncio.sleep(RETRY_PAUSE_S)
