"""The dashboard of one gateway: what each caller may see of the installation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tinsmith_gateway.dashboard.curves import CurveReader
from tinsmith_gateway.dashboard.deltas import DeltaReader
from tinsmith_gateway.dashboard.failures import FailureReader
from tinsmith_gateway.dashboard.spending import spending
from tinsmith_gateway.dashboard.tail import TailReader
from tinsmith_gateway.dashboard.watching import Watching
from tinsmith_gateway.wire import listings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.bus import Bus
    from tinsmith.messages.registry import Run as RunEntry
    from tinsmith.overview import Overview
    from tinsmith.overview.facts import Lineage, Run
    from tinsmith.sealing import Seals
    from tinsmith_gateway.auth import Caller
    from tinsmith_gateway.dashboard.curves import Curves
    from tinsmith_gateway.registry import Registry

LIVE_SHOWN = 50
CHECKPOINTS_SHOWN = 20
LINEAGES_SHOWN = 20
USERS_SHOWN = 50


class Desk:
    """Answers what the routes ask."""

    def __init__(
        self, bus: Bus, registry: Registry, seals: Seals, operators: Sequence[str]
    ) -> None:
        """``operators``: owners, by name or id, who see what is others'."""
        self.watching = Watching(bus, registry)
        self._registry = registry
        self._seals = seals
        self._operators = frozenset(operators)
        self._curves = CurveReader(bus)
        self._tails = TailReader(bus)
        self._deltas = DeltaReader(bus)
        self._failures = FailureReader(bus, seals)

    def is_operator(self, caller: Caller) -> bool:
        """Whether the caller sees the services, and the runs of all owners."""
        return not self._operators.isdisjoint((caller.owner, caller.name))

    async def overview(self, caller: Caller) -> dict[str, Any]:
        """What goes on now. Raises BrokerUnavailable."""
        seen = await self.watching.look()
        owner = None if self.is_operator(caller) else caller.owner
        runs = self._runs(seen, owner)
        own = {run.model_id for run in runs}
        live = [run for run in runs if run.is_live][:LIVE_SHOWN]
        pace = self.watching.pace
        lineages = [one for one in seen.lineages if one.lineage_id in own][:LINEAGES_SHOWN]
        told = {
            "me": {"owner": caller.owner, "name": caller.name, "is_operator": owner is None},
            "runs": live,
            "live_count": sum(run.is_live for run in runs),
            "run_count": len(runs),
            "tokens_per_s": {k: v for k, v in pace.tokens_per_s().items() if k in own},
            "models": [
                msgspec.to_builtins(model) | {"instances": len(model.instances)}
                for model in seen.models
            ],
            "lineages": [await self._lineage(one, last=1) for one in lineages],
            "checkpoints": self._checkpoints(runs),
            "errors": await self._failures.read(
                one for one in reversed(pace.failures) if one.model_id in own
            ),
            "usage": spending(self._registry, owner)[:USERS_SHOWN],
        }
        if owner is None:
            told |= {
                "services": seen.services,
                "queues": seen.queues,
                "problems": [one for one in seen.problems if one.what not in seen.unknown],
            }
        return told

    async def runs(self, caller: Caller) -> list[Run]:
        """All that the caller may see, newest first. Raises BrokerUnavailable."""
        owner = None if self.is_operator(caller) else caller.owner
        return self._runs(await self.watching.look(), owner)

    async def run(self, caller: Caller, model_id: str) -> dict[str, Any]:
        """One run: the end of its log, its checkpoints, its versions of weights.

        Raises:
            NotFound: there is none, or it is another's.
            BrokerUnavailable: the broker is away.
        """
        entry = await self._entry(caller, model_id)
        seen = await self.watching.look()
        found = next((run for run in seen.runs if run.model_id == model_id), None)
        lineage = next((one for one in seen.lineages if one.lineage_id == model_id), None)
        checkpoints = self._registry.listed_checkpoints(model_id)[:CHECKPOINTS_SHOWN]
        return {
            "run": found,
            "user_metadata": entry.user_metadata,
            "tokens_per_s": self.watching.pace.tokens_per_s().get(model_id, 0.0),
            "log": await self._tails.read(model_id, await self._seals.of(model_id)),
            "checkpoints": [listings.checkpoint(one) for one in checkpoints],
            "lineage": None if lineage is None else await self._lineage(lineage),
            "commands": {
                "replay": f"tinsmith replay {model_id}",
                "verify": f"tinsmith log verify {model_id}",
                "show": f"tinsmith log show {model_id}",
            },
        }

    async def curves(self, caller: Caller, model_id: str, *, after: int, points: int) -> Curves:
        """See ``CurveReader.read``; raises NotFound as ``run`` too."""
        await self._entry(caller, model_id)
        seal = await self._seals.of(model_id)
        return await self._curves.read(model_id, seal, after=after, points=points)

    async def _entry(self, caller: Caller, model_id: str) -> RunEntry:
        owner = caller.owner
        if self.is_operator(caller):
            owner = await self._registry.owner_of_run(model_id) or owner
        return await self._registry.run(owner, model_id)

    def _runs(self, seen: Overview, owner: str | None) -> list[Run]:
        return [run for run in seen.runs if owner in (None, run.owner)]

    def _checkpoints(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        found = (
            one
            for run in runs
            if run.checkpoints
            for one in self._registry.listed_checkpoints(run.model_id)
        )
        newest = sorted(found, key=lambda one: one.created_ns, reverse=True)[:CHECKPOINTS_SHOWN]
        return [listings.checkpoint(one) | {"run_id": one.model_id} for one in newest]

    async def _lineage(self, lineage: Lineage, *, last: int = 0) -> dict[str, Any]:
        """With its versions, or the ``last`` of them."""
        versions = await self._deltas.read(lineage)
        told: dict[str, Any] = msgspec.to_builtins(lineage)
        return told | {"versions": versions[-last:]}
