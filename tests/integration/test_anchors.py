"""Anchors on a real broker: what they cover, that they never fork, and what they give away."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
import structlog
from blake3 import blake3
from tests.integration.test_log_commands import log, write_run

from tinsmith import ids
from tinsmith.bus import Encoded
from tinsmith.bus import anchors as bus_anchors
from tinsmith.logbook.anchors import read_chain
from tinsmith.logbook.file import FileLogbook
from tinsmith.messages import ops
from tinsmith.messages.base import encode
from tinsmith_checkpointer.anchoring import keep_anchoring


async def chain(bus):
    return await read_chain(bus.anchors.stored())


async def rewrite_log(bus, keep):
    """Make the log stream anew with those of its messages that ``keep`` (subject, data) wants."""
    js = bus._connection[1]
    found = []
    for model in await bus.log.models():
        found += [item async for item in bus.log.stored(model)]
    await js.delete_stream("TS_LOG")
    await bus.ensure()
    for subject, data in found:
        if (data := keep(subject, data)) is not None:
            await js.publish(subject, data)


def without(*ends):
    return lambda subject, data: None if subject.endswith(ends) else data


@pytest.fixture
async def run(bus, blobs):
    return await write_run(bus, blobs)


async def test_every_log_that_grew_is_anchored_where_it_ends(bus, blobs, run):
    other = await write_run(bus, blobs, steps=1)
    written = await bus.anchors.anchor()
    found = await chain(bus)

    assert (written, found.length, found.damage) == (1, 1, None)
    for model in (run, other):
        (anchored,) = found.of(model)
        assert anchored.head.blake3 == (await bus.log.head(model)).blake3


async def test_nothing_is_anchored_when_no_log_has_grown(bus, run):
    await bus.anchors.anchor()

    assert await bus.anchors.anchor() == 0
    assert (await chain(bus)).length == 1


async def test_an_empty_log_has_no_anchor(bus):
    assert await bus.anchors.anchor() == 0


async def test_only_what_grew_since_is_in_the_next_anchor(bus, blobs, run):
    await bus.anchors.anchor()
    other = await write_run(bus, blobs)
    await bus.log.take(run, "trainer-b")
    await write_run(bus, blobs)
    await bus.anchors.anchor()
    await bus.log.take(other, "trainer-b")
    await bus.anchors.anchor()
    found = await chain(bus)

    assert [one.number for one in found.of(run)] == [1, 2]
    assert [one.number for one in found.of(other)] == [2, 3]
    assert found.of(run)[1].head.place == "own.2"


async def test_many_logs_take_several_anchors(bus, blobs, monkeypatch):
    monkeypatch.setattr(bus_anchors, "MAX_HEADS", 2)
    runs = [await write_run(bus, blobs, steps=1) for _ in range(5)]

    assert await bus.anchors.anchor() == 3
    found = await chain(bus)
    assert (found.length, found.damage) == (3, None)
    for model in runs:
        assert found.of(model)[-1].head.blake3 == (await bus.log.head(model)).blake3


async def test_two_that_anchor_at_once_make_one_chain(bus, blobs, run):
    other = bus_anchors.Anchors(bus._connection)
    for _ in range(4):
        model = await write_run(bus, blobs, steps=1)
        await asyncio.gather(bus.anchors.anchor(), other.anchor())
        found = await chain(bus)
        assert found.damage is None
        assert len(found.of(model)) == 1


async def test_anchors_refuse_to_be_forgotten(bus, run):
    await bus.anchors.anchor()
    js = bus._connection[1]

    with pytest.raises(Exception, match="purge"):
        await js.purge_stream("TS_ANCHOR")
    with pytest.raises(Exception, match="delete"):
        await js.delete_msg("TS_ANCHOR", 1)


async def test_a_good_log_verifies_and_says_where_it_was_anchored(bus, blobs, run):
    await bus.anchors.anchor()
    one = await log(bus, blobs, "verify", run)
    every = await log(bus, blobs, "verify", "--all")

    assert (one.code, every.code) == (0, 0), one.out + every.out
    assert "last anchored: op 7, in anchor 1 (" in one.out
    last = (await chain(bus)).blake3
    assert f"anchors: verified, 1 anchor\n  last anchor {last}\n" in every.out


async def test_a_log_made_anew_without_its_tail_is_named_with_the_anchor(bus, blobs, run):
    await bus.anchors.anchor()
    await rewrite_log(bus, without(".op.6", ".op.7", ".state.6"))
    for command in (("verify", run), ("verify", "--all")):
        shown = await log(bus, blobs, *command)

        assert shown.code == 1
        assert f"{run}: damaged: op 7: anchor: it is not there, but anchor 1 (" in shown.out
        assert "the log ends with entry 7 (op 5), so its end was cut off" in shown.out


async def test_a_log_that_is_gone_is_a_run_that_is_damaged(bus, blobs, run):
    await bus.anchors.anchor()
    good = await write_run(bus, blobs)
    token = ids.token(run)
    await rewrite_log(bus, lambda subject, data: None if token in subject else data)
    named, every = await log(bus, blobs, "verify", run), await log(bus, blobs, "verify", "--all")

    assert (named.code, every.code) == (1, 1)
    assert f"{run}: damaged: op 7: anchor: it is not there" in named.out
    assert f"{good}: verified" in every.out


async def test_an_entry_that_was_replaced_is_named_with_the_anchor(bus, blobs, run):
    """By a log that is good in itself: the last entry is exchanged, and nothing follows it."""
    await bus.anchors.anchor()
    token = ids.token(run)
    stored = {s.split(f"{token}.")[1]: d async for s, d in bus.log.stored(run)}
    await rewrite_log(bus, without(".op.7"))
    writer = await bus.log.writer(run)
    await writer.commit(7, encoded(run, 7), ops.OptimStepDone(metrics={"x": 1.0}), state_blake3="z")
    shown = await log(bus, blobs, "verify", run)

    assert shown.code == 1
    assert f"{run}: damaged: entry 10 (op 7): anchor: its digest is " in shown.out
    assert f"has it with the digest {blake3(stored['op.7']).hexdigest()}" in shown.out


def encoded(model, seq):
    return Encoded(encode(ops.Op(model_id=model, seq=seq, body=ops.OptimStep())))


async def test_anchors_that_were_changed_are_named(bus, blobs, run):
    for _ in range(3):
        await bus.anchors.anchor()
        await bus.log.take(run, "trainer-b")
    js = bus._connection[1]
    kept = [item async for item in bus.anchors.stored()]
    await js.delete_stream("TS_ANCHOR")
    await bus.ensure()
    for subject, data in (kept[0], kept[2]):
        await js.publish(subject, data)
    shown = await log(bus, blobs, "verify", "--all")

    assert shown.code == 1
    assert f"{run}: verified" in shown.out
    assert "anchors: damaged: anchor 2: number: 3 is stored as " in shown.out


async def test_anchoring_goes_on_over_a_log_that_was_made_anew(bus, blobs, run):
    """It must not hide the damage, nor stop."""
    await bus.anchors.anchor()
    await rewrite_log(bus, without(".op.7"))
    assert await bus.anchors.anchor() == 1
    assert await bus.anchors.anchor() == 0
    found = await chain(bus)

    assert (found.length, found.damage) == (2, None)
    assert found.of(run)[1].head.blake3 == (await bus.log.head(run)).blake3
    assert (await log(bus, blobs, "verify", run)).code == 1


async def test_an_exported_file_carries_the_anchors_of_its_run_alone(bus, blobs, run, tmp_path):
    await write_run(bus, blobs)
    await bus.anchors.anchor()
    path = tmp_path / "run.tslog"
    exported = await log(bus, blobs, "export", run, path)
    with FileLogbook.open(path) as book:
        found = await book.anchors()

    assert exported.code == 0, exported.err
    assert list(found.heads) == [run]
    assert list(found.of(run)) == list((await chain(bus)).of(run))
    assert "last anchored: op 7" in (await log(bus, blobs, "verify", path)).out


async def test_a_service_anchors_at_once_then_and_again_and_at_its_end(bus, blobs, run):
    stopping = asyncio.Event()
    logger = structlog.get_logger("test")
    anchoring = asyncio.create_task(
        keep_anchoring(bus.anchors, logger, every_s=0.05, stopping=stopping)
    )
    for number in (1, 2):
        async with asyncio.timeout(20):
            while (await chain(bus)).length < number:
                await asyncio.sleep(0.02)
        await bus.log.take(run, f"trainer-{number}")
    stopping.set()
    await anchoring
    found = await chain(bus)

    assert found.of(run)[-1].head.blake3 == (await bus.log.head(run)).blake3


async def test_an_anchor_that_fails_is_only_late(broker, bus, run, monkeypatch):
    monkeypatch.setattr("tinsmith.bus.wire.READ_PATIENCE_S", 0.2)
    stopping = asyncio.Event()
    logger = structlog.get_logger("test")
    await asyncio.to_thread(broker.kill)
    anchoring = asyncio.create_task(
        keep_anchoring(bus.anchors, logger, every_s=0.05, stopping=stopping)
    )
    await asyncio.to_thread(broker.restart)
    async with asyncio.timeout(30):
        while True:
            with suppress(Exception):
                if (await chain(bus)).length:
                    break
            await asyncio.sleep(0.05)
    stopping.set()
    await anchoring

    assert (await chain(bus)).of(run)
