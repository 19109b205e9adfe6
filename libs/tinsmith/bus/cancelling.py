"""Cancellation that is not lost.

``asyncio.wait_for`` of Python 3.11 swallows a cancellation that comes together with the result
(python/cpython#86296). The client waits with it for every answer, so a task that is cancelled
while it talks to the broker would just go on, and a service would not end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from nats.aio.client import Client

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from nats.aio.msg import Msg

T = TypeVar("T")


async def cancellable(awaitable: Awaitable[T]) -> T:
    """Its result; CancelledError if the task was cancelled meanwhile, whoever has caught that."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    result = await awaitable
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


class CancellableClient(Client):
    """A client whose requests, JetStream's too, can be cancelled at any moment."""

    async def request(self, *args: Any, **options: Any) -> Msg:  # noqa: ANN401 - the client's own
        """See ``nats.aio.client.Client.request``."""
        return await cancellable(super().request(*args, **options))
