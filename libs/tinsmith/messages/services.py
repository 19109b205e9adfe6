"""Liveness of services: pings on core NATS, and nothing that must not be lost."""

from __future__ import annotations

from typing import Literal

from tinsmith.messages.base import Message

ServiceName = Literal["gateway", "trainer", "sampler", "checkpointer"]


class ServiceAlive(Message, frozen=True, kw_only=True):
    """Sent by every service about every two seconds, and once when it becomes ready."""

    service: ServiceName
    instance: str
    version: str
    base_models: tuple[str, ...] = ()
    load: dict[str, float] = {}  # e.g. queued, running, models


class SessionAlive(Message, frozen=True, kw_only=True):
    """A client's heartbeat, told by the gateway that got it to all the others."""

    session_id: str


class SampleReady(Message, frozen=True, kw_only=True):
    """A ping on core NATS: the result of this sampling request is stored now."""

    request_id: str
