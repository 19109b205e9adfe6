"""The trainer on a real broker: order, exactly once, fencing, recovery, the end of a session."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest
import structlog
from tests.integration.contexts import context_of

from tinsmith import ids
from tinsmith.bus import Bus
from tinsmith.config import BusConfig, Config, ModelConfig
from tinsmith.messages import ops, registry, table
from tinsmith.messages.base import Failed, Tensor
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.compute import Compute
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.executor import Executor
from tinsmith_trainer.service import Trainer

BASE = "tiny/llama"
LORA = ops.LoraShape(rank=4, seed=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(tiny_model.build(tmp_path_factory.mktemp("model")))


class Client:
    """What a gateway does, for one model."""

    def __init__(self, bus):
        self.bus = bus
        self.session = ids.new_session_id()
        self.model = ids.model_id(self.session, 0)

    async def create(self, lora=LORA):
        await self.session_is("active")
        await self.send(0, ops.CreateModel(base_model=BASE, lora=lora))
        placement = ops.Placement(model_id=self.model, base_model=BASE)
        tokens = {"pool": ids.pool_token(BASE), "model": ids.token(self.model)}
        await self.bus.enqueue(table.PLACEMENTS, placement, **tokens)

    async def session_is(self, status):
        entry = registry.Session(session_id=self.session, owner="o", created_ns=1, status=status)
        await self.bus.table(table.SESSIONS).put(self.session, entry)

    async def send(self, seq, body):
        op = ops.Op(model_id=self.model, seq=seq, body=body)
        await self.bus.enqueue(table.OPS, op, model=ids.token(self.model), seq=str(seq))

    async def result(self, seq):
        async with asyncio.timeout(60):
            while (record := await self.bus.log.get(self.model, seq)) is None:
                await asyncio.sleep(0.01)
        return await self.bus.log.result(record)

    async def idle(self):
        """Until nothing of the model is queued: every repeat was recognised."""
        async with asyncio.timeout(60):
            while await self.bus.is_queued(table.OPS, model=ids.token(self.model), seq="*"):
                await asyncio.sleep(0.01)

    async def records(self):
        return [e async for e in self.bus.log.entries(self.model) if isinstance(e, ops.Record)]


@asynccontextmanager
async def trainer(broker, blobs, base, name="trainer-a", **options):
    """A trainer in this process, gone at the end as if it had been killed."""
    async with Bus.connect(BusConfig(url=broker.url), name=name, blobs=blobs) as bus:
        usual = {"placement_timeout_s": 3, "checkpointer_patience_s": 0.5}
        settings = TrainerConfig(**(usual | options))
        config = Config(models=(ModelConfig(name=BASE),), sections=(settings,))
        context = context_of(name, bus, blobs, config)
        engine = TrainingEngine(base_model.load(base, name=BASE))
        compute = Compute(engine if settings.mixing == "mixed" else None)
        executor = Executor(engine, compute, bus, blobs, base_model=BASE, patience_s=0.5)
        service = Trainer(context, executor, compute, {"base_model": BASE})
        running = asyncio.create_task(service.run())
        running.engine, running.compute = engine, compute
        running.service, running.context = service, context
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            compute.close()


def forward_backward(start=5, n=12):
    tokens = np.arange(start, start + n, dtype="<i4")
    targets = Tensor("int64", (n,), (tokens.astype("<i8") + 1).tobytes())
    datum = ops.Datum(
        tokens=Tensor("int32", (n,), tokens.tobytes()), inputs={"target_tokens": targets}
    )
    return ops.ForwardBackward(data=(datum,), loss_fn="cross_entropy")


STEP = ops.OptimStep(learning_rate=1e-2)


async def train(client, first, last):
    for seq in range(first, last + 1):
        await client.send(seq, forward_backward(5 + seq) if seq % 2 else STEP)
    return await client.result(last)


def weights(running, client):
    return running.engine.snapshot(client.model).weights


async def test_ops_that_arrive_out_of_order_happen_in_order(broker, bus, blobs, base):
    client = Client(bus)
    async with trainer(broker, blobs, base):
        await client.create()
        for seq in (2, 3, 4, 1, 5):
            await client.send(seq, forward_backward(seq))
        await client.result(5)
        records = await client.records()

    assert [record.seq for record in records] == [0, 1, 2, 3, 4, 5]


async def test_an_op_sent_again_happens_once(broker, bus, blobs, base):
    client = Client(bus)
    async with trainer(broker, blobs, base):
        await client.create()
        first = await train(client, 1, 2)
        await train(client, 1, 2)
        await client.idle()
        records = await client.records()

    assert [record.seq for record in records] == [0, 1, 2]
    assert await client.result(2) == first


async def test_a_failed_op_changes_nothing_and_the_next_one_runs(broker, bus, blobs, base):
    client, bad = Client(bus), ops.ForwardBackward(data=(), loss_fn="no_such_loss")
    async with trainer(broker, blobs, base):
        await client.create()
        await client.send(1, bad)
        await client.send(2, forward_backward())
        failed, good = await client.result(1), await client.result(2)

    assert isinstance(failed, Failed)
    assert failed.category == "user"
    assert "no_such_loss" in failed.message
    assert good.metrics["loss:sum"] > 0


async def test_ops_on_a_model_that_could_not_be_created_say_so(broker, bus, blobs, base):
    client = Client(bus)
    async with trainer(broker, blobs, base):
        await client.create(ops.LoraShape(rank=48))
        await client.send(1, STEP)
        failed = await client.result(1)

    assert "not created" in failed.message
    assert "48" in failed.message


async def test_another_trainer_goes_on_where_a_dead_one_stopped(broker, bus, blobs, base):
    """Weights after a take-over equal those of an undisturbed run, bit for bit."""
    moved, stayed = Client(bus), Client(bus)
    async with trainer(broker, blobs, base, "trainer-a"):
        await moved.create()
        await train(moved, 1, 6)
    async with trainer(broker, blobs, base, "trainer-b") as running:
        await stayed.create()
        await train(moved, 7, 10)
        await train(stayed, 1, 10)
        left, right = weights(running, moved), weights(running, stayed)

    assert (left == right).all()
    assert [r.seq for r in await moved.records()] == list(range(11))


async def test_a_take_over_repeats_shared_passes_without_the_other_model(broker, bus, blobs, base):
    """Every repeated result and state is compared with the log's, or the model is broken."""
    moved, release = Client(bus), threading.Event()
    async with trainer(broker, blobs, base, "trainer-a", mixing="mixed") as running:
        await moved.create()
        await moved.result(0)
        engine, compute = running.engine, running.compute
        engine.create("other", LORA)
        gate = asyncio.create_task(compute.run("gate", lambda: release.wait(60)))
        passes = engine.passes("other", forward_backward(n=20))
        other = asyncio.create_task(compute.run_passes("other", passes))
        await moved.send(1, forward_backward(n=12))
        async with asyncio.timeout(60):
            while len(compute.places()) < 2:  # both wait for the gate
                await asyncio.sleep(0.01)
        release.set()
        await asyncio.gather(gate, other)
        shared = await moved.result(1)
        await moved.send(2, STEP)
        await moved.result(2)
        before = weights(running, moved)
    async with trainer(broker, blobs, base, "trainer-b", mixing="mixed") as running:
        await moved.send(3, STEP)  # without a gradient it changes nothing
        done = await moved.result(3)
        after = weights(running, moved)

    assert (shared.frames[0].rows, shared.frames[0].length) == (2, 20)
    assert isinstance(done, ops.OptimStepDone)
    assert (before == after).all()


@pytest.mark.parametrize("ended", ["before", "after"])
async def test_a_model_moves_on_after_another_has_ended(broker, bus, blobs, base, ended):
    over, moved = Client(bus), Client(bus)
    async with trainer(broker, blobs, base, "trainer-a"):
        for client in (over, moved):
            await client.create()
            await train(client, 1, 2)
        if ended == "before":
            await over.session_is("expired")
    if ended == "after":
        await over.session_is("expired")
    async with trainer(broker, blobs, base, "trainer-b"):
        await train(moved, 3, 4)


async def saved_state(client):
    async with asyncio.timeout(60):
        while await client.bus.log.newest_state(client.model) is None:
            await asyncio.sleep(0.01)


@pytest.fixture
def repeated(monkeypatch):
    """The seqs of what executors are asked to carry out from when it is emptied."""
    seqs = []
    execute = Executor.execute
    monkeypatch.setattr(
        Executor, "execute", lambda self, op, *rest: seqs.append(op.seq) or execute(self, op, *rest)
    )
    return seqs


async def as_checkpoint(self, snapshot):
    """How earlier versions stored a state."""
    return await self._put(to_files(snapshot, with_optimizer=True))


@pytest.mark.parametrize("form", ["chunks", "checkpoint"])
async def test_a_saved_state_shortens_a_take_over(
    broker, bus, blobs, base, monkeypatch, repeated, form
):
    """Only what came after it is repeated, and the weights are the same bits."""
    if form == "checkpoint":
        monkeypatch.setattr(Executor, "store", as_checkpoint)
    moved, stayed = Client(bus), Client(bus)
    async with trainer(broker, blobs, base, "trainer-a", snapshot_steps=2):
        await moved.create()
        await train(moved, 1, 9)
        await saved_state(moved)
    saved = await bus.log.newest_state(moved.model)  # perhaps another one, saved meanwhile
    assert ("manifest-00001" in saved.parts) == (form == "chunks")
    repeated.clear()
    async with trainer(broker, blobs, base, "trainer-b") as running:
        await train(moved, 10, 10)
        assert repeated == list(range(saved.seq + 1, 11))
        await stayed.create()
        await train(stayed, 1, 10)
        assert (weights(running, moved) == weights(running, stayed)).all()


@pytest.mark.parametrize("part", ["chunk-00001", "manifest-00001", "trainer_state.json"])
@pytest.mark.parametrize("damage", ["gone", "short", "flipped"])
async def test_a_saved_state_that_is_damaged_costs_time_and_nothing_else(
    broker, bus, blobs, base, repeated, part, damage
):
    client = Client(bus)
    async with trainer(broker, blobs, base, "trainer-a", snapshot_steps=2):
        await client.create()
        await train(client, 1, 4)
        await saved_state(client)
    ref = (await bus.log.newest_state(client.model)).parts[part]
    path = blobs._place._folder / ref.blake3[:2] / ref.blake3[2:]
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:-1] if damage == "short" else bytes([data[0] ^ 1]) + data[1:])
    expected = [record.state_blake3 for record in await client.records()]
    repeated.clear()
    with structlog.testing.capture_logs() as told:
        async with trainer(broker, blobs, base, "trainer-b"):
            await train(client, 5, 6)

    assert repeated == list(range(7))
    assert any("cannot be used; starting from the first op" in one["event"] for one in told)
    assert [record.state_blake3 for record in await client.records()][:5] == expected


async def test_a_log_that_repeats_differently_breaks_the_model_loudly(
    broker, bus, blobs, base, monkeypatch
):
    client = Client(bus)
    async with trainer(broker, blobs, base, "trainer-a"):
        await client.create()
        await train(client, 1, 2)
    monkeypatch.setattr("tinsmith_trainer.executor.digest", lambda view: "another state")
    async with trainer(broker, blobs, base, "trainer-b"):
        await client.send(3, STEP)
        failed = await client.result(3)

    assert "another" in failed.message
    assert "saved checkpoint" in failed.message


async def test_a_model_that_always_fails_ends_its_clients_waiting(
    broker, bus, blobs, base, monkeypatch
):
    async def broken(self, op, log):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(Executor, "execute", broken)
    monkeypatch.setattr("tinsmith_trainer.troubles.FIRST_PAUSE_S", 0.05)
    client = Client(bus)
    async with trainer(broker, blobs, base):
        await client.create()
        failed = await client.result(0)

    assert "a fault of ours" in failed.message
    assert failed.category == "server"


async def test_every_change_of_state_is_recorded_with_its_digest(broker, bus, blobs, base):
    client = Client(bus)
    async with trainer(broker, blobs, base):
        await client.create()
        await train(client, 1, 4)
        digests = [record.state_blake3 for record in await client.records()]

    created, forward, stepped, again, last = digests
    assert forward == again == ""
    assert len({created, stepped, last}) == 3
    assert all(len(digest) == 64 for digest in (created, stepped, last))


async def test_an_owner_that_was_replaced_drops_its_model(broker, bus, blobs, base, capsys):
    client = Client(bus)
    async with trainer(broker, blobs, base) as running:
        await client.create()
        await client.result(0)
        await bus.log.take(client.model, "usurper")
        await client.send(1, forward_backward())
        async with asyncio.timeout(30):
            while client.model in running.engine.models():
                await asyncio.sleep(0.01)
        record = await bus.log.get(client.model, 1)

    assert record is None
    assert "model lost to another trainer" in capsys.readouterr().out


async def test_the_end_of_a_session_fails_what_waits_for_a_missing_op(broker, bus, blobs, base):
    client = Client(bus)
    async with trainer(broker, blobs, base) as running:
        await client.create()
        await client.send(2, STEP)
        await client.result(0)
        await client.session_is("expired")
        failed = await client.result(2)
        async with asyncio.timeout(30):
            while running.engine.models():
                await asyncio.sleep(0.01)

    assert "request 1" in failed.message
    assert not await bus.is_queued(table.PLACEMENTS, pool="*", model=ids.token(client.model))


async def test_an_unloaded_model_makes_room_at_once(broker, bus, blobs, base):
    client = Client(bus)
    run = registry.Run(
        model_id=client.model, session_id=client.session, owner="o", created_ns=1,
        base_model=BASE, lora=LORA, unloaded_ns=2,
    )  # fmt: skip
    async with trainer(broker, blobs, base) as running:
        await client.create()
        await train(client, 1, 2)
        await bus.table(table.RUNS).put(ids.token(client.model), run)
        async with asyncio.timeout(30):
            while running.engine.models():
                await asyncio.sleep(0.01)


async def test_a_save_without_a_checkpointer_fails_with_the_remedy(broker, bus, blobs, base):
    client = Client(bus)
    async with trainer(broker, blobs, base):
        await client.create()
        await client.send(1, ops.SaveWeights(name="x"))
        await client.send(2, forward_backward())
        failed, good = await client.result(1), await client.result(2)

    assert failed.category == "server"
    assert "tinsmith checkpointer" in failed.message
    assert good.metrics["loss:sum"] > 0
