"""The one torch thread, and whose turn it is on it.

torch never runs on the event loop: a blocked loop misses the broker's pings, and the broker
then drops the connection. One thread, one pass at a time. An op of many passes does not hold up
the others: between any two of its passes the turn may go to another model.

A pass is one op's alone, unless there is somebody who makes passes of several. Then it takes along
those of other models that wait at that moment. Nobody waits for company: an idle trainer starts at
once, and what arrives meanwhile is the next pass.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tinsmith.metrics import names as metrics
from tinsmith_trainer.readings import Readings
from tinsmith_trainer.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from tinsmith_trainer.parts import Made, Outcome, Part
    from tinsmith_trainer.scheduler import Place

R = TypeVar("R")


class Mixer(Protocol):
    """Makes one pass of the parts of several ops."""

    def can_join(self, parts: Sequence[Part]) -> bool:
        """Whether they may share a pass."""

    def together(self, parts: Sequence[Part]) -> list[Outcome | None]:
        """What came of each; None of one that must be made alone after all."""


@dataclass(frozen=True)
class _Returned(Generic[R]):
    """An op is through with all its passes."""

    value: R


@dataclass(frozen=True)
class _Turn:
    call: Callable[[Outcome | None], Any]
    done: asyncio.Future[Any]
    part: Part | None = None  # of a pass that may have others


class Compute:
    """Runs functions on the torch thread, fairly among models."""

    def __init__(self, mixer: Mixer | None = None) -> None:
        """Without a ``mixer`` every pass is one op's alone."""
        self._mixer = mixer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._scheduler: Scheduler[_Turn] = Scheduler()
        self._idle: deque[_Turn] = deque()  # what is done when there is nothing else
        self._work = asyncio.Event()
        self.readings = Readings()
        """Those who read models beside the thread."""
        self._busy_s = 0.0  # of turns that have ended
        self._began: float | None = None  # the present turn

    async def run(self, model_id: str, call: Callable[[], R], *, cost: int = 0) -> R:
        """Run ``call`` when it is the model's turn; ``cost`` is its number of tokens."""
        result: R = await self._turn(model_id, lambda _: call(), cost=cost)
        return result

    async def run_idle(self, call: Callable[[], R]) -> R:
        """Run ``call`` when no model waits for a turn; whoever comes meanwhile waits for it."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._idle.append(_Turn(lambda _: call(), done))
        self._work.set()
        return await done

    async def run_passes(self, model_id: str, passes: Generator[Part, Made | None, R]) -> R:
        """Run ``passes`` to its end, each part of it when it is the model's turn.

        What it yields is what its next pass is made of.
        """
        part: Part | None = None
        while True:
            cost = 0 if part is None else part.tokens
            step = await self._turn(
                model_id, lambda outcome: _advance(passes, outcome), cost=cost, part=part
            )
            if isinstance(step, _Returned):
                result: R = step.value
                return result
            part = step

    async def _turn(
        self,
        model_id: str,
        call: Callable[[Outcome | None], Any],
        *,
        cost: int,
        part: Part | None = None,
    ) -> Any:  # noqa: ANN401 - what ``call`` returns
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._scheduler.add(model_id, _Turn(call, done, part), cost=cost)
        self._work.set()
        return await done

    async def serve(self) -> None:
        """Give out turns until cancelled."""
        while True:
            await self._work.wait()
            turn = self._scheduler.take() or (self._idle.popleft() if self._idle else None)
            if turn is None:
                self._work.clear()
            elif not turn.done.cancelled():
                await self._carry_out([turn, *await self._company(turn)])

    async def _company(self, turn: _Turn) -> list[_Turn]:
        """Turns of other models whose passes can be made with the one of ``turn``."""
        if self._mixer is None or turn.part is None:
            return []
        # What else is waiting is cheap, and may lead to a pass that can join; once each, so that
        # nobody who has much of it holds up the passes.
        for cheap in self._scheduler.take_beside(lambda other: other.part is None):
            if not cheap.done.cancelled():
                await self._carry_out([cheap])
        parts = [turn.part]

        def joins(other: _Turn) -> bool:
            if other.part is None or other.done.cancelled():
                return False
            if self._mixer is None or not self._mixer.can_join([*parts, other.part]):
                return False
            parts.append(other.part)
            return True

        return self._scheduler.take_beside(joins)

    async def _carry_out(self, turns: list[_Turn]) -> None:
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        if parts := [turn.part for turn in turns if turn.part is not None]:
            tokens = sum(part.tokens for part in parts)
            metrics.TRAINER_TOKENS.inc(tokens)
            metrics.PASS_TOKENS.observe(tokens)
            metrics.PASS_OPS.observe(len(parts))
        for turn, settled in zip(
            turns, await loop.run_in_executor(self._thread, self._results, turns), strict=True
        ):
            _settle(turn.done, settled)
        self._busy_s += loop.time() - self._began
        self._began = None
        # The model's next op is perhaps ready, and may be the one whose turn it is.
        await asyncio.sleep(0)

    def _results(self, turns: list[_Turn]) -> list[_Returned[Any] | Exception]:
        """On the thread: what the calls of ``turns`` return or raise, after their pass if any."""
        outcomes: Sequence[Outcome | None] = [None for _ in turns]
        parts = [turn.part for turn in turns if turn.part is not None]
        if self._mixer is not None and len(parts) > 1:
            outcomes = self._mixer.together(parts)
        return [_call(turn, outcome) for turn, outcome in zip(turns, outcomes, strict=True)]

    @property
    def busy_s(self) -> float:
        """Seconds that the thread has spent computing."""
        if self._began is None:
            return self._busy_s
        return self._busy_s + asyncio.get_running_loop().time() - self._began

    @property
    def turn_s(self) -> float:
        """Seconds since the present turn began; 0 between turns."""
        return 0.0 if self._began is None else asyncio.get_running_loop().time() - self._began

    def places(self) -> dict[str, Place]:
        """Where each model stands that waits for its turn."""
        return self._scheduler.places()

    def close(self) -> None:
        """End the thread after the call it is in."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.readings.close()


def _advance(
    passes: Generator[Part, Made | None, R], outcome: Outcome | None
) -> Part | _Returned[R]:
    try:
        if isinstance(outcome, Exception):
            return passes.throw(outcome)
        return passes.send(outcome)
    except StopIteration as end:  # which no future can carry
        return _Returned(end.value)


def _call(turn: _Turn, outcome: Outcome | None) -> _Returned[Any] | Exception:
    try:
        return _Returned(turn.call(outcome))
    except Exception as exc:  # noqa: BLE001 - handed to the one who waits for it
        return exc


def _settle(future: asyncio.Future[Any], settled: _Returned[Any] | Exception) -> None:
    if future.done():  # its model was dropped meanwhile
        return
    if isinstance(settled, Exception):
        future.set_exception(settled)
    else:
        future.set_result(settled.value)
