"""An engine on a model of its own, whole: no adapters beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tinsmith_sampler.engine import Engine
from tinsmith_sampler.engine_memory import ModelMemory
from tinsmith_sampler.torch_engine import TorchEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tinsmith.weights.memory import StagedMemory
    from tinsmith_sampler.engine import Generated, Row, Scored, Scoring

    Pause = Callable[[], AbstractAsyncContextManager[None]]


class Whole(Engine, Protocol):
    """An engine whose model itself is what a request names as its adapter."""

    root: str
    """Of the weights, where they are those of a lineage; else empty."""

    keeps_folder: bool
    """Whether the model's folder has to stay for as long as the engine does."""

    patience_s: float
    """How long a request waits for its version before the checkpoint's files are loaded."""

    def memory(self, pause: Pause, lost: Callable[[], None]) -> StagedMemory:
        """Where the weights are, once it has started, for a receiver that writes them.

        ``pause`` is the memory's; ``lost`` is called when what was written may be gone.
        """

    def still(self) -> AbstractAsyncContextManager[None]:
        """In the block nothing is computed; whatever was, or waits, is forgotten before it."""


class WholeEngine(TorchEngine):
    """The built-in one."""

    keeps_folder = False
    patience_s = 60.0

    async def generate(self, row: Row) -> Generated:
        """Draw one continuation."""
        return await super().generate(replace(row, adapter=None))

    async def score(self, scoring: Scoring) -> Scored:
        """Score a prompt."""
        return await super().score(replace(scoring, adapter=None))

    def memory(self, pause: Pause, lost: Callable[[], None]) -> ModelMemory:  # noqa: ARG002 - it lasts
        """See ``Whole``."""
        return ModelMemory(self.places, pause)
