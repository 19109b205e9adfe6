"""One model in this trainer's hands: its ops in order, each executed and then committed.

    queue -> sequencer -> execute (compute) -> commit (log) -> ack, ping the gateways

Executing and committing overlap, in order: the next op runs while the record of the last one
is written. If a commit is refused, another trainer owns the model and everything here is void.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.bus import Encoded
from tinsmith.errors import ServerError
from tinsmith.messages import ops, table
from tinsmith.messages.base import Failed
from tinsmith_trainer.executor import Outcome
from tinsmith_trainer.recovery import why_broken
from tinsmith_trainer.sequencer import Sequencer

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from tinsmith.bus import Bus, Delivery, LogWriter
    from tinsmith_trainer.engine import Snapshot
    from tinsmith_trainer.executor import Executor
    from tinsmith_trainer.recovery import Recovered
    from tinsmith_trainer.snapshots import SnapshotPolicy

WINDOW = 4096
"""Ops of one model in hand at once. The first chunk of a call arrives last, so this bounds the
chunks of one call."""
ACK_WAIT_S = 30.0
UNCOMMITTED = 16  # executed ops whose records are not written yet
RETIRE_POLL_S = 0.2


@dataclass(frozen=True)
class _Executed:
    delivery: Delivery[ops.Op]
    outcome: Outcome
    snapshot: Snapshot | None = None  # of the model after it, when it is time for one


class Retired(Exception):
    """The model's session is over and all its futures have ended."""


class OwnedModel:
    """Runs one model until its session is over, or until it is fenced or cancelled."""

    def __init__(
        self,
        model_id: str,
        *,
        bus: Bus,
        writer: LogWriter,
        executor: Executor,
        recovered: Recovered,
        snapshots: SnapshotPolicy,
        logger: BoundLogger,
    ) -> None:
        self.model_id = model_id
        self._bus = bus
        self._writer = writer
        self._executor = executor
        self._log = logger
        self._broken = recovered.broken
        self._snapshots = snapshots
        self._sequencer: Sequencer[Delivery[ops.Op]] = Sequencer(recovered.next_seq)
        self._ready: asyncio.Queue[Delivery[ops.Op]] = asyncio.Queue()
        self._executed: asyncio.Queue[_Executed] = asyncio.Queue(UNCOMMITTED)
        self._in_hand: dict[int, Delivery[ops.Op]] = {}
        self._session_over = asyncio.Event()
        token = ids.token(model_id)
        self._worklist = bus.work(
            table.OPS,
            self._consumer(writer.epoch),
            window=WINDOW,
            ack_wait_s=ACK_WAIT_S,
            model=token,
            seq="*",
        )

    def _consumer(self, epoch: int) -> str:
        return f"model-{ids.token(self.model_id)}-{epoch}"

    def end_session(self) -> None:
        """The client is gone: finish what is in order, fail what waits for a missing op."""
        self._session_over.set()

    async def run(self) -> None:
        """Returns when the session is over and nothing is left to answer.

        Raises:
            Fenced: another trainer has taken the model.
        """
        earlier = range(self._writer.epoch - 1, 0, -1)
        await self._worklist.supersede(self._consumer(epoch) for epoch in earlier)
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in (self._feed, self._execute, self._commit, self._retire):
                    tasks.create_task(part(), name=f"{part.__name__} {self.model_id}")
        except ExceptionGroup as failures:
            first = _first(failures)
            if not isinstance(first, Retired):
                raise first from None
            await self._worklist.remove()
        finally:
            for delivery in self._in_hand.values():
                delivery.let_go()
            while not self._executed.empty():
                self._executed.get_nowait().outcome.cancel()

    async def _feed(self) -> None:
        async for delivery in self._worklist.deliveries():
            seq = delivery.message.seq
            if self._sequencer.is_past(seq):
                await self._answer_late(delivery)
                continue
            self._in_hand[seq] = delivery
            for _, ready in self._sequencer.offer(seq, delivery):
                self._ready.put_nowait(ready)

    async def _execute(self) -> None:
        while True:
            delivery = await self._ready.get()
            op = delivery.message
            log = self._log.bind(seq=op.seq, op=type(op.body).__name__)
            if isinstance(op.body, ops.LoadWeights):
                await self._executed.join()  # it may load what an earlier op is still saving
            if self._broken is not None:
                await self._fail(delivery, self._broken)
                continue
            outcome = await self._executor.execute(op, log)
            snapshot = None
            if outcome.is_step and self._snapshots.is_due():
                snapshot = await self._executor.snapshot(self.model_id)
            await self._executed.put(_Executed(delivery, outcome, snapshot))
            if op.seq == 0:
                self._broken = why_broken(await outcome.result)

    async def _commit(self) -> None:
        async with asyncio.TaskGroup() as savings:
            while True:
                executed = await self._executed.get()
                state_blake3 = await self._record(executed)
                if executed.snapshot is not None:
                    seq = executed.delivery.message.seq
                    saving = self._save_state(seq, executed.snapshot, state_blake3)
                    savings.create_task(saving, name=f"save state {self.model_id}:{seq}")
                self._executed.task_done()

    async def _record(self, executed: _Executed) -> str:
        delivery, outcome = executed.delivery, executed.outcome
        state_blake3 = await outcome.state_blake3
        op = Encoded(delivery.payload, delivery.ref)
        await self._writer.commit(
            delivery.message.seq, op, await outcome.result, state_blake3=state_blake3
        )
        await self._finish(delivery)
        return state_blake3

    async def _save_state(self, seq: int, snapshot: Snapshot, state_blake3: str) -> None:
        """Write what the next owner starts from. Without it, that one has more to repeat."""
        try:
            parts = await self._executor.store(snapshot)
        except ServerError as exc:
            self._log.warning("state not saved", seq=seq, error=str(exc))
            return
        finally:
            self._snapshots.done()
        await self._writer.save_state(seq, parts, state_blake3=state_blake3)
        self._log.debug("state saved", seq=seq)

    async def _answer_late(self, delivery: Delivery[ops.Op]) -> None:
        """A repeat of an op in hand, or of one in the log; or the one that was missing too long."""
        seq = delivery.message.seq
        if seq in self._in_hand:
            await delivery.give_back(delay_s=1.0)
        elif await self._bus.log.get(self.model_id, seq) is not None:
            await self._finish(delivery)
        else:
            await self._fail(delivery, _too_late(f"request {seq} came after its session ended"))

    async def _finish(self, delivery: Delivery[ops.Op]) -> None:
        await delivery.ack()
        self._in_hand.pop(delivery.message.seq, None)
        done = ops.OpDone(model_id=self.model_id, seq=delivery.message.seq)
        await self._bus.emit(table.OP_DONE, done)

    async def _retire(self) -> None:
        await self._session_over.wait()
        token = ids.token(self.model_id)
        while self._in_hand or await self._bus.is_queued(table.OPS, model=token, seq="*"):
            await self._fail_gap()
            await asyncio.sleep(RETIRE_POLL_S)
        raise Retired

    async def _fail_gap(self) -> None:
        missing, waiting = self._sequencer.abandon()
        for _, delivery in waiting:
            reason = f"request {missing} of this model never arrived before its session ended"
            await self._fail(delivery, _too_late(reason))

    async def _fail(self, delivery: Delivery[ops.Op], failure: Failed) -> None:
        await self._executed.put(_Executed(delivery, Outcome.of(failure)))


def _too_late(reason: str) -> Failed:
    return Failed(category="user", message=reason)


def _first(failure: Exception) -> Exception:
    """The failure that the others were cancelled for."""
    while isinstance(failure, ExceptionGroup):
        failure = failure.exceptions[0]
    return failure
