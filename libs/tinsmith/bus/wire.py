"""Sending on a connection that may break: durable publish, direct reads, typed errors.

Facts of nats-py that shape this module: ``publish_async`` futures are lost when the server
dies, so every publish waits for its own acknowledgement; the client's payload check leaves
the headers out and the server then closes the connection for good, so the check here counts
them; ``js.publish(stream=...)`` writes into the caller's headers, so each call gets its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import nats.errors
from nats.js.errors import APIError, NotFoundError

from tinsmith.errors import BrokerUnavailable, ServerError, StorageFull
from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.api import RawStreamMsg

PUBLISH_TRY_S = 2.0  # one attempt; the broker syncs to disk before it acknowledges
PUBLISH_PATIENCE_S = 10.0  # all attempts; then the caller hears of it
READ_PATIENCE_S = 10.0
RETRY_PAUSE_S = 0.1
HEADER_SLACK = 64  # bytes: "NATS/1.0" and separators

ERR_WRONG_LAST_SEQUENCE = 10071
ERR_MAX_PER_SUBJECT = 10077
_ERR_FULL = {10023, 10047, 10122}  # insufficient resources, storage exceeded, store failed

TRANSIENT = (nats.errors.Error, asyncio.TimeoutError, OSError)


class StreamFull(StorageFull):
    """A stream has reached its own limit; other streams may have room."""


class Rejected(Exception):
    """The stream answered, and refused: the caller knows what ``code`` means for it."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"{description} ({code})")
        self.code = code


async def publish(
    connection: tuple[Client, JetStreamContext],
    subject: str,
    payload: bytes,
    *,
    headers: dict[str, str] | None = None,
    patience_s: float | None = None,
) -> int:
    """Append to the stream behind ``subject`` and return the stream sequence.

    Retries until the broker acknowledges; give a ``Nats-Msg-Id`` or an expected sequence so
    that a repeated attempt is harmless.

    Raises:
        Rejected: a limit or an expectation of the stream is not met.
        StorageFull: the broker has no room, or the stream has not (StreamFull).
        BrokerUnavailable: no acknowledgement within ``patience_s``.
    """
    check_size(connection[0], subject, payload, headers)
    patience_s = PUBLISH_PATIENCE_S if patience_s is None else patience_s
    kind = _kind(subject)
    try:
        with metrics.BUS_PUBLISH_SECONDS.labels(kind).time():
            return await _publish(connection[1], subject, payload, headers, patience_s)
    except StorageFull as exc:
        full = "stream full" if isinstance(exc, StreamFull) else "storage full"
        metrics.BUS_REFUSED.labels(kind, full).inc()
        raise


async def _publish(
    js: JetStreamContext,
    subject: str,
    payload: bytes,
    headers: dict[str, str] | None,
    patience_s: float,
) -> int:
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            fresh = dict(headers) if headers else None
            return (await js.publish(subject, payload, timeout=PUBLISH_TRY_S, headers=fresh)).seq
        except APIError as exc:
            if "maximum bytes" in (exc.description or ""):
                msg = f"{subject}: its stream on the broker is full ({exc.description})"
                raise StreamFull(msg) from exc
            if exc.err_code in _ERR_FULL:
                msg = f"the broker's storage is full ({exc.description}); free or raise it"
                raise StorageFull(msg) from exc
            if exc.code != 503 or exc.err_code == ERR_MAX_PER_SUBJECT:
                raise Rejected(exc.err_code or 0, exc.description or "") from exc
            failure: Exception = exc
        except TRANSIENT as exc:
            failure = exc
        if asyncio.get_running_loop().time() > deadline:
            msg = f"the broker did not accept a message within {patience_s:g} s; is it running?"
            raise BrokerUnavailable(msg) from failure
        await asyncio.sleep(RETRY_PAUSE_S)


def _kind(subject: str) -> str:
    """What the subject is for, as its row in the table says: ``tinsmith.v1.<kind>...``."""
    return subject.split(".", 3)[2] if subject.startswith("tinsmith.v1.") else "other"


def check_size(
    client: Client, subject: str, payload: bytes, headers: dict[str, str] | None = None
) -> None:
    """Raises ServerError when the message with its headers is over the broker's limit."""
    extra = sum(len(k) + len(v) + 4 for k, v in (headers or {}).items()) + HEADER_SLACK
    if len(payload) + extra > client.max_payload:
        msg = (
            f"{subject}: {len(payload) + extra} bytes are over the broker's max_payload of "
            f"{client.max_payload}; raise max_payload in nats.conf"
        )
        raise ServerError(msg)


async def last(
    js: JetStreamContext, stream: str, subject: str, *, patience_s: float | None = None
) -> RawStreamMsg | None:
    """The newest message on ``subject`` (which may hold wildcards), or None.

    Raises:
        BrokerUnavailable: no answer within ``patience_s``.
    """
    return await _read(stream, lambda: js.get_last_msg(stream, subject, direct=True), patience_s)


async def at(js: JetStreamContext, stream: str, seq: int) -> bytes | None:
    """The message with the stream sequence ``seq``, or None; raises as ``last``."""
    found = await _read(stream, lambda: js.get_msg(stream, seq, direct=True))
    return None if found is None else found.data or b""


async def following(
    js: JetStreamContext, stream: str, subject: str, after: int
) -> RawStreamMsg | None:
    """The first message on ``subject`` behind the sequence ``after``; else as ``last``."""
    return await _read(
        stream, lambda: js.get_msg(stream, after + 1, subject, direct=True, next=True)
    )


async def _read(
    stream: str, read: Callable[[], Awaitable[RawStreamMsg]], patience_s: float | None = None
) -> RawStreamMsg | None:
    patience_s = READ_PATIENCE_S if patience_s is None else patience_s
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            return await read()
        except NotFoundError:
            return None
        except TRANSIENT as exc:
            if asyncio.get_running_loop().time() > deadline:
                msg = f"the broker did not answer a read of {stream} within {patience_s:g} s"
                raise BrokerUnavailable(msg) from exc
            await asyncio.sleep(RETRY_PAUSE_S)
