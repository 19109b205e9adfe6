"""Prunes the logs of runs that ended longer ago than logs are kept, and that nothing holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tinsmith.bus.views import View
from tinsmith.messages import table
from tinsmith_checkpointer.holds import Hold, Holds
from tinsmith_checkpointer.references import entries
from tinsmith_checkpointer.retention import RetentionConfig, why_prunable
from tinsmith_checkpointer.rounds import keep_going_round

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from tinsmith.bus import Bus
    from tinsmith.messages.anchors import PrunedLog
    from tinsmith.messages.registry import Run, Session

BATCH = 200  # logs that one anchor says are taken away

LogFate = Hold | Literal["policy", "due", "begun", "pruned"]
"""Why the log of a run is kept, or what becomes or has become of it."""


@dataclass
class LogPlan:
    """What is to become of logs; of those that are not named nobody says that they may go."""

    fates: dict[str, LogFate] = field(default_factory=dict)
    due: dict[str, str] = field(default_factory=dict)
    """The policy, by run."""
    begun: list[PrunedLog] = field(default_factory=list)
    """Marked, and maybe not all gone."""
    removed: dict[str, PrunedLog] = field(default_factory=dict)
    """Nothing was left of them."""


class Pruner:
    """Several may go round at the same time: to prune twice is the same as once."""

    def __init__(
        self, bus: Bus, config: RetentionConfig, logger: BoundLogger, *, instance: str
    ) -> None:
        self._bus = bus
        self._config = config
        self._log = logger
        self._instance = instance

    async def run(self) -> None:
        """Until cancelled; without a policy it only ends what was begun under another one."""
        await keep_going_round(self.go_round, (), self._log, every_s=self._config.check_s)

    async def go_round(self) -> None:
        """Prune what is due now."""
        await self.carry_out(await self.plan())

    async def plan(self) -> LogPlan:
        """What is due, and what holds the rest; nothing is changed.

        Raises:
            BrokerUnavailable: something could not be read.
        """
        runs: View[Run] = View(self._bus.table(table.RUNS), lambda _: "")
        made = LogPlan()
        for mark in (await self._bus.pruning.marks()).values():
            made.fates[mark.model_id] = "pruned" if mark.is_removed else "begun"
            if mark.is_removed:
                made.removed[mark.model_id] = mark
            else:
                made.begun.append(mark)
        if not self._config.prunes:
            return made
        sessions = await self._sessions()
        holds = await Holds.now(self._bus, sessions)
        now_ns = time.time_ns()
        for run in await entries(runs):
            if run.model_id in made.fates:
                continue
            session = sessions.get(run.session_id)
            reason = why_prunable(self._config, run, session, now_ns=now_ns)
            made.fates[run.model_id] = await self._fate(run, session, reason, holds)
            if reason is not None and made.fates[run.model_id] == "due":
                made.due[run.model_id] = reason
        if made.due:
            await self._look_again(made)
        return made

    async def _look_again(self, made: LogPlan) -> None:
        """A trainer that had the model when checkpoints were read may have saved one since."""
        holds = await Holds.now(self._bus, await self._sessions())
        for model_id in tuple(made.due):
            if (hold := holds.named(model_id)) is not None:
                made.fates[model_id] = hold
                del made.due[model_id]

    async def carry_out(self, plan: LogPlan) -> int:
        """Prune what is due and end what was begun; how many logs that was.

        Raises:
            ServerError: the broker lets no log be pruned, or is away; it is made up for.
        """
        if not (plan.due or plan.begun):
            return 0
        await self._bus.pruning.require_allowed()
        marked = list(plan.begun)
        for model_id, reason in plan.due.items():
            mark = await self._bus.pruning.mark(model_id, reason=reason, by=self._instance)
            if mark is not None:  # else it has no log: it was never begun
                marked.append(mark)
        for first in range(0, len(marked), BATCH):
            await self._bus.pruning.remove(marked[first : first + BATCH])
        for mark in marked:
            self._log.info("log pruned", model_id=mark.model_id, reason=mark.reason)
        return len(marked)

    async def _fate(
        self, run: Run, session: Session | None, reason: str | None, holds: Holds
    ) -> LogFate:
        if session is not None and session.status == "active":
            return "living"
        if reason is None:
            return "policy"
        return await holds.of(self._bus, run.model_id) or "due"

    async def _sessions(self) -> dict[str, Session]:
        sessions: View[Session] = View(self._bus.table(table.SESSIONS), lambda _: "")
        return {session.session_id: session for session in await entries(sessions)}
