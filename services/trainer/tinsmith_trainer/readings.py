"""Who reads a model's tensors beside the torch thread, and the wait for them to end.

A digest and a copy need the weights and moments as they are, and no forward or backward pass
changes those. So they are read on threads of their own while the next passes run; only the next
step or load waits for them, for as long as they still take.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")

READERS = 2
"""Threads. Not those of the event loop, which are busy for long while checkpoints are written."""


class Readings:
    """Reading of models that is under way, by model."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._running: dict[str, set[asyncio.Future[Any]]] = {}
        self.longest_wait_s = 0.0
        """The longest that a change has waited: how long reading has ever stopped a model."""

    def start(self, model_id: str, read: Callable[[], R]) -> asyncio.Future[R]:
        """Begin ``read``, which must not change the model; the model's next change waits for it."""
        reading = asyncio.get_running_loop().run_in_executor(self._threads, read)
        running = self._running.setdefault(model_id, set())
        running.add(reading)
        reading.add_done_callback(running.discard)
        return reading

    async def ended(self, model_id: str) -> None:
        """Until nobody reads the model any more."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while running := self._running.get(model_id):
            await asyncio.wait(running)
        self._running.pop(model_id, None)
        waited_s = clock() - began
        metrics.PAUSE_SECONDS.observe(waited_s)
        self.longest_wait_s = max(self.longest_wait_s, waited_s)

    def close(self) -> None:
        """Do not wait for those that still read."""
        self._threads.shutdown(wait=False, cancel_futures=True)
