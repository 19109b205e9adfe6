"""Logs made for tests, chained as a trainer chains them; and a logbook over them."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from blake3 import blake3

from tinsmith.errors import BlobMissing
from tinsmith.logbook import Entry
from tinsmith.logbook.anchors import Chain
from tinsmith.logbook.container import Kind, pack_part
from tinsmith.logbook.file import Cover, End, FileLogbook
from tinsmith.logbook.verify import Verification
from tinsmith.messages import ops
from tinsmith.messages.base import GENESIS, BlobRef, Failed, Tensor, encode
from tinsmith.sealing import PLAIN

MODEL = f"{'a' * 26}:train:0"
OTHER = f"{'b' * 26}:train:3"
FAILED = Failed(category="user", message="no")
STEPPED = ops.OptimStepDone(metrics={"grad_norm": 1.5})
LORA = ops.LoraShape(rank=4)


def forward_backward(n=3):
    tokens = Tensor("int32", (n,), np.arange(n, dtype="<i4").tobytes())
    return ops.ForwardBackward(data=(ops.Datum(tokens=tokens, inputs={}),), loss_fn="cross_entropy")


def scored(*logprobs):
    values = Tensor("float32", (len(logprobs),), np.array(logprobs, "<f4").tobytes())
    return ops.ForwardBackwardDone(logprobs=(values,), metrics={"loss:sum": -sum(logprobs)})


class Made:
    """A log that grows; a ``Logbook`` at the same time."""

    def __init__(self, model_id=MODEL, seal=PLAIN):
        self.model_id = model_id
        self.opened_with = seal  # may be exchanged for one that opens nothing
        self.data = []
        self.anchored = []
        self.stored = {}
        self.epoch = 0
        self.seq = 0

    @property
    def head(self):
        return blake3(self.data[-1]).hexdigest() if self.data else GENESIS

    def append(self, entry):
        self.data.append(encode(msgspec.structs.replace(entry, prev_blake3=self.head)))
        return self

    def put(self, data):
        ref = BlobRef(blake3(data).hexdigest(), len(data))
        self.stored[ref.blake3] = data
        return ref

    def own(self, environment=None):
        self.epoch += 1
        return self.append(
            ops.Owned(
                model_id=self.model_id,
                epoch=self.epoch,
                trainer_id="trainer-1",
                environment=environment or {},
                prev_blake3="",
            )
        )

    def op(self, body, result, *, state="", seq=None, in_blobs=False):
        seq = self.seq if seq is None else seq
        self.seq = seq + 1
        seal = self.opened_with
        op, answer = encode(ops.Op(model_id=self.model_id, seq=seq, body=body)), encode(result)
        digests = {"op_blake3": seal.digest(op), "result_blake3": seal.digest(answer)}
        op, answer = seal.seal(op), seal.seal(answer)
        where = (
            {"op_ref": self.put(op), "result_ref": self.put(answer)}
            if in_blobs
            else {"op": op, "result": answer}
        )
        return self.append(
            ops.Record(
                model_id=self.model_id,
                seq=seq,
                epoch=self.epoch,
                **digests,
                state_blake3=state,
                prev_blake3="",
                sealed=seal.scheme,
                **where,
            )
        )

    def save_state(self, seq, parts, *, state):
        return self.append(
            ops.StateSaved(
                model_id=self.model_id,
                seq=seq,
                epoch=self.epoch,
                state_blake3=state,
                parts=parts,
                prev_blake3="",
            )
        )

    async def runs(self):
        return [self.model_id]

    async def length(self, model_id):
        return len(self.data)

    async def entries(self, model_id):
        for number, data in enumerate(self.data, start=1):
            yield Entry.read(data, f"entry {number}")

    async def newest(self, model_id):
        found = {}
        async for entry in self.entries(model_id):
            found.pop(type(entry.entry), None)
            found[type(entry.entry)] = entry
        return list(found.values())

    async def anchors(self, *, is_fresh=False):
        return Chain(heads={self.model_id: self.anchored})

    async def seal(self, model_id):
        return self.opened_with

    async def blob(self, ref):
        if ref.blake3 not in self.stored:
            raise BlobMissing(f"blob {ref.blake3} is not there")
        return self.stored[ref.blake3]

    async def check_blob(self, ref):
        await self.blob(ref)


def a_run(model_id=MODEL, seal=PLAIN):
    """Fourteen entries with something of everything, in blobs and out of them."""
    made = Made(model_id, seal)
    loaded = {"adapter": made.put(b"checkpoint " * 20)}
    base = ops.CreateModel(base_model="tiny/llama", lora=LORA)
    made.own({"torch": "2.8"}).op(
        base, ops.CreateModelDone(model_id=model_id, lora=LORA), state="s0"
    )
    made.op(forward_backward(), scored(-1.0, -2.0, -0.5)).op(
        ops.OptimStep(learning_rate=0.01), STEPPED, state="s2"
    )
    made.op(forward_backward(400), scored(-3.0), in_blobs=True)
    made.save_state(2, {"adapter": made.put(b"weights " * 99)}, state="s2")
    made.own({"torch": "2.9"})
    made.op(ops.OptimStep(), STEPPED, state="s4").op(ops.OptimStep(), FAILED)
    path = f"tinker://{model_id}/weights/best"
    made.op(ops.SaveWeights(name="best"), ops.SaveWeightsDone(path=path, size_bytes=7))
    made.op(ops.LoadWeights(path=path), ops.LoadWeightsDone(path=path, parts=loaded), state="s7")
    made.op(ops.Refused(reason=FAILED), FAILED)
    made.op(ops.SaveWeightsForSampler(sampling_session_id="x"), ops.SaveWeightsForSamplerDone())
    return made.save_state(7, {"adapter": made.put(b"newer " * 99)}, state="s7")


def parts_of_file(made):
    """The parts of an export of ``made``: (kind, raw bytes), blobs before their first entry."""
    parts = [(Kind.COVER, encode(Cover(model_id=made.model_id, tinsmith="0")))]
    seen = set()

    async def take(ref):
        seen.add(ref.blake3)
        parts.append((Kind.BLOB, made.stored[ref.blake3]))

    async def collect():
        async for entry in Verification(made, made.model_id, take=take).entries():
            parts.append((Kind.ENTRY, entry.data))  # noqa: PERF401 - take() appends between

    asyncio.run(collect())
    end = End(entries=len(made.data), blobs=len(seen), head_blake3=made.head)
    return [*parts, (Kind.END, encode(end))]


def packed(parts):
    return b"".join(piece for kind, data in parts for piece in pack_part(kind, data))


async def verified(book):
    """Every entry of the one run in ``book``; raises as ``Verification``."""
    (model_id,) = await book.runs()
    return [entry async for entry in Verification(book, model_id).entries()]


def verify_file(path):
    """Synchronously, for use inside of properties."""
    with FileLogbook.open(path) as book:
        return asyncio.run(verified(book))
