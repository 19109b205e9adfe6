"""What an engine has in hand: each row or score a task, and how all of one request are ended."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from tinsmith.errors import Gone, ServerError

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class Pending:
    """Tasks by request; several may be of one."""

    def __init__(self) -> None:
        self._running: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)
        self._ended: dict[asyncio.Task[Any], Exception] = {}
        self._closed: ServerError | None = None

    def __len__(self) -> int:
        return sum(map(len, self._running.values()))

    async def run(self, request_id: str, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives; Gone after ``abort``, ServerError after ``close``."""
        if self._closed is not None:
            work.close()
            raise self._closed
        task = asyncio.create_task(work, name=f"row of {request_id}")
        self._running[request_id].add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if (reason := self._ended.get(task)) is not None:
                raise reason from None
            raise
        finally:
            self._ended.pop(task, None)
            self._running[request_id].discard(task)
            if not self._running[request_id]:
                del self._running[request_id]

    def abort(self, request_id: str) -> None:
        """End the tasks of a request."""
        for task in self._running.get(request_id, ()):
            self._end(task, Gone(f"request_id: {request_id} was aborted"))

    def close(self, reason: str) -> None:
        """End all tasks, and take no more."""
        self._closed = self._closed or ServerError(reason)
        for tasks in self._running.values():
            for task in tasks:
                self._end(task, ServerError(reason))

    def _end(self, task: asyncio.Task[Any], reason: Exception) -> None:
        self._ended.setdefault(task, reason)
        task.cancel()
