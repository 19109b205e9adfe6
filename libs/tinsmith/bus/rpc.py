"""Typed request and reply on core NATS, and typed events."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import msgspec
import nats.errors
import structlog

from tinsmith import tracing
from tinsmith.bus.subscription import Subscription
from tinsmith.bus.wire import TRANSIENT, check_size
from tinsmith.errors import BrokerUnavailable, InvalidRequest, NoResponder, ServerError, TooLarge
from tinsmith.messages.base import Failed, Message, encode
from tinsmith.messages.failures import to_exception, to_failed
from tinsmith.messages.table import PREFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from tinsmith.messages.table import Event, Rpc

log = structlog.get_logger(__name__)

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
M = TypeVar("M", bound=Message)

MAX_CONCURRENT = 64  # handlers of one subscription at once
FINISH_S = 5.0  # for handlers that run when their service stops
QUEUE_GROUP = "workers"
INBOXES = "_INBOX"  # begins the subjects of answers, whoever asks


async def call(client: Client, rpc: Rpc[Q, R], request: Q, *, timeout_s: float, **tokens: str) -> R:
    """Ask and wait for the answer; ``tokens`` fill the holes of the subject, here and below.

    Raises:
        TooLarge: the request is larger than the broker lets through.
        NoResponder: no service of that kind is running (known at once).
        BrokerUnavailable: no answer within ``timeout_s``; the request may have been served.
        TinsmithError: the one that the service answered with.
    """
    subject = rpc.subject(**tokens)
    payload = encode(request)
    _check_size(client, subject, payload)
    try:
        answer = await client.request(
            subject, payload, timeout=timeout_s, headers=tracing.carried() or None
        )
    except nats.errors.NoRespondersError as exc:
        service = subject.split(".")[3]
        msg = f"no {service} is running; start one with 'tinsmith {service}'"
        raise NoResponder(msg) from exc
    except TRANSIENT as exc:
        msg = f"no answer on {subject} within {timeout_s:g} s ({type(exc).__name__})"
        raise BrokerUnavailable(msg) from exc
    reply = rpc.replies.decode(answer.data)
    if isinstance(reply, Failed):
        raise to_exception(reply)
    return reply


async def serve(
    client: Client, rpc: Rpc[Q, R], handler: Callable[[Q], Awaitable[R]], **tokens: str
) -> Subscription:
    """Answer requests, several at a time; nats-py alone would run them one by one."""
    running: set[asyncio.Task[None]] = set()
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def on_message(msg: Msg) -> None:
        if not msg.reply.startswith(INBOXES):
            # Whoever asks names where the answer goes, and it is sent with our permissions.
            log.warning("request ignored", subject=msg.subject, reply=msg.reply)
            return
        await slots.acquire()
        task = asyncio.create_task(_answer(client, msg, rpc, handler), name=f"serve {rpc.template}")
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(lambda _: slots.release())

    sub = await client.subscribe(rpc.subject(**tokens), queue=QUEUE_GROUP, cb=on_message)

    async def close() -> None:
        # In this order: drain() does not wait for tasks that the callback has started.
        await sub.drain()  # type: ignore[no-untyped-call]
        if running:
            # Whoever asked for what takes longer asks again, and another answers.
            await asyncio.wait(running, timeout=FINISH_S)
            for task in tuple(running):
                task.cancel()

    return Subscription(close)


async def _answer(
    client: Client, msg: Msg, rpc: Rpc[Q, R], handler: Callable[[Q], Awaitable[R]]
) -> None:
    payload: bytes
    parent = (msg.headers or {}).get(tracing.HEADER)
    name = rpc.template.removeprefix(f"{PREFIX}.")
    try:
        # Nobody's trace begins here: what is asked for outside of one is not worth one.
        with tracing.span(name, parent=parent) if parent else nullcontext():
            payload = encode(await handler(rpc.requests.decode(msg.data)))
        _check_size(client, rpc.template, payload)
    except msgspec.ValidationError as exc:
        payload = encode(to_failed(InvalidRequest(f"{rpc.template}: {exc}")))
    except Exception as exc:
        log.warning("request failed", subject=rpc.template, exc_info=exc)
        payload = encode(to_failed(exc))
    try:
        await msg.respond(payload)
    except TRANSIENT as exc:
        log.warning("reply lost", subject=rpc.template, error=str(exc))


def _check_size(client: Client, subject: str, payload: bytes) -> None:
    """Whoever asked is told: a message over the limit would end the connection."""
    try:
        check_size(client, subject, payload)
    except ServerError as exc:
        raise TooLarge(str(exc)) from exc


async def emit(client: Client, event: Event[M], message: M, **tokens: str) -> None:
    """Tell whoever listens now; lost while the broker is away."""
    try:
        await client.publish(event.subject(**tokens), encode(message))
    except TRANSIENT as exc:
        log.debug("event lost", subject=event.template, error=str(exc))


async def listen(
    client: Client, event: Event[M], handler: Callable[[M], None], **tokens: str
) -> Subscription:
    """Call ``handler`` for every event; it must be quick and must not raise."""

    async def on_message(msg: Msg) -> None:
        try:
            message = event.messages.decode(msg.data)
        except msgspec.ValidationError as exc:
            log.warning("event not understood", subject=event.template, error=str(exc))
            return
        handler(message)

    sub = await client.subscribe(event.subject(**tokens), cb=on_message)

    async def close() -> None:
        await sub.unsubscribe()

    return Subscription(close)
