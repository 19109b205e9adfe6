"""The one torch thread, and whose turn it is on it.

torch never runs on the event loop: a blocked loop misses the broker's pings, and the broker
then drops the connection. One thread, one op at a time: what a tenant's op computes is a
function of that op alone, so its bits do not depend on its neighbours.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tinsmith_trainer.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")


@dataclass(frozen=True)
class _Turn:
    call: Callable[[], Any]
    done: asyncio.Future[Any]


class Compute:
    """Runs functions on the torch thread, fairly among models."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._scheduler: Scheduler[_Turn] = Scheduler()
        self._work = asyncio.Event()
        self.busy_s = 0.0
        """Seconds that the thread has spent computing."""

    async def run(self, model_id: str, call: Callable[[], R], *, cost: int = 0) -> R:
        """Run ``call`` when it is the model's turn; ``cost`` is its number of tokens."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._scheduler.add(model_id, _Turn(call, done), cost=cost)
        self._work.set()
        return await done

    async def serve(self) -> None:
        """Give out turns until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            turn = self._scheduler.take()
            if turn is None:
                self._work.clear()
                continue
            if turn.done.cancelled():
                continue
            started = loop.time()
            try:
                result = await loop.run_in_executor(self._thread, turn.call)
            except Exception as exc:  # noqa: BLE001 - handed to the one who waits for it
                _settle(turn.done, error=exc)
            else:
                _settle(turn.done, result=result)
            self.busy_s += loop.time() - started

    def waiting(self, model_id: str) -> int:
        """How many turns ``model_id`` waits for."""
        return self._scheduler.waiting(model_id)

    def close(self) -> None:
        """End the thread after the call it is in."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _settle(
    future: asyncio.Future[Any], *, result: object = None, error: Exception | None = None
) -> None:
    if future.done():  # its model was dropped meanwhile
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
