"""An engine on a model of its own, whole: no adapters beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tinsmith_sampler.torch_engine import TorchEngine

if TYPE_CHECKING:
    from tinsmith_sampler.engine import Generated, Row, Scored, Scoring


class WholeEngine(TorchEngine):
    """An engine whose model itself is what a request names as its adapter."""

    async def generate(self, row: Row) -> Generated:
        """Draw one continuation."""
        return await super().generate(replace(row, adapter=None))

    async def score(self, scoring: Scoring) -> Scored:
        """Score a prompt."""
        return await super().score(replace(scoring, adapter=None))
