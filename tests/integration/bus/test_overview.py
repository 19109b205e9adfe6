"""Gathering what an installation looks like, from a real broker."""

from __future__ import annotations

import time

import pytest

from tinsmith import ids, keys
from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus, Encoded
from tinsmith.config import BusConfig
from tinsmith.messages import ops, registry, sampling, services, table, weights
from tinsmith.messages.base import encode
from tinsmith.overview import gather, watching

pytestmark = pytest.mark.integration

SESSION = ids.new_session_id()
MODEL = ids.model_id(SESSION, 0)
TOKEN = ids.token(MODEL)
BASE = "tiny/llama"
ROLES = ("gateway", "checkpointer", "trainer", "sampler")
POOL = ids.pool_token(BASE)


def trainer(**changes):
    known = {
        "service": "trainer", "instance": "trainer-a", "version": "0.1.0", "base_models": (BASE,),
        "places": {MODEL: services.QueuePlace(turns=2, tokens=64)},
    }  # fmt: skip
    return services.ServiceAlive(**known | changes)


async def installation(bus):
    """A live run of alice with two ops done and one queued, a finished one, one queued sample."""
    now = time.time_ns()
    key = keys.new_key()
    owner = keys.owner_of_name("alice")
    entry = registry.ApiKey(
        digest=keys.digest(key), owner=owner, name="alice", last_four=key[-4:], created_ns=now
    )
    await bus.table(table.API_KEYS).put(entry.digest, entry)
    over = ids.new_session_id()
    for session_id, status in ((SESSION, "active"), (over, "finished")):
        session = registry.Session(
            session_id=session_id, owner=owner, created_ns=now, status=status
        )
        await bus.table(table.SESSIONS).put(session_id, session)
        run = registry.Run(
            model_id=ids.model_id(session_id, 0),
            session_id=session_id,
            owner=owner,
            created_ns=now,
            base_model=BASE,
            lora=ops.LoraShape(rank=8),
        )
        await bus.table(table.RUNS).put(ids.token(run.model_id), run)
    writer = await bus.log.take(MODEL, "trainer-a")
    for seq in (0, 1):
        op = ops.Op(model_id=MODEL, seq=seq, body=ops.OptimStep())
        await writer.commit(seq, Encoded(encode(op)), ops.OptimStepDone())
    op = ops.Op(model_id=MODEL, seq=2, body=ops.OptimStep())
    await bus.enqueue(table.OPS, op, model=TOKEN, seq="2")
    sample = sampling.Sample(
        request_id=f"{SESSION}:sample:0:0", sampler_id=f"{SESSION}:sample:0", seq=0,
        base_model=BASE, prompt=b"\1\0\0\0",
    )  # fmt: skip
    await bus.enqueue(
        table.SAMPLES, sample, pool=POOL, share="fp8-3", sampler=f"{SESSION}-sample-0", seq="0"
    )
    head = weights.LineageHead(
        lineage_id=MODEL, epoch=1, version=5, root="r", full_version=5, stream_seq=1
    )
    await bus.table(table.LINEAGES).put(TOKEN, head)


async def test_everything_is_told(bus):
    await installation(bus)
    async with watching(bus) as watch:
        await bus.emit(table.SERVICE_ALIVE, trainer())
        status = weights.WeightsStatus(
            lineage_id=MODEL, replica="sampler-a", plane="p", state="active", version=3
        )
        await bus.emit(table.WEIGHTS_STATUS, status)
        await bus.books.broker()  # what was sent before it has arrived
        found = await watch.look()

    (run,) = found.runs
    assert (run.model_id, run.owner_name, run.rank) == (MODEL, "alice", 8)
    assert (run.trainer, run.is_held, run.last_op, run.queued) == ("trainer-a", True, 1, 1)
    assert (run.waiting_turns, run.waiting_tokens) == (2, 64)
    assert abs(run.last_op_s - time.time()) < 3600
    assert found.run_count == 2
    queues = {queue.name: queue for queue in found.queues}
    assert queues["ops"].messages == 1
    assert [(s.base_model, s.pool, s.messages) for s in queues["samples"].shares] == [
        (BASE, "fp8", 1)
    ]
    (lineage,) = found.lineages
    assert [(r.replica, r.version, r.behind) for r in lineage.replicas] == [("sampler-a", 3, 2)]
    assert {stream.name for stream in found.broker.streams} == set(table.STREAMS)
    assert found.broker.version.startswith("2.")
    assert found.unknown == ()


async def test_what_is_missing_is_named_with_a_remedy(bus):
    await installation(bus)
    found = await gather(bus, 0.0)

    told = [problem.what for problem in found.problems]
    assert told == [f"no {role} is heard" for role in ROLES]
    assert all("tinsmith" in problem.remedy for problem in found.problems)
    assert not found.runs[0].is_held


async def test_runs_that_are_over_are_told_when_asked_for(bus):
    await installation(bus)
    found = await gather(bus, 0.0, has_ended=True)

    assert sorted(run.ended for run in found.runs) == ["", "finished"]


async def test_a_broker_that_nobody_has_used_is_no_failure(broker, tmp_path):
    blobs = BlobStore.open("", default=tmp_path / "blobs")
    async with Bus.connect(BusConfig(url=broker.url), name="test", blobs=blobs) as bus:
        found = await gather(bus, 0.0)

    assert found.broker.streams == ()
    assert "no service of Tinsmith has run" in found.unknown[0]


async def test_a_broker_without_jetstream_is_told_in_words(broker, bus, monkeypatch):
    monkeypatch.setattr("tinsmith.bus.books.API", "$JS.NOT")
    found = await gather(bus, 0.0)

    assert found.broker is None
    assert "JetStream" in found.unknown[0]
