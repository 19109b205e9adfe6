"""The consumers by which streams are read: one for work, one for what is kept."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from tinsmith.messages.base import Message

if TYPE_CHECKING:
    from tinsmith.messages.table import Queue

M = TypeVar("M", bound=Message)

IDLE_CONSUMER_S = 30.0  # without a request, then the broker forgets a reader: it has died


def work_consumer(
    queue: Queue[M], name: str, *, window: int, ack_wait_s: float, **tokens: str
) -> ConsumerConfig:
    """A durable consumer over the part of ``queue`` whose subject holds ``tokens``.

    ``max_deliver`` stays unlimited: on a work queue a message that ran out of deliveries would
    stay for ever and later ones would overtake it.
    """
    return ConsumerConfig(
        durable_name=name,
        filter_subject=queue.subject(**tokens),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_ack_pending=window,
        max_deliver=-1,
    )


@dataclass
class SharedConsumerConfig(ConsumerConfig):
    """What several take from, the one whose request has the lowest ``priority`` first."""

    priority_groups: list[str] | None = None
    priority_policy: str | None = None


def shared_consumer(config: ConsumerConfig, group: str) -> SharedConsumerConfig:
    """``config`` with requests of different priority, all of which name ``group``."""
    return SharedConsumerConfig(
        **vars(config), priority_groups=[group], priority_policy="prioritized"
    )


def reading_consumer(subject: str, first: int, *, headers_only: bool = False) -> ConsumerConfig:
    """A consumer for what a stream has on ``subject`` from a stream sequence on, in order.

    The broker forgets one that nothing is asked of for a while.
    """
    return ConsumerConfig(
        name=passing_name(),
        filter_subject=subject,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=first,
        ack_policy=AckPolicy.NONE,
        mem_storage=True,
        inactive_threshold=IDLE_CONSUMER_S,
        headers_only=headers_only or None,
    )


def passing_name() -> str:
    """For a consumer that nobody else names.

    A consumer with a name is asked for on a subject that ends with what it reads, so that the
    broker can tell who may read it.
    """
    return secrets.token_hex(12)
