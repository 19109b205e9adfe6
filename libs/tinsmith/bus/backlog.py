"""What lies on work queues: looked at, and moved from one to another, without being worked on."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from blake3 import blake3

from tinsmith.bus import history
from tinsmith.bus.claims import HEADER
from tinsmith.bus.wire import ERR_MAX_PER_SUBJECT, Rejected, following, publish
from tinsmith.errors import BrokerUnavailable, NotFound
from tinsmith.messages.base import Message

if TYPE_CHECKING:
    from typing import Any

    from nats.aio.client import Client
    from nats.js import JetStreamContext

    from tinsmith.messages.table import Queue

M = TypeVar("M", bound=Message)

DIGEST_DIGITS = 32


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
    headers = {HEADER: claim} if (claim := (found.headers or {}).get(HEADER)) else {}
    digest = claim[:DIGEST_DIGITS] if claim else blake3(found.data or b"").hexdigest(16)
    headers["Nats-Msg-Id"] = f"{wanted}:{digest}"  # as enqueue makes it
    try:
        await publish(connection, wanted, found.data or b"", headers=headers)
    except Rejected as exc:
        if exc.code != ERR_MAX_PER_SUBJECT:
            raise
    await js.purge_stream(source.stream, subject=found.subject)
    return tokens
