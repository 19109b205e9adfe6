"""One model in this trainer's hands: its ops in order, each executed and then committed.

    queue -> sequencer -> execute (compute) -> commit (log) -> ack, ping the gateways

Executing and committing overlap, in order: the next op runs while the record of the last one
is written. If a commit is refused, another trainer owns the model and everything here is void.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tinsmith import ids, tracing
from tinsmith.bus import BLOB_TRIES, Encoded, Unreadable
from tinsmith.errors import BlobMissing, Forgotten, NoRoom, ServerError
from tinsmith.messages import ops, table
from tinsmith.messages.base import Failed
from tinsmith.messages.failures import to_failed
from tinsmith.metrics import names as metrics
from tinsmith_trainer.executor import Outcome
from tinsmith_trainer.in_hand import InHand
from tinsmith_trainer.recovery import why_broken
from tinsmith_trainer.sequencer import Sequencer
from tinsmith_trainer.snapshots import Unsaved

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from structlog.stdlib import BoundLogger

    from tinsmith.bus import Bus, Delivery, Taken
    from tinsmith_trainer.engine import Snapshot
    from tinsmith_trainer.executor import Executor
    from tinsmith_trainer.patience import PatientWriter
    from tinsmith_trainer.recovery import Recovered
    from tinsmith_trainer.snapshots import SnapshotPolicy

WINDOW = 4096
"""Ops of one model in hand at once. The first chunk of a call arrives last, so this bounds the
chunks of one call."""
ACK_WAIT_S = 30.0
UNCOMMITTED = 16  # executed ops whose records are not written yet
RETIRE_POLL_S = 0.2
READ_PAUSE_S = 2.0


@dataclass(frozen=True)
class _Turn:
    taken: Taken[ops.Op]
    failure: Failed | None = None  # it has none: it is answered with this


@dataclass(frozen=True)
class _Opened:
    delivery: Delivery[ops.Op]
    failure: Failed | None


@dataclass(frozen=True)
class _Executed:
    delivery: Delivery[ops.Op]
    outcome: Outcome
    began: float  # its turn, by the clock of the event loop
    snapshot: asyncio.Future[Snapshot] | None = None  # of the model after it, when it is time


class Retired(Exception):
    """The model is wanted no more, and all its futures have ended."""


class Left(Exception):
    """The model is whole in its log, and another trainer may go on with it."""


class OwnedModel:
    """Runs one model until it is wanted no more, left, fenced or cancelled."""

    def __init__(
        self,
        model_id: str,
        *,
        bus: Bus,
        writer: PatientWriter,
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
        self._unsaved = recovered.unsaved
        self._snapshots = snapshots
        self._sequencer: Sequencer[Taken[ops.Op]] = Sequencer(recovered.next_seq)
        self._ready: asyncio.Queue[_Turn] = asyncio.Queue()
        self._opened: asyncio.Queue[_Opened] = asyncio.Queue(1)
        self._executed: asyncio.Queue[_Executed] = asyncio.Queue(UNCOMMITTED)
        self._in_hand = InHand()
        self._over = asyncio.Event()
        self._leaving = asyncio.Event()
        self._executing = asyncio.Lock()
        self._saving: set[asyncio.Task[None]] = set()
        token = ids.token(model_id)
        self._worklist = bus.work(
            table.OPS,
            self._consumer(writer.epoch),
            window=WINDOW,
            ack_wait_s=ACK_WAIT_S,
            seal=writer.seal,
            model=token,
            seq="*",
        )

    def _consumer(self, epoch: int) -> str:
        return f"model-{ids.token(self.model_id)}-{epoch}"

    def end(self) -> None:
        """It is wanted no more: finish what is in order, fail what waits for a missing op."""
        self._over.set()

    def leave(self) -> None:
        """Another trainer shall have it: begin no more ops, and write down what was begun."""
        self._leaving.set()

    async def run(self) -> None:
        """Returns when the model is wanted no more and nothing is left to answer.

        Raises:
            Fenced: another trainer has taken the model.
            Forgotten: the key of its contents was destroyed; nothing of it can go on.
            Left: it was told to leave it.
        """
        earlier = range(self._writer.epoch - 1, 0, -1)
        await self._worklist.supersede(self._consumer(epoch) for epoch in earlier)
        try:
            async with asyncio.TaskGroup() as tasks:
                ends = self._retire, self._leave
                for part in (self._feed, self._open, self._execute, self._commit, *ends):
                    tasks.create_task(part(), name=f"{part.__name__} {self.model_id}")
        except ExceptionGroup as failures:
            first = _first(failures)
            if not isinstance(first, Retired | Forgotten):
                raise first from None
            await self._worklist.remove()
            if isinstance(first, Forgotten):
                raise first from None
        finally:
            self._in_hand.let_go()
            while not self._executed.empty():
                self._executed.get_nowait().outcome.cancel()

    async def _feed(self) -> None:
        async for taken in self._worklist.taken():
            seq = _seq(taken)
            if self._sequencer.is_past(seq):
                await self._answer_late(seq, taken)
                continue
            self._in_hand.add(seq, taken)
            for _, ready in self._sequencer.offer(seq, taken):
                self._ready.put_nowait(_Turn(ready))

    async def _open(self) -> None:
        """Read the next op while the one before it is carried out, and not all at once."""
        while True:
            turn = await self._ready.get()
            await self._opened.put(_Opened(await self._read(turn.taken), turn.failure))

    async def _read(self, taken: Taken[ops.Op]) -> Delivery[ops.Op]:
        """The op; or one in its place that is refused, when its bytes are lost."""
        tries = 0
        while True:
            try:
                return await self._worklist.read(taken)
            except ServerError as exc:
                tries += isinstance(exc, BlobMissing)
                if isinstance(exc, Unreadable) or tries >= BLOB_TRIES:
                    return self._lost(taken, exc)
                self._log.warning("op not read yet", seq=_seq(taken), error=str(exc))
            await asyncio.sleep(READ_PAUSE_S)

    def _lost(self, taken: Taken[ops.Op], error: ServerError) -> Delivery[ops.Op]:
        self._log.error("op lost", seq=_seq(taken), error=str(error))
        told = f"the contents of this request are lost, and it was not carried out: {error}"
        reason = msgspec.structs.replace(to_failed(error), message=told)
        refused = ops.Refused(reason=reason)
        return taken.replaced_by(ops.Op(model_id=self.model_id, seq=_seq(taken), body=refused))

    async def _execute(self) -> None:
        while True:
            opened = await self._opened.get()
            async with self._executing:  # until it is told to leave: then not any more
                await self._execute_one(opened)

    async def _execute_one(self, opened: _Opened) -> None:
        delivery, op = opened.delivery, opened.delivery.message
        began = asyncio.get_running_loop().time()
        request_id = ids.future_id(self.model_id, op.seq)
        log = self._log.bind(seq=op.seq, op=_kind(op), request_id=request_id)
        if isinstance(op.body, ops.LoadWeights):
            await self._executed.join()  # it may load what an earlier op is still saving
        if (failure := opened.failure or self._broken) is not None:
            await self._executed.put(_Executed(delivery, Outcome.of(failure), began))
            return
        with _span("execute", delivery):
            outcome = await self._executor.execute(op, log)
        snapshot = None
        if outcome.is_step and self._snapshots.is_due():
            snapshot = self._executor.copy(self.model_id)
        await self._executed.put(_Executed(delivery, outcome, began, snapshot))
        if op.seq == 0:
            self._broken = why_broken(await outcome.result)

    async def _commit(self) -> None:
        async with asyncio.TaskGroup() as savings:
            while True:
                executed = await self._executed.get()
                state_blake3 = await self._record(executed)
                if executed.snapshot is not None:
                    seq = executed.delivery.message.seq
                    work = self._save_state(seq, executed.snapshot, state_blake3)
                    saving = savings.create_task(work, name=f"save state {self.model_id}:{seq}")
                    self._saving.add(saving)
                    saving.add_done_callback(self._saving.discard)
                self._executed.task_done()

    async def _record(self, executed: _Executed) -> str:
        delivery, outcome = executed.delivery, executed.outcome
        state_blake3 = await outcome.state_blake3
        op = Encoded(delivery.payload, delivery.ref, delivery.stored or None)
        seq, result = delivery.message.seq, await outcome.result
        with _span("commit", delivery):
            await self._writer.commit(seq, op, result, state_blake3=state_blake3)
        if state_blake3 and seq:
            self._unsaved = Unsaved(seq, state_blake3)
        await self._finish(seq, delivery)
        self._tell_done(executed, result)
        return state_blake3

    def _tell_done(self, executed: _Executed, result: ops.OpResult) -> None:
        op = executed.delivery.message
        outcome = result.category if isinstance(result, Failed) else "done"
        seconds = asyncio.get_running_loop().time() - executed.began
        metrics.OPS.labels(_kind(op), outcome).inc()
        metrics.OP_SECONDS.labels(_kind(op)).observe(seconds)
        told = {"op": _kind(op), "outcome": outcome, "seconds": round(seconds, 3)}
        request_id = ids.future_id(self.model_id, op.seq)
        self._log.debug("op done", seq=op.seq, request_id=request_id, **told)

    async def _save_state(
        self, seq: int, copying: asyncio.Future[Snapshot], state_blake3: str
    ) -> None:
        """Write what the next owner starts from. Without it, that one has more to repeat."""
        try:
            parts = await self._executor.store(await copying)
        except (ServerError, NoRoom) as exc:
            metrics.STATES_SAVED.labels("failed").inc()
            self._log.warning("state not saved", seq=seq, error=str(exc))
            return
        finally:
            self._snapshots.done()
        await self._writer.save_state(seq, parts, state_blake3=state_blake3)
        if self._unsaved is not None and self._unsaved.op_seq == seq:
            self._unsaved = None
        metrics.STATES_SAVED.labels("done").inc()
        self._log.debug("state saved", seq=seq)

    async def _answer_late(self, seq: int, taken: Taken[ops.Op]) -> None:
        """A repeat of an op in hand, or of one in the log; or the one that was missing too long."""
        if seq in self._in_hand:
            await taken.give_back(delay_s=1.0)
        elif await self._bus.log.get(self.model_id, seq) is not None:
            await self._finish(seq, taken)
        else:
            self._in_hand.add(seq, taken)
            self._fail(taken, f"request {seq} came after its model's end")

    async def _finish(self, seq: int, taken: Taken[ops.Op]) -> None:
        await taken.ack()
        self._in_hand.remove(seq)
        done = ops.OpDone(model_id=self.model_id, seq=seq)
        await self._bus.emit(table.OP_DONE, done)

    async def _retire(self) -> None:
        await self._over.wait()
        token = ids.token(self.model_id)
        while self._in_hand or await self._bus.is_queued(table.OPS, model=token, seq="*"):
            # It may be on its way here: what is queued does not come in order.
            awaited = str(self._sequencer.next_seq)
            if not await self._bus.is_queued(table.OPS, model=token, seq=awaited):
                self._fail_gap()
            await asyncio.sleep(RETIRE_POLL_S)
        raise Retired

    async def _leave(self) -> None:
        """Write what was begun to the log, and the state for the next owner beside it.

        Passes since the last change add to a gradient, which no copy has: they are repeated.
        """
        await self._leaving.wait()
        await self._executing.acquire()  # for good: this comes before the next op
        await self._executed.join()
        if self._saving:
            await asyncio.wait(self._saving)
        if (left := self._unsaved) is not None and self._broken is None:
            copying = self._executor.copy(self.model_id)
            await self._save_state(left.op_seq, copying, left.state_blake3)
        raise Left

    def _fail_gap(self) -> None:
        missing, waiting = self._sequencer.abandon()
        for _, taken in waiting:
            reason = (
                f"request {missing} of this model never arrived before its session ended "
                "or it was unloaded"
            )
            self._fail(taken, reason)

    def _fail(self, taken: Taken[ops.Op], reason: str) -> None:
        """Answer it so when its turn comes: behind those that are carried out before it."""
        self._ready.put_nowait(_Turn(taken, Failed(category="user", message=reason)))


def _kind(op: ops.Op) -> str:
    return type(op.body).__name__


def _span(name: str, delivery: Delivery[ops.Op]) -> AbstractContextManager[None]:
    """Of the trace in which the op was queued."""
    op = delivery.message
    return tracing.span(
        f"trainer.{name}",
        parent=delivery.traceparent,
        model_id=op.model_id,
        seq=op.seq,
        op=_kind(op),
    )


def _seq(taken: Taken[ops.Op]) -> int:
    return int(taken.subject.rpartition(".")[2])


def _first(failure: Exception) -> Exception:
    """The failure that the others were cancelled for."""
    while isinstance(failure, ExceptionGroup):
        failure = failure.exceptions[0]
    return failure
