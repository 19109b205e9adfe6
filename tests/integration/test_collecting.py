"""What is freed when the blob store is compared with what needs it, and what is not."""

from __future__ import annotations

import dataclasses
import json

import pytest
from blake3 import blake3
from msgspec import structs
from tests.integration.contexts import context_of
from tests.unit.sampler.examples import prompt, sample

from tinsmith import ids, logs
from tinsmith.bus.facts import headers_of
from tinsmith.bus.log import Encoded
from tinsmith.bus.samples import SampleAddress
from tinsmith.config import BusConfig, Config
from tinsmith.errors import BrokerUnavailable, InvalidRequest
from tinsmith.messages import ops, registry, table
from tinsmith.messages.base import Tensor, encode
from tinsmith.messages.checkpoints import Checkpoint
from tinsmith.messages.ops import LoraShape
from tinsmith.messages.sampling import AdapterRef, SampleDigests, SampleDone, SampleRecord, Sequence
from tinsmith.sealing import Seals
from tinsmith_checkpointer import collecting
from tinsmith_checkpointer.collection import FREED, Collection
from tinsmith_checkpointer.config import CheckpointerConfig
from tinsmith_checkpointer.discarding import Discards
from tinsmith_checkpointer.references import References
from tinsmith_checkpointer.upkeep import Upkeep

SESSION = ids.new_session_id()
MODEL = ids.model_id(SESSION, 0)
SAMPLER = ids.sampler_id(SESSION, 0)
BIG = 600_000  # bytes that go through the blob store
DIGESTS = SampleDigests(prompt="d", prompt_length=4, sequences=())
LATE_S = 0.0


@pytest.fixture
def references(bus):
    return References(bus, Seals(bus, Config()))


@pytest.fixture
def collection(bus, blobs, references):
    """By which everything was put long ago."""
    return Collection(bus, blobs, references, grace_s=LATE_S)


def checkpoint(name, **parts):
    return Checkpoint(
        path=f"tinker://{MODEL}/weights/{name}",
        model_id=MODEL,
        kind="weights",
        name=name,
        op_seq=1,
        base_model="m",
        lora=LoraShape(),
        step=1,
        parts=parts,
        size_bytes=1,
        created_ns=1,
    )


def key_of(made):
    return ids.checkpoint_key(ids.CheckpointPath(MODEL, "weights", made.name))


async def digests(blobs):
    return {blob.blake3 for blob in await blobs.stored()}


async def save(bus, blobs, name, data):
    made = checkpoint(name, w=await blobs.put(data))
    await bus.table(table.CHECKPOINTS).create(key_of(made), made)
    return made


async def sampler_with_weights(bus, blobs):
    files = {"w": await blobs.put(b"of a sampler")}
    entry = registry.Sampler(
        sampler_id=SAMPLER,
        session_id=SESSION,
        owner="o",
        created_ns=1,
        base_model="m",
        adapter=AdapterRef(version="v", files=files),
    )
    await bus.table(table.SAMPLERS).create(ids.token(SAMPLER), entry)


async def queued_op(bus, fill):
    datum = ops.Datum(tokens=Tensor("int32", (BIG // 4,), fill * BIG), inputs={})
    op = ops.Op(model_id=MODEL, seq=7, body=ops.ForwardBackward(data=(datum,), loss_fn="x"))
    assert await bus.enqueue(table.OPS, op, model=ids.token(MODEL), seq="7")


async def logged_run(bus, blobs):
    writer = await bus.log.take(MODEL, "trainer")
    loaded = ops.LoadWeightsDone(path="x" * BIG, parts={"w": await blobs.put(b"was loaded")})
    await writer.commit(0, Encoded(b"an op", ref=await blobs.put(b"an op")), loaded)
    await writer.save_state(0, {"s": await blobs.put(b"a state")}, state_blake3="0" * 64)


async def logged_sample(bus, blobs):
    files = {"w": await blobs.put(b"was sampled from")}
    request = sample(request_id=f"{SAMPLER}:1", sampler_id=SAMPLER, seq=1, prompt=prompt(4))
    request = structs.replace(request, adapter=AdapterRef(version="v", files=files, model_id=MODEL))
    long = Sequence(tokens=b"\1\0\0\0" * BIG, logprobs=bytes(4 * BIG), stop_reason="stop")
    result = SampleDone(request_id="r", sequences=(long,), request_blake3="d")
    await bus.results.put_first(SAMPLER, 1, result)
    record = SampleRecord(run=MODEL, request=request, digests=DIGESTS, content=bytes(BIG))
    await bus.samples.append(SampleAddress(MODEL, SAMPLER, 1), encode(record))


async def everything(bus, blobs):
    """Blobs of every kind that is needed."""
    await save(bus, blobs, "kept", b"of a checkpoint")
    await sampler_with_weights(bus, blobs)
    await queued_op(bus, b"q")
    await logged_run(bus, blobs)
    await logged_sample(bus, blobs)


async def test_whatever_is_needed_stays_and_is_explained(bus, blobs, collection):
    await everything(bus, blobs)
    before = await digests(blobs)
    orphan = await blobs.put(b"nobody knows me")
    plan = await collection.plan()

    assert {fate: len(refs) for fate, refs in plan.blobs.items()} == {
        "checkpoints": 1,
        "samplers": 1,
        "in flight": 2,  # a queued op, and a result
        "payloads": 2,  # an op, and a result
        "loaded": 1,
        "states": 1,
        "samples": 2,  # a record, and the weights that it names
        "orphans": 1,
    }
    assert plan.of(*FREED) == [orphan]
    assert await collection.carry_out(plan) == orphan.size
    assert await digests(blobs) == before


@pytest.mark.parametrize(
    "told", [lambda _: {}, lambda costs: headers_of(structs.replace(costs, blobs=None))]
)
async def test_what_older_versions_and_imports_logged_stays_too(
    bus, blobs, collection, monkeypatch, told
):
    monkeypatch.setattr("tinsmith.bus.log.headers_of", told)
    await logged_run(bus, blobs)
    before = await digests(blobs)
    await collection.carry_out(await collection.plan())

    assert len(before) == 4
    assert await digests(blobs) == before


async def test_what_was_deleted_is_kept_for_a_grace_and_then_freed(bus, blobs, references):
    made = await save(bus, blobs, "x", b"deleted")
    await Discards(bus).of_checkpoint(key_of(made), made)
    await bus.table(table.CHECKPOINTS).delete(key_of(made))

    early = await Collection(bus, blobs, references, grace_s=3600).plan()
    late = await Collection(bus, blobs, references, grace_s=LATE_S).plan()

    assert list(early.blobs) == ["discarded"]
    assert list(late.blobs) == ["ended"]


async def test_what_was_put_just_now_is_kept_for_a_grace(bus, blobs, references):
    ref = await blobs.put(b"new")
    patient = Collection(bus, blobs, references, grace_s=3600)
    plan = await patient.plan()
    assert list(plan.blobs) == ["fresh"]

    plan.blobs = {"orphans": [ref]}  # and was put again after it had been planned to be freed
    assert await patient.carry_out(plan) == 0
    assert await blobs.has(ref)


async def test_what_loses_its_checkpoint_while_it_is_looked_for_is_kept_for_a_grace(
    bus, blobs, references
):
    made = await save(bus, blobs, "x", b"deleted")
    now = references.now

    async def late():
        await Discards(bus).of_checkpoint(key_of(made), made)
        await bus.table(table.CHECKPOINTS).delete(key_of(made))
        return await now()

    references.now = late
    plan = await Collection(bus, blobs, references, grace_s=3600).plan()

    assert plan.of(*FREED) == []
    assert list(plan.blobs) == ["discarded"]


async def test_op_that_leaves_its_queue_for_the_log_meanwhile_is_seen_in_one_of_them(
    bus, blobs, references, collection
):
    await queued_op(bus, b"q")
    read = references._read_payloads

    async def moved_meanwhile():
        await bus.withdraw(table.OPS, model=ids.token(MODEL), seq="7")
        await read()

    references._read_payloads = moved_meanwhile
    assert (await collection.plan()).of(*FREED) == []


def test_no_other_entry_of_the_registry_refers_to_blobs():
    """What does must be among the references."""
    held = {table.CHECKPOINTS, table.SAMPLERS, table.DISCARDED}
    others = [entity for entity in table.ENTITIES if entity not in held]

    assert others
    for entity in others:
        schema = json.dumps(collected_types(entity.message))
        assert "BlobRef" not in schema, entity.template


def collected_types(kind):
    """The names of all types within a message's fields."""
    import msgspec

    def walk(info):
        yield type(info).__name__ if not hasattr(info, "cls") else info.cls.__name__
        for name in ("fields", "types", "item_types"):
            for part in getattr(info, name, ()):
                yield from walk(getattr(part, "type", part))
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(info, name):
                yield from walk(getattr(info, name))

    return sorted(walk(msgspec.inspect.type_info(kind)))


def test_the_walk_over_types_finds_references():
    assert "BlobRef" in collected_types(Checkpoint)
    assert "BlobRef" in collected_types(registry.Sampler)


@pytest.mark.parametrize(("frees", "hours", "left"), [(True, 1e-9, 0), (True, 0, 1), (False, 1, 1)])
async def test_the_checkpointer_collects_by_itself_unless_it_is_told_not_to(
    bus, blobs, frees, hours, left
):
    context = context_of("checkpointer-test", bus, blobs)
    settings = CheckpointerConfig(free_bytes=frees, collect_hours=hours, grace_s=1e-6)
    await blobs.put(b"nobody knows me")
    await Upkeep(context, settings).go_round()

    assert len(await blobs.stored()) == left


async def test_nothing_is_freed_where_that_is_switched_off(config):
    kept = dataclasses.replace(config, sections=(CheckpointerConfig(free_bytes=False),))

    with pytest.raises(InvalidRequest, match=r"free_bytes is false.*--dry-run"):
        await collecting.main(kept, is_dry=False, is_json=False)


async def test_nothing_is_freed_when_something_cannot_be_read(bus, blobs, collection, references):
    ref = await blobs.put(b"nobody knows me")

    async def fails():
        raise BrokerUnavailable("away")

    references._read_samples = fails
    with pytest.raises(BrokerUnavailable):
        await collection.plan()
    assert await blobs.has(ref)


@pytest.fixture
def config(broker, tmp_path):
    settings = CheckpointerConfig(grace_s=1e-6)
    return Config(
        data_dir=tmp_path,
        bus=BusConfig(url=broker.url),
        origins={"bus.url": "test"},
        sections=(settings,),
    )


async def test_the_command_explains_and_then_frees(bus, blobs, config, capsys):
    logs.configure(config.logs, service="gc", instance="gc")
    await everything(bus, blobs)
    await save(bus, blobs, "old", b"deleted")
    made = checkpoint("old", w=await blobs.name(b"deleted"))
    await Discards(bus).of_checkpoint(key_of(made), made)
    await bus.table(table.CHECKPOINTS).delete(key_of(made))
    orphan = await blobs.put(b"nobody knows me")
    before = await digests(blobs)

    assert await collecting.main(config, is_dry=True, is_json=False) == 0
    told = capsys.readouterr().out
    assert await digests(blobs) == before
    assert "keep  checkpoints          1" in told
    assert "free  orphans              1    15 bytes" in told
    assert "TS_LOG" in told
    assert "would free 22 bytes; nothing was changed" in told

    assert await collecting.main(config, is_dry=False, is_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["dry_run"], report["freed_bytes"]) == (False, 22)
    assert before - await digests(blobs) == {orphan.blake3, blake3(b"deleted").hexdigest()}
    notes = [key async for key in keys_of(bus, table.DISCARDED)]
    assert notes == []


async def keys_of(bus, entity):
    seen = {}
    watch = await bus.table(entity).watch(lambda key, value: seen.update({key: value}))
    await watch.close()
    for key, value in seen.items():
        if value is not None:
            yield key
