"""An engine that follows a lineage: its weights are replaced in place by each newer version.

It serves the newest version that it has proven, and nothing else. What was begun under a version
ends under it: a newer one is staged beside that, and swapped in when nobody draws. Whoever asks
for an older version is told that it is not here.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from tinsmith.errors import BrokerUnavailable, VersionUnmet
from tinsmith.messages.table import WEIGHTS_STATUS
from tinsmith.weights.receiver import Receiver, ReceiverSettings
from tinsmith_sampler.whole_engine import WholeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinsmith.bus import Bus
    from tinsmith.messages.weights import PublishedVersion, WeightsStatus
    from tinsmith.weights.receiver import Serving
    from tinsmith_sampler.model import TorchOptions
    from tinsmith_sampler.standing import Standing
    from tinsmith_sampler.whole_engine import Whole

log = structlog.get_logger(__name__)

_PLANES = {"bfloat16": "bf16", "float32": "fp32"}


class Follower:
    """One engine and its receiver."""

    def __init__(
        self,
        bus: Bus,
        options: TorchOptions,
        lineage_id: str,
        *,
        replica: str,
        figures: dict[str, float],
        standing: Standing,
        engine: Whole | None = None,
    ) -> None:
        """``figures`` are those of the liveness ping; the receiver's are kept there.

        ``engine`` is one on the base model that was not started; without it, the built-in one.
        """
        self.lineage_id = lineage_id
        self.engine: Whole = engine or WholeEngine(replace(options, quantization="none"))
        self._bus = bus
        self._settings = ReceiverSettings(
            lineage_id=lineage_id, replica=replica, plane=_PLANES[options.dtype]
        )
        self._figures = figures
        self._standing = standing
        self._version = 0  # that was told
        self._users = 0  # who draw
        self._is_pausing = False
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Load the base model, which nobody is served from, and begin to follow."""
        await self.engine.start()
        memory = self.engine.memory(self._pause, self._lost)
        self._receiver = Receiver(self._bus.lineages, memory, self._settings, self._tell)
        name = f"follow {self.lineage_id}"
        self._receiving = asyncio.create_task(self._receiver.run(), name=name)

    async def wait_ended(self) -> None:
        """As the engine's; also raises what has ended the receiver."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(), name=f"watch {self.lineage_id}")
            await self.engine.wait_ended()
            watching.cancel()

    async def _watch(self) -> None:
        closing = asyncio.create_task(self._bus.closed.wait(), name="weights' connection")
        try:
            await asyncio.wait({self._receiving, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        if self._bus.closed.is_set():
            raise BrokerUnavailable("the connection for weights was closed for good")
        if not self._receiving.cancelled():
            self._receiving.result()

    async def close(self) -> None:
        """End the receiver, then the engine."""
        self._standing.gone(self.lineage_id)
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)
        await self.engine.close()

    @asynccontextmanager
    async def hold(self, wanted: PublishedVersion) -> AsyncIterator[Whole]:
        """The engine with this very version, which stays for as long as the block.

        Raises:
            VersionUnmet: it has gone on to a newer one, or does not reach it; or, at the end of
                the block, its memory was found to hold other bits, so that no answer may leave.
        """
        serving = await self._reached(wanted)
        self._users += 1
        self.engine.root = serving.root
        try:
            yield self.engine
            if self._receiver.serving != serving:
                raise VersionUnmet(
                    f"weights: version {wanted.version} of {self.lineage_id} was found to hold "
                    "other bits while it was drawn from; send the request again"
                )
        finally:
            self._users -= 1
            self._changed.set()

    async def _reached(self, wanted: PublishedVersion) -> Serving:
        try:
            async with asyncio.timeout(self.engine.patience_s):
                while (serving := self._served(wanted)) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return serving
        except TimeoutError as exc:
            raise VersionUnmet(
                f"weights: version {wanted.version} of {self.lineage_id} was not reached in "
                f"{self.engine.patience_s:g} s; send the request again"
            ) from exc

    def _served(self, wanted: PublishedVersion) -> Serving | None:
        """None while it may come to be served; VersionUnmet when it will not be."""
        if self._is_pausing:
            return None
        status = self._receiver.status()
        if status.version < wanted.version and not status.wants_full:
            return None
        serving = self._receiver.require(exact_version=wanted.version)
        if serving.root != wanted.root:
            raise VersionUnmet(
                f"weights: version {wanted.version} of {self.lineage_id} is {serving.root} here, "
                f"not {wanted.root}; look at the lineage"
            )
        return serving

    @asynccontextmanager
    async def _pause(self) -> AsyncIterator[None]:
        """Who draws ends under what it has begun with, and nobody begins meanwhile."""
        self._is_pausing = True
        try:
            while self._users:
                self._changed.clear()
                await self._changed.wait()
            async with self.engine.still():
                yield
        finally:
            self._is_pausing = False
            self._changed.set()

    def _lost(self) -> None:
        """The engine may have other weights than those that were written."""
        self._receiver.doubt()

    async def _tell(self, status: WeightsStatus) -> None:
        self._changed.set()
        self._standing.hear(status)
        figures = {
            "weights_version": float(status.version),
            "weights_behind": float(status.behind),
            "weights_lag_ms": round(status.lag_ms, 1),
            "weights_stage_ms": round(status.stage_ms, 1),
            "weights_pause_ms": round(status.pause_ms, 1),
            "weights_received_bytes": float(status.received_bytes),
            "weights_mismatches": float(status.mismatches),
        }
        self._figures |= figures
        if status.version not in (0, self._version):
            self._version = status.version
            log.info("version served", lineage=self.lineage_id, root=status.root, **figures)
        await self._bus.emit(WEIGHTS_STATUS, status)
