"""Goes round what exists and ends what is over: checkpoints, samplers, sessions, old counts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec import structs

from tinsmith import ids
from tinsmith.bus.views import View
from tinsmith.messages import table
from tinsmith.metrics import names as metrics
from tinsmith_checkpointer.collection import Collection
from tinsmith_checkpointer.discarding import Discards
from tinsmith_checkpointer.expiry import is_expired, is_left_over, is_over
from tinsmith_checkpointer.metering import account_of, key_of
from tinsmith_checkpointer.references import References
from tinsmith_checkpointer.retention import FOREVER, RetentionConfig
from tinsmith_checkpointer.rounds import keep_going_round
from tinsmith_checkpointer.sweep import Sweep

if TYPE_CHECKING:
    from tinsmith.bus import Subscription
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.registry import Session
    from tinsmith.service import ServiceContext
    from tinsmith_checkpointer.config import CheckpointerConfig

DAY_S = 86400.0
FIRST_COLLECTION_S = 3600.0  # after the start, at the latest


class Upkeep:
    """Several may go round at the same time: to end something twice is the same as once."""

    def __init__(self, context: ServiceContext, config: CheckpointerConfig) -> None:
        bus = context.bus
        self._log = context.log
        self._config = config
        self._discards = Discards(bus)
        self._checkpoints = View(bus.table(table.CHECKPOINTS), lambda _: "")
        self._samplers = View(bus.table(table.SAMPLERS), lambda _: "")
        self._sessions = View(bus.table(table.SESSIONS), lambda _: "")
        self._keys = View(bus.table(table.RUN_KEYS), lambda key: ids.session_of(key.model_id))
        self._usage = View(bus.table(table.USAGE), lambda _: "")
        self._discarded = bus.table(table.DISCARDED)
        self._runs = View(bus.table(table.RUNS), lambda run: run.session_id)
        self._pruned = View(bus.table(table.PRUNED), lambda _: "")
        self._retention = context.config.section(RetentionConfig)
        references, grace_s = References(bus, context.seals), config.grace_s
        self._sweep = Sweep(bus, context.blobs, references, context.log, grace_s=grace_s)
        self._collection = Collection(bus, context.blobs, references, grace_s=grace_s)
        self._collect_s = min(config.collect_hours * 3600, FIRST_COLLECTION_S) + time.monotonic()

    async def run(self) -> None:
        """Until cancelled."""
        views: list[View[Any]] = [self._checkpoints, self._samplers, self._sessions]
        views += [self._keys, self._usage, self._runs, self._pruned]
        watches = (*(view.watch for view in views), self._watch_discarded)
        await keep_going_round(self.go_round, watches, self._log, every_s=self._config.upkeep_s)

    async def _watch_discarded(self) -> Subscription:
        return await self._discarded.watch(self._sweep.note)

    async def go_round(self) -> None:
        """End what is over now."""
        await self._end_checkpoints()
        await self._end_samplers()
        await self._end_sessions()
        await self._end_usage()
        if self._config.free_bytes:
            await self._sweep.run()
            await self._collect()

    async def _collect(self) -> None:
        every_s, now_s = self._config.collect_hours * 3600, time.monotonic()
        if every_s == 0 or now_s < self._collect_s:
            return
        freed = await self._collection.carry_out(await self._collection.plan())
        self._collect_s = now_s + every_s
        metrics.FREED_BYTES.inc(freed)
        self._log.info("blob store collected", freed_bytes=freed)

    async def _end_checkpoints(self) -> None:
        """Expired ones lose their parts at once, and their entry when nobody asks any more."""
        now_ns = time.time_ns()
        for entry in self._checkpoints:
            key = ids.checkpoint_key(ids.CheckpointPath(entry.model_id, entry.kind, entry.name))
            if entry.parts and is_expired(entry, now_ns=now_ns):
                await self._discards.of_checkpoint(key, entry)
                await self._checkpoints.table.update(key, lambda c: _emptied(c, now_ns))
                self._log.info("checkpoint expired", path=entry.path)
            elif is_expired(entry, now_ns=now_ns, since_s=self._config.expired_days * DAY_S):
                await self._checkpoints.table.delete(key)

    async def _end_samplers(self) -> None:
        now_ns = time.time_ns()
        for sampler in self._samplers:
            session = await self._sessions.get(ids.token(sampler.session_id))
            if is_left_over(sampler, session, now_ns=now_ns):
                await self._discards.of_sampler(sampler)
                await self._samplers.table.delete(ids.token(sampler.sampler_id))

    async def _end_sessions(self) -> None:
        now_ns, since_s = time.time_ns(), self._config.session_days * DAY_S
        for session in self._sessions:
            if is_over(session, now_ns=now_ns, since_s=since_s) and not self._is_awaited(session):
                await self._sessions.table.delete(ids.token(session.session_id))
                self._log.info("session forgotten", session_id=session.session_id)

    def _is_awaited(self, session: Session) -> bool:
        """Whether its end decides when a key or the log of one of its runs is destroyed."""
        retention = self._retention
        if retention.is_needed and self._keys.group(session.session_id):
            return True
        return any(
            retention.logs_kept_for(run, session) != FOREVER
            and self._pruned.peek(ids.token(run.model_id)) is None
            for run in self._runs.group(session.session_id)
        )

    async def _end_usage(self) -> None:
        oldest = (time.time() - self._config.usage_days * DAY_S) // 3600
        for used in self._usage:
            if used.hour < oldest:
                await self._usage.table.delete(key_of(used.hour, account_of(used)))


def _emptied(checkpoint: Checkpoint | None, now_ns: int) -> Checkpoint | None:
    """Without its parts; None when it was saved anew or kept meanwhile."""
    if checkpoint is None or not is_expired(checkpoint, now_ns=now_ns):
        return None
    return structs.replace(checkpoint, parts={}, size_bytes=0)
