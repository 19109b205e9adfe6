"""Waiting for room: what was computed is not thrown away because a disk or a stream is full."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from tinsmith.errors import StorageFull
from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinsmith.bus import Encoded, LogWriter
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.ops import OpResult
    from tinsmith.service import ServiceContext

T = TypeVar("T")

ROOM_POLL_S = 1.0


class Patience:
    """Writes again and again; meanwhile the clients of this trainer are told why they wait."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def until_written(self, write: Callable[[], Awaitable[T]]) -> T:
        """What ``write()`` gives, once it does not raise StorageFull."""
        while True:
            try:
                written = await write()
            except StorageFull as exc:
                if not self._context.trouble:
                    self._context.log.error("waiting for room", error=str(exc))  # noqa: TRY400
                self._context.trouble = f"training waits for room: {exc}"
            else:
                self._context.trouble = ""
                return written
            await asyncio.sleep(ROOM_POLL_S)


class PatientWriter:
    """A model's log, written with patience."""

    def __init__(self, writer: LogWriter, patience: Patience) -> None:
        self._writer = writer
        self._patience = patience
        self.epoch = writer.epoch
        self.seal = writer.seal

    async def commit(self, seq: int, op: Encoded, result: OpResult, *, state_blake3: str) -> None:
        """See ``LogWriter.commit``."""
        with metrics.COMMIT_SECONDS.time():
            await self._patience.until_written(
                lambda: self._writer.commit(seq, op, result, state_blake3=state_blake3)
            )

    async def save_state(self, seq: int, parts: dict[str, BlobRef], *, state_blake3: str) -> None:
        """See ``LogWriter.save_state``."""
        await self._patience.until_written(
            lambda: self._writer.save_state(seq, parts, state_blake3=state_blake3)
        )
