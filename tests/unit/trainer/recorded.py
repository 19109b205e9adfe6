"""A run that a real engine carried out, and its log as a list that tests may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3
from tests.unit.trainer.saved import saved

from tinsmith.errors import BlobMissing, UserError
from tinsmith.logbook import Entry
from tinsmith.messages import ops
from tinsmith.messages.base import GENESIS, BlobRef, Failed, decoder, encode
from tinsmith.messages.failures import to_failed
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import refs, to_files
from tinsmith_trainer.engine import EngineOp, TrainingEngine
from tinsmith_trainer.environment import describe
from tinsmith_trainer.repeating import changes_state
from tinsmith_trainer.state import digest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

RUN = "abcdefghijklmnopqrstuvwxyz:train:0"
RESULTS, OPS = decoder(ops.OpResult), decoder(ops.Op)


class ListLogbook:
    """A ``Logbook``; the entries of its list are chained anew whenever they are read."""

    def __init__(self, entries: list[ops.LogEntry], blobs: dict[BlobRef, bytes]):
        self.list = list(entries)
        self.blobs = dict(blobs)

    async def runs(self) -> list[str]:
        return [RUN]

    async def length(self, model_id: str) -> int:
        return len(self.list)

    async def entries(self, model_id: str) -> AsyncIterator[Entry]:
        previous = GENESIS
        for entry in self.list:
            data = encode(msgspec.structs.replace(entry, prev_blake3=previous))
            item = Entry.read(data, "")
            yield item
            previous = item.blake3

    async def blob(self, ref: BlobRef) -> bytes:
        if ref not in self.blobs:
            raise BlobMissing(f"blob {ref.blake3} is missing")
        return self.blobs[ref]

    def record(self, seq: int) -> ops.Record:
        return next(e for e in self.list if isinstance(e, ops.Record) and e.seq == seq)

    def op(self, seq: int) -> ops.Op:
        return OPS.decode(self.record(seq).op)

    def result(self, seq: int) -> ops.OpResult:
        return RESULTS.decode(self.record(seq).result)

    def replace(self, old: ops.LogEntry, **changes: object) -> None:
        self.list[self.list.index(old)] = msgspec.structs.replace(old, **changes)

    def forge_result(self, seq: int, result: ops.OpResult) -> None:
        """Put another result in, with the digest it must have."""
        data = encode(result)
        digest_ = blake3(data).hexdigest()
        self.replace(self.record(seq), result=data, result_blake3=digest_)

    def forge_op(self, seq: int, body: ops.OpBody) -> None:
        """Put another op in, with the digest it must have."""
        data = encode(ops.Op(model_id=RUN, seq=seq, body=body))
        self.replace(self.record(seq), op=data, op_blake3=blake3(data).hexdigest())


class Recorder:
    """Carries out ops and writes their log, as a trainer that owns the model does."""

    def __init__(self, folder: Path, *, microbatch_tokens: int = 64, **form: str):
        base = base_model.load(str(folder), name="tiny", **({"device": "cpu"} | form))
        self.environment = describe(base, microbatch_tokens=microbatch_tokens)
        self.engine = TrainingEngine(base, microbatch_tokens=microbatch_tokens)
        self.list: list[ops.LogEntry] = []
        self.blobs: dict[BlobRef, bytes] = {}
        self.seq = 0
        self.epoch = 0
        self.own()

    def own(self, **changes: str) -> None:
        self.epoch += 1
        self.list.append(
            ops.Owned(
                model_id=RUN,
                epoch=self.epoch,
                trainer_id="t",
                environment=self.environment | changes,
                prev_blake3="",
            )
        )

    def do(self, body: ops.OpBody, result: ops.OpResult | None = None) -> None:
        """Carry ``body`` out, unless a ``result`` is given, and record it."""
        result = result or self._carry_out(body)
        state = ""
        if changes_state(body) and not isinstance(result, Failed):
            state = digest(self.engine.state(RUN))
        op, answer = encode(ops.Op(model_id=RUN, seq=self.seq, body=body)), encode(result)
        self.list.append(
            ops.Record(
                model_id=RUN,
                seq=self.seq,
                epoch=self.epoch,
                op=op,
                op_blake3=blake3(op).hexdigest(),
                result=answer,
                result_blake3=blake3(answer).hexdigest(),
                state_blake3=state,
                prev_blake3="",
            )
        )
        self.seq += 1

    def _carry_out(self, body: ops.OpBody) -> ops.OpResult:
        if isinstance(body, ops.Refused):
            return body.reason
        assert isinstance(body, EngineOp)
        try:
            return self.engine.apply(RUN, body)
        except UserError as exc:
            return to_failed(exc)

    def parts(self) -> dict[str, BlobRef]:
        """The model as it is, as a checkpoint in the blob store."""
        return self._put(to_files(self.engine.snapshot(RUN), with_optimizer=True))

    def _put(self, files: Mapping[str, bytes]) -> dict[str, BlobRef]:
        parts = refs(files)
        self.blobs |= {parts[name]: data for name, data in files.items()}
        return parts

    def save(self, body: ops.SaveWeights | ops.SaveWeightsForSampler) -> None:
        """Record a save as the executor does, which names what was saved."""
        is_training = isinstance(body, ops.SaveWeights)
        parts = refs(to_files(self.engine.snapshot(RUN), with_optimizer=is_training))
        done = ops.SaveWeightsDone if is_training else ops.SaveWeightsForSamplerDone
        size_bytes = sum(ref.size for ref in parts.values())
        self.do(body, done(path="tinker://x", size_bytes=size_bytes, parts=parts))

    def save_state(self) -> None:
        state_blake3 = digest(self.engine.state(RUN))
        parts = self._put(saved(self.engine, self.engine.snapshot(RUN)))
        self.list.append(
            ops.StateSaved(
                model_id=RUN,
                seq=self.seq - 1,
                epoch=self.epoch,
                state_blake3=state_blake3,
                parts=parts,
                prev_blake3="",
            )
        )

    def load(self, parts: dict[str, BlobRef], *, with_optimizer: bool = True) -> None:
        path = "tinker://x"
        files = {name: self.blobs[ref] for name, ref in parts.items()}
        self.engine.restore(RUN, files, with_optimizer=with_optimizer)
        self.do(
            ops.LoadWeights(path=path, with_optimizer=with_optimizer),
            ops.LoadWeightsDone(path=path, parts=parts),
        )

    def create_from(self, parts: dict[str, BlobRef]) -> None:
        files = {name: self.blobs[ref] for name, ref in parts.items()}
        done = self.engine.restore(RUN, files, with_optimizer=True)
        self.do(
            ops.CreateModel(base_model="tiny", checkpoint="tinker://x", with_optimizer=True),
            ops.CreateModelDone(model_id=RUN, lora=done.lora, parts=parts),
        )

    def book(self) -> ListLogbook:
        return ListLogbook(self.list, self.blobs)
