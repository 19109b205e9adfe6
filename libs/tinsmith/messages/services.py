"""Liveness of services: pings on core NATS, and nothing that must not be lost."""

from __future__ import annotations

from typing import Literal

from tinsmith.messages.base import Message

ServiceName = Literal["gateway", "trainer", "sampler", "checkpointer"]


class QueuePlace(Message, frozen=True, kw_only=True):
    """Where a model stands that waits for its turn on a trainer."""

    turns: int  # of other models, before its next one
    tokens: int  # of those turns


class ServiceAlive(Message, frozen=True, kw_only=True):
    """Sent by every service about every two seconds, and once when it becomes ready."""

    service: ServiceName
    instance: str
    version: str
    base_models: tuple[str, ...] = ()
    load: dict[str, float] = {}  # e.g. queued, running, models
    trouble: str = ""  # why it cannot get on for now, for its clients
    places: dict[str, QueuePlace] = {}  # by model, of those that wait for a turn on a trainer
    pool: str = ""  # of a sampler: those of its kind
    labels: dict[str, str] = {}  # of a sampler: its engine, dtype and device
    is_taking: bool = True  # new work; one that drains or is in trouble does not
    metrics_url: str = ""  # of the listener that tells its metrics, as its own host names it


class SessionAlive(Message, frozen=True, kw_only=True):
    """A client's heartbeat, told by the gateway that got it to all the others."""

    session_id: str


class RequestTaken(Message, frozen=True, kw_only=True):
    """A gateway takes a request in, or lets a held one go; the others count it too."""

    request_id: str
    owner: str
    gateway: str  # who tells
    is_held: bool = False  # until others of its owner are done


class SampleReady(Message, frozen=True, kw_only=True):
    """A ping on core NATS: the result of this sampling request is stored now."""

    request_id: str


class SampleCancelled(Message, frozen=True, kw_only=True):
    """Whoever works on this sampling request may stop."""

    request_id: str


class AuditEntry(Message, frozen=True, kw_only=True):
    """Something that an owner did; kept in a stream, found by owner, day and topic."""

    owner: str
    topic: Literal["checkpoints", "keys", "logs", "projects"]
    event: str  # <resource>_<action>
    at_ns: int  # unix time
    details: dict[str, str] = {}
