"""Polls that wait for a result, by request id; those that leave, leave nothing behind."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Waiters:
    """Wakes all who wait for one request, or everybody."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._events.values()))

    def request_ids(self) -> set[str]:
        """What is waited for."""
        return set(self._events)

    @contextmanager
    def waiting(self, request_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the request may have a result."""
        event = asyncio.Event()
        self._events.setdefault(request_id, set()).add(event)
        try:
            yield event
        finally:
            events = self._events[request_id]
            events.discard(event)
            if not events:
                del self._events[request_id]

    def wake(self, request_id: str) -> None:
        """Sets the events of one request."""
        for event in self._events.get(request_id, ()):
            event.set()

    def wake_all(self) -> None:
        """Sets all events."""
        for request_id in tuple(self._events):
            self.wake(request_id)


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Until ``event`` is set, or for ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
