"""The janitor: forgets the payloads of runs that have been over for longer than they are kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.bus.views import View
from tinsmith.messages import table
from tinsmith_checkpointer.retention import RetentionConfig, why_due
from tinsmith_checkpointer.rounds import keep_going_round

if TYPE_CHECKING:
    from tinsmith.messages.registry import RunKey
    from tinsmith.service import ServiceContext


class Janitor:
    """Goes round every so often. Several may: to forget twice is the same as once."""

    def __init__(self, context: ServiceContext) -> None:
        bus = context.bus
        self._seals = context.seals
        self._log = context.log
        self._config = context.config.section(RetentionConfig)
        self._keys = View(bus.table(table.RUN_KEYS), lambda _: "")
        self._runs = bus.table(table.RUNS)
        self._sessions = bus.table(table.SESSIONS)

    async def run(self) -> None:
        """Until cancelled; ends at once when everything is kept for ever."""
        if not self._config.is_needed:
            return
        watches = (self._keys.watch,)
        await keep_going_round(self.go_round, watches, self._log, every_s=self._config.check_s)

    async def go_round(self) -> None:
        """Forget what is due now."""
        for entry in self._keys:
            reason = await self._why_due(entry)
            if reason is not None:
                await self._seals.forget(entry.model_id, reason)
                self._log.info("run forgotten", model_id=entry.model_id, reason=reason)

    async def _why_due(self, entry: RunKey) -> str | None:
        run = await self._runs.get(ids.token(entry.model_id))
        if run is None:  # imported: whoever did that decides; or about to be created
            return None
        session = await self._sessions.get(ids.token(run.session_id))
        return why_due(self._config, run, session, now_ns=time.time_ns())
