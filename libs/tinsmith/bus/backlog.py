"""What lies on work queues: looked at, and moved from one to another, without being worked on."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from tinsmith import tracing
from tinsmith.bus import history
from tinsmith.bus.claims import HEADER
from tinsmith.bus.wire import ERR_MAX_PER_SUBJECT, TRANSIENT, Rejected, following, publish
from tinsmith.errors import BrokerUnavailable, NotFound
from tinsmith.messages.base import Message

if TYPE_CHECKING:
    from typing import Any

    from nats.aio.client import Client
    from nats.js import JetStreamContext

    from tinsmith.messages.table import Queue

M = TypeVar("M", bound=Message)

DIGEST_DIGITS = 32
PATIENCE_S = 5.0  # for an answer that nobody waits for


class Depth(NamedTuple):
    """How much lies on a queue, waiting or being worked on."""

    messages: int
    size: int  # bytes
    oldest_s: float  # since the oldest was put there; 0 when there is none


async def depth(client: Client, queue: Queue[Any]) -> Depth:
    """How much lies on a queue, by the broker's books.

    Raises:
        BrokerUnavailable: the broker is away, or has no such queue.
    """
    try:
        subject = f"$JS.API.STREAM.INFO.{queue.stream}"
        answer = await client.request(subject, b"", timeout=PATIENCE_S)
        info = msgspec.json.decode(answer.data, type=_Info)
    except (*TRANSIENT, msgspec.ValidationError) as exc:
        raise BrokerUnavailable(f"{queue.stream}: its state is not told ({exc!r})") from exc
    state = info.state
    oldest_s = (info.ts - state.first_ts).total_seconds() if state.messages else 0.0
    return Depth(state.messages, state.bytes, max(0.0, oldest_s))


class _State(msgspec.Struct):
    messages: int
    bytes: int
    first_ts: datetime


class _Info(msgspec.Struct):
    """What of the broker's answer is needed; ``ts`` is its own clock's."""

    state: _State
    ts: datetime


async def subjects(client: Client, queue: Queue[Any]) -> set[str]:
    """The subjects of everything that waits or is being worked on.

    The broker walks its index, no message is read.

    Raises:
        BrokerUnavailable: the broker is away, or has no such queue.
    """
    try:
        return set(await history.subjects(client, queue.stream, queue.wildcard))
    except NotFound as exc:
        raise BrokerUnavailable(str(exc)) from exc


async def move_first(
    connection: tuple[Client, JetStreamContext], source: Queue[M], target: Queue[M], subject: str
) -> dict[str, str] | None:
    """Put the oldest message on ``subject`` onto another queue as it is, then take it off its own.

    Its tokens, which both subjects have, or None when there is none. Several may do so at once: the
    target refuses the second, and a message is at no moment on neither queue.

    Raises:
        Rejected, StreamFull, BrokerUnavailable: as ``publish`` does.
    """
    js = connection[1]
    found = await following(js, source.stream, subject, 0)
    if found is None:
        return None
    tokens = source.tokens(found.subject or "")
    wanted = target.subject(**tokens)
    kept = (HEADER, tracing.HEADER)
    headers = {name: value for name, value in (found.headers or {}).items() if name in kept}
    claim = headers.get(HEADER)
    digest = claim[:DIGEST_DIGITS] if claim else blake3(found.data or b"").hexdigest(16)
    headers["Nats-Msg-Id"] = f"{wanted}:{digest}"  # as enqueue makes it
    try:
        await publish(connection, wanted, found.data or b"", headers=headers)
    except Rejected as exc:
        if exc.code != ERR_MAX_PER_SUBJECT:
            raise
    await js.purge_stream(source.stream, subject=found.subject)
    return tokens
