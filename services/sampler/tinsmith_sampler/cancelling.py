"""Requests in hand, each of which can be stopped from outside."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from tinsmith.errors import Gone

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from tinsmith.messages.services import SampleCancelled

T = TypeVar("T")


class Cancellable:
    """Work by request id."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._stopped: set[str] = set()

    async def run(self, request_id: str, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` answers; Gone when the request is cancelled before that."""
        task = asyncio.create_task(work, name=f"work {request_id}")
        self._running[request_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            if request_id in self._stopped:
                msg = f"request_id: {request_id} was cancelled by its client"
                raise Gone(msg) from None
            raise  # the process ends, and the request goes to another
        finally:
            self._running.pop(request_id, None)
            self._stopped.discard(request_id)

    def cancel(self, cancelled: SampleCancelled) -> None:
        """Stop the work on a request, if it is here."""
        if (task := self._running.get(cancelled.request_id)) is not None:
            self._stopped.add(cancelled.request_id)
            task.cancel()
