"""What holds the log of a run though its time is over: what names a place in it, or may yet."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tinsmith import ids
from tinsmith.bus.views import View
from tinsmith.messages import table
from tinsmith_checkpointer.expiry import is_expired
from tinsmith_checkpointer.references import entries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.bus import Bus
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.registry import Sampler, Session

Hold = Literal["living", "checkpoints", "samplers", "uncounted"]


@dataclass(frozen=True)
class Holds:
    """As the registry was when this was made by ``now``.

    A checkpoint says which state of which log it stands for: without that log nobody could show
    how it came about. A sampling session that lives may log samples of a run, and follow its
    weights. Nothing that begins to hold a log later can come from anywhere but such as these.
    """

    checkpoints: frozenset[str]
    """Runs that checkpoints name which can be read."""
    samplers: frozenset[str]
    """Runs whose weights are drawn from."""

    @classmethod
    async def now(cls, bus: Bus, sessions: dict[str, Session]) -> Holds:
        """Read the registry; ``sessions`` by their ids, read before."""
        checkpoints: View[Checkpoint] = View(bus.table(table.CHECKPOINTS), lambda _: "")
        samplers: View[Sampler] = View(bus.table(table.SAMPLERS), lambda _: "")
        now_ns = time.time_ns()
        return cls(
            checkpoints=frozenset(
                checkpoint.log_model_id or checkpoint.model_id
                for checkpoint in await entries(checkpoints)
                if not is_expired(checkpoint, now_ns=now_ns)
            ),
            samplers=frozenset(
                run
                for sampler in await entries(samplers)
                if (one := sessions.get(sampler.session_id)) is not None and one.status == "active"
                for run in _drawn_from(sampler)
            ),
        )

    async def of(self, bus: Bus, model_id: str) -> Hold | None:
        """What holds the run's log; None: nothing. Raises BrokerUnavailable."""
        if (named := self.named(model_id)) is not None:
            return named
        if await _is_wanted(bus, model_id):
            return "living"
        return None if await bus.pruning.is_counted(model_id) else "uncounted"

    def named(self, model_id: str) -> Hold | None:
        """What in the registry held the run's log then."""
        if model_id in self.checkpoints:
            return "checkpoints"
        return "samplers" if model_id in self.samplers else None


async def _is_wanted(bus: Bus, model_id: str) -> bool:
    """Whether a trainer has the model, or may take it, or has operations of it to answer."""
    token = ids.token(model_id)
    return await bus.is_queued(table.PLACEMENTS, pool="*", model=token) or await bus.is_queued(
        table.OPS, model=token, seq="*"
    )


def _drawn_from(sampler: Sampler) -> Iterator[str]:
    if sampler.follows is not None:
        yield sampler.follows
    if sampler.model_path is not None:
        yield ids.parse_path(sampler.model_path).model_id
    if sampler.adapter is not None:
        yield sampler.adapter.model_id
        if sampler.adapter.published is not None:
            yield sampler.adapter.published.lineage_id
