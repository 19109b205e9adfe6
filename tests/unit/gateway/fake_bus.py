"""The part of ``tinsmith.bus.Bus`` that a gateway uses, in memory.

Messages are kept encoded, as on the broker, so that one that cannot travel fails here too.
``take`` and ``finish`` stand for the services on the other side.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from blake3 import blake3

from tinsmith import ids
from tinsmith.blobs import BlobStore
from tinsmith.bus import Committed, Subscription
from tinsmith.bus.backlog import Depth
from tinsmith.bus.books import LastOp, StreamState
from tinsmith.bus.facts import Fact, op_costs, sample_costs
from tinsmith.bus.lineages import Entry
from tinsmith.bus.log import Head
from tinsmith.errors import BrokerUnavailable, Busy, ServerError
from tinsmith.messages import ops, sampling
from tinsmith.messages.base import GENESIS, decoder, encode
from tinsmith.messages.services import AuditEntry, SampleReady
from tinsmith.messages.table import (
    CHANGE_CHECKPOINT,
    COPY_CHECKPOINT,
    DELETE_CHECKPOINT,
    OP_DONE,
    OPS,
    QUEUES,
    SAMPLE_READY,
    SAMPLES,
)
from tinsmith.sealing import PLAIN
from tinsmith_checkpointer.changes import Changes

MAX_PAYLOAD = 1 << 20  # that of an nats-server that nobody has configured


def checked(data):
    """``data`` itself; ServerError when the broker would not take so much in one message."""
    if len(data) > MAX_PAYLOAD:
        raise ServerError(f"{len(data)} bytes are over the broker's max_payload")
    return data


class FakeBus:
    """Set ``is_connected`` to False for a broker that is away, ``capacity`` for a small queue."""

    def __init__(self):
        self.is_connected = True
        self.closed = asyncio.Event()
        self.capacity = 1000
        self.log = FakeLog(self)
        self.results = FakeResults(self)
        self.audit = FakeAudit(self)
        self.blobs = BlobStore.open("memory:///", default=None)
        self.facts = FakeFacts(self)
        self.books = FakeBooks(self)
        self.lineages = FakeLineages(self)
        self.emitted = []
        self.reads = 0
        self._queued = {}
        self._stored = {}
        self._handlers = defaultdict(list)
        self._watchers = defaultdict(list)
        self._changed = asyncio.Condition()

    def check(self):
        if not self.is_connected:
            raise BrokerUnavailable("the broker did not answer; is it running?")

    async def emit(self, event, message, **tokens):
        self.check()
        checked(encode(message))
        self.emitted.append(message)
        for handler in self._handlers[event.subject(**tokens)]:
            handler(event.messages.decode(encode(message)))

    async def listen(self, event, handler, **tokens):
        subject = event.subject(**tokens)
        self._handlers[subject].append(handler)

        async def close():
            self._handlers[subject].remove(handler)

        return Subscription(close)

    @property
    def listeners(self):
        return sum(map(len, (*self._handlers.values(), *self._watchers.values())))

    async def enqueue(self, queue, message, seal=PLAIN, /, **tokens):
        self.check()
        seal.seal(b"")  # what is queued stays readable here, but a closed seal is refused
        subject = queue.subject(**tokens)
        if subject not in self._queued:
            if sum(key.startswith(queue.wildcard.partition("*")[0]) for key in self._queued) >= (
                self.capacity
            ):
                raise Busy("the queue is full; send the same request again in a second")
            self._queued[subject] = encode(message)
        async with self._changed:
            self._changed.notify_all()
        return self._queued[subject] == encode(message)

    async def queued_as(self, queue, seal=PLAIN, /, **tokens):
        self.check()
        data = self._queued.get(queue.subject(**tokens))
        return None if data is None else queue.messages.decode(data)

    async def is_queued(self, queue, **tokens):
        self.check()
        return bool(self._on(queue.subject(**tokens)))

    def _on(self, wanted):
        return [subject for subject in self._queued if fnmatchcase(subject, wanted)]

    def queued(self, queue):
        """All messages of a queue, oldest first."""
        prefix = queue.wildcard.partition("*")[0]
        return [
            queue.messages.decode(data)
            for subject, data in self._queued.items()
            if subject.startswith(prefix)
        ]

    async def subjects(self, queue):
        self.check()
        prefix = queue.wildcard.partition("*")[0]
        return {subject for subject in self._queued if subject.startswith(prefix)}

    async def depth(self, queue):
        self.check()
        return Depth(len(await self.subjects(queue)), 0, 0.0)

    async def move_first(self, source, target, **tokens):
        self.check()
        wanted = source.subject(**tokens)
        for subject in tuple(self._queued):
            if fnmatchcase(subject, wanted):
                found = source.tokens(subject)
                message = source.messages.decode(self._queued[subject])
                await self.enqueue(
                    target, message, **{k: v for k, v in found.items() if k != "owner"}
                )
                del self._queued[subject]
                return found
        return None

    async def withdraw(self, queue, **tokens):
        self.check()
        for subject in self._on(queue.subject(**tokens)):
            del self._queued[subject]

    async def call(self, rpc, request):
        """The checkpointer's own handlers answer, on the same tables."""
        self.check()
        changes = Changes(self)
        handlers = {
            CHANGE_CHECKPOINT: changes.change,
            DELETE_CHECKPOINT: changes.delete,
            COPY_CHECKPOINT: changes.copy,
        }
        return await handlers[rpc](rpc.requests.decode(encode(request)))

    async def take(self, queue, seen):
        """The oldest message whose id is not in ``seen``; it stays queued until finished."""
        async with self._changed:
            while True:
                for message in self.queued(queue):
                    if (key := _key(message)) not in seen:
                        seen.add(key)
                        return message
                await self._changed.wait()

    async def finish_op(self, op, result, *, ping=True):
        """What a trainer does: the record, the acknowledgement, the ping."""
        self.log.append(op, result)
        self._queued.pop(OPS.subject(model=ids.token(op.model_id), seq=str(op.seq)))
        if ping:
            await self.emit(OP_DONE, ops.OpDone(model_id=op.model_id, seq=op.seq))

    async def finish_sample(self, asked, result):
        """What a sampler does."""
        await self.results.put_first(asked.sampler_id, asked.seq, result)
        tokens = {"sampler": ids.token(asked.sampler_id), "seq": str(asked.seq)}
        pool = ids.pool_token(asked.base_model)
        (subject,) = self._on(SAMPLES.subject(pool=pool, share="*", **tokens))
        del self._queued[subject]
        await self.emit(SAMPLE_READY, SampleReady(request_id=asked.request_id))

    def table(self, entity):
        return FakeTable(self, entity)


class FakeTable:
    """``watch`` tells of changes a little later, as a broker does."""

    def __init__(self, bus, entity):
        self._bus = bus
        self._entity = entity

    async def create(self, key, value):
        if (existing := await self.get(key)) is not None:
            return existing
        await self.put(key, value)
        return value

    async def update(self, key, change):
        present = await self.get(key)
        if (wanted := change(present)) is None or wanted == present:
            return present
        await self.put(key, wanted)
        return wanted

    async def put(self, key, value):
        self._bus.check()
        self._bus._stored[self._entity.subject(id=key)] = checked(encode(value))
        self._tell(key, value)

    async def get(self, key):
        self._bus.check()
        self._bus.reads += 1
        data = self._bus._stored.get(self._entity.subject(id=key))
        return None if data is None else self._entity.messages.decode(data)

    async def delete(self, key):
        self._bus.check()
        self._bus._stored.pop(self._entity.subject(id=key), None)
        self._tell(key, None)

    async def erase(self, key):
        await self.delete(key)

    async def watch(self, on_change):
        self._bus.check()
        prefix = self._entity.wildcard.removesuffix("*")
        for subject, data in self._bus._stored.items():
            if subject.startswith(prefix):
                on_change(subject.removeprefix(prefix), self._entity.messages.decode(data))
        self._bus._watchers[self._entity.template].append(on_change)

        async def close():
            self._bus._watchers[self._entity.template].remove(on_change)

        return Subscription(close)

    def _tell(self, key, value):
        for on_change in self._bus._watchers[self._entity.template]:
            asyncio.get_running_loop().call_soon(on_change, key, value)


class FakeAudit:
    """Entries in memory."""

    def __init__(self, bus):
        self._bus = bus
        self._entries = []

    async def add(self, entry):
        self._bus.check()
        self._entries.append(decoder(AuditEntry).decode(encode(entry)))

    async def of_day(self, owner, day, topic):
        self._bus.check()
        return [
            entry
            for entry in self._entries
            if entry.owner == owner
            and topic in ("*", entry.topic)
            and datetime.fromtimestamp(entry.at_ns / 1e9, UTC).date() == day
        ]


class FakeFacts:
    """Costs of the stored results; their order is their place in the stream."""

    def __init__(self, bus):
        self._bus = bus

    async def of_log(self, *, first, model):
        if model == "*":
            for place, ((model_id, seq), record) in enumerate(self._bus.log._records.items(), 1):
                costs = op_costs(decoder(ops.OpResult).decode(record.result))
                if place >= first:
                    yield Fact(place, time.time(), model_id, seq, costs)
            return
        records = sorted(self._bus.log._records.items())
        for (model_id, seq), record in records:
            if model_id == model:
                costs = op_costs(decoder(ops.OpResult).decode(record.result))
                yield Fact(first, 1.5, model_id, seq, costs)

    async def newest(self):
        self._bus.check()
        return len(self._bus.log._records)

    async def of_results(self, *, first, sampler):
        if (fact := await self.next_result(sampler, after=first - 1)) is not None:
            yield fact

    async def next_result(self, sampler_id, *, after):
        self._bus.check()
        stored = self._bus.results._results
        for place, ((sampler, seq), data) in enumerate(stored.items(), 1):
            if place > after and sampler == sampler_id:
                costs = sample_costs(decoder(sampling.SampleResult).decode(data))
                return Fact(place, 0.0, sampler_id, seq, costs)
        return None


class FakeBooks:
    """Of the queues and of the log above."""

    def __init__(self, bus):
        self._bus = bus

    async def stream(self, name):
        self._bus.check()
        count = sum(queue.stream == name for queue in QUEUES for _ in self._bus.queued(queue))
        return StreamState(name, count, 0, 0, 0.0, 0, 1)

    async def last_op(self, model_id):
        self._bus.check()
        seqs = [seq for model, seq in self._bus.log._records if model == model_id]
        return LastOp(max(seqs), time.time()) if seqs else None


class FakeLineages:
    """Whole chains, by lineage."""

    def __init__(self, bus):
        self._bus = bus
        self.chains = defaultdict(list)

    async def start(self, lineage_id):
        self._bus.check()
        return 1

    async def entries(self, lineage_id, *, first):
        for place, message in enumerate(self.chains[lineage_id], 1):
            if place >= first:
                yield Entry(place, "", message)


class FakeLog:
    """Records by model and seq."""

    def __init__(self, bus):
        self._bus = bus
        self._records = {}
        self.owners = {}  # by model
        self.is_blob_missing = False

    def append(self, op, result):
        encoded_op, encoded = encode(op), encode(result)
        self._records[op.model_id, op.seq] = ops.Record(
            model_id=op.model_id,
            seq=op.seq,
            epoch=1,
            op=encoded_op,
            op_blake3=blake3(encoded_op).hexdigest(),
            result=encoded,
            result_blake3=blake3(encoded).hexdigest(),
            prev_blake3=self._head(op.model_id),
        )

    def _stored(self, model_id):
        return [encode(r) for (model, _), r in self._records.items() if model == model_id]

    def _head(self, model_id):
        stored = self._stored(model_id)
        return blake3(stored[-1]).hexdigest() if stored else GENESIS

    async def head(self, model_id):
        self._bus.check()
        return Head(len(self._stored(model_id)), self._head(model_id), 1)

    async def stored(self, model_id, *, start=1):
        self._bus.check()
        for place, data in enumerate(self._stored(model_id), 1):
            if place >= start:
                yield "", data

    async def get(self, model_id, seq):
        self._bus.check()
        self._bus.reads += 1
        return self._records.get((model_id, seq))

    async def committed(self, model_id, seq):
        record = await self.get(model_id, seq)
        if record is None:
            return None
        data = encode(record)
        place = self._stored(model_id).index(data) + 1
        return Committed(record, blake3(data).hexdigest(), time.time(), place)

    async def owner(self, model_id):
        self._bus.check()
        return self.owners.get(model_id)

    async def result(self, record, seal=PLAIN):
        return decoder(ops.OpResult).decode(record.result)

    async def op(self, record, seal=PLAIN):
        return decoder(ops.Op).decode(record.op)


class FakeResults:
    """Sampling results, first writer wins."""

    def __init__(self, bus):
        self._bus = bus
        self._results = {}

    async def get(self, sampler_id, seq):
        self._bus.check()
        self._bus.reads += 1
        data = self._results.get((sampler_id, seq))
        return None if data is None else decoder(sampling.SampleResult).decode(data)

    async def put_first(self, sampler_id, seq, result):
        self._bus.check()
        self._results.setdefault((sampler_id, seq), encode(result))


def _key(message):
    return (getattr(message, "model_id", None) or message.sampler_id, getattr(message, "seq", 0))
