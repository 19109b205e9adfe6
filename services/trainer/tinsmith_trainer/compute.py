"""The one torch thread, and whose turn it is on it.

torch never runs on the event loop: a blocked loop misses the broker's pings, and the broker
then drops the connection. One thread, one pass of one op at a time: what a tenant's pass computes
is a function of its op alone, so its bits do not depend on its neighbours. An op of many passes
does not hold up the others: between any two of its passes the turn may go to another model.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinsmith_trainer.readings import Readings
from tinsmith_trainer.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tinsmith_trainer.scheduler import Place

R = TypeVar("R")


@dataclass(frozen=True)
class _Returned(Generic[R]):
    """An op is through with all its passes."""

    value: R


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
        self.readings = Readings()
        """Those who read models beside the thread."""
        self._busy_s = 0.0  # of turns that have ended
        self._began: float | None = None  # the present turn

    async def run(self, model_id: str, call: Callable[[], R], *, cost: int = 0) -> R:
        """Run ``call`` when it is the model's turn; ``cost`` is its number of tokens."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._scheduler.add(model_id, _Turn(call, done), cost=cost)
        self._work.set()
        return await done

    async def run_passes(self, model_id: str, passes: Generator[int, None, R]) -> R:
        """Run ``passes`` to its end, each part of it when it is the model's turn.

        What it yields is the cost of its next part, in tokens.
        """
        cost = 0
        while True:
            part = await self.run(model_id, lambda: _advance(passes), cost=cost)
            if isinstance(part, _Returned):
                return part.value
            cost = part

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
            self._began = loop.time()
            try:
                result = await loop.run_in_executor(self._thread, turn.call)
            except Exception as exc:  # noqa: BLE001 - handed to the one who waits for it
                _settle(turn.done, error=exc)
            else:
                _settle(turn.done, result=result)
            self._busy_s += loop.time() - self._began
            self._began = None
            # The model's next op is perhaps ready, and may be the one whose turn it is.
            await asyncio.sleep(0)

    @property
    def busy_s(self) -> float:
        """Seconds that the thread has spent computing."""
        if self._began is None:
            return self._busy_s
        return self._busy_s + asyncio.get_running_loop().time() - self._began

    def places(self) -> dict[str, Place]:
        """Where each model stands that waits for its turn."""
        return self._scheduler.places()

    def close(self) -> None:
        """End the thread after the call it is in."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.readings.close()


def _advance(passes: Generator[int, None, R]) -> int | _Returned[R]:
    try:
        return next(passes)
    except StopIteration as end:  # which no future can carry
        return _Returned(end.value)


def _settle(
    future: asyncio.Future[Any], *, result: object = None, error: Exception | None = None
) -> None:
    if future.done():  # its model was dropped meanwhile
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
