"""Whatever breaks between trainer and sampler: no replica serves a root that is not in the log."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np
import pytest
from tests.integration.bus.link import Link
from tests.integration.weights.lineage import (
    DELTAS,
    PATIENCE_S,
    Engine,
    Site,
    replica,
    served_only_what_is_in_the_log,
)

from tinsmith import ids
from tinsmith.bus import Bus
from tinsmith.bus.lineages import Lineages
from tinsmith.config import BusConfig
from tinsmith.errors import BrokerUnavailable, Fenced
from tinsmith.messages.base import encode
from tinsmith.messages.table import CHUNK_STREAM, CHUNK_TEMPLATE, LINEAGE_STREAM
from tinsmith.weights import publisher as publisher_module
from tinsmith.weights.body import decode_manifest
from tinsmith.weights.policy import Policy

pytestmark = pytest.mark.integration

ZSTD = b"\x28\xb5\x2f\xfd"  # how every compressed stream begins: found in chunks alone


def js(bus):
    return bus._connection[1]


def subject(site, digest):
    return CHUNK_TEMPLATE.subject(lineage=ids.token(site.lineage_id), digest=digest)


async def body_of(bus, stored):
    """The references to an entry's chunks, without its manifest."""
    pieces = [await bus.lineages.chunks.get(stored.lineage_id, ref) for ref in stored.manifest]
    return decode_manifest(pieces).chunks


async def chunks_kept(bus):
    return (await js(bus).stream_info(CHUNK_STREAM)).state.messages


@asynccontextmanager
async def over(link, blobs):
    async with Bus.connect(BusConfig(url=link.url), name="far", blobs=blobs) as far:
        yield far


async def repaired(site, reader):
    """Do what a publisher does for a replica that cannot catch up."""
    await reader.until(lambda r: r.receiver.status().wants_full, "wants a whole state")
    await site.publisher.upkeep(wants_full=True)
    await reader.at(site.publisher.version)


# The chunks


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data + b"\0",
    ],
    ids=["truncated", "emptied", "flipped", "longer"],
)
async def test_a_chunk_that_is_not_its_digest_is_not_used(bus, damage):
    site = await Site(bus).first()
    async with replica(bus, site) as reader:
        await reader.at(1)
        receiver = reader.receiver
        with held_back(receiver):
            await site.step()
            (ref,) = await body_of(bus, (await site.stored())[-1])
            data = await bus.lineages.chunks.get(site.lineage_id, ref)
            await js(bus).publish(subject(site, ref.blake3), damage(data))
        await repaired(site, reader)
    await served_only_what_is_in_the_log(site, reader)


class held_back:  # noqa: N801 - reads like a function
    """While it is entered, a receiver takes nothing in."""

    def __init__(self, receiver):
        self._chronicle, self._news = receiver._chronicle, receiver._news

    def __enter__(self):
        self._add = self._chronicle.add
        self._waiting = []
        self._chronicle.add = self._waiting.append

    def __exit__(self, *exc):
        self._chronicle.add = self._add
        for entry in self._waiting:
            self._add(entry)
        self._news.set()


async def test_a_chunk_that_was_dropped_is_gone_around(bus):
    """By a skip over it, without a whole state."""
    site = await Site(bus, msgspec.structs.replace(DELTAS, fold=3)).first()
    async with replica(bus, site) as reader:
        await reader.at(1)
        with held_back(reader.receiver):
            for _ in range(3):
                await site.step()
            await site.publisher.upkeep()
            second = (await site.stored("delta"))[1]
            for ref in (*second.manifest, *await body_of(bus, second)):
                await js(bus).purge_stream(CHUNK_STREAM, subject=subject(site, ref.blake3))
        await reader.at(4)

        assert reader.engine.pauses == 2
    await served_only_what_is_in_the_log(site, reader)


async def test_a_chunk_that_is_put_again_is_the_same_chunk(bus):
    site = await Site(bus).first(steps=1)
    before = await chunks_kept(bus)
    for stored in await site.stored():
        for ref in (*stored.manifest, *await body_of(bus, stored)):
            data = await bus.lineages.chunks.get(site.lineage_id, ref)
            await bus.lineages.chunks.put(site.lineage_id, data)

    assert await chunks_kept(bus) == before
    async with replica(bus, site) as reader:
        await reader.at(2)


class FlippingLink(Link):
    """Changes a bit of every chunk on its way, until it is told to stop."""

    flips = 0
    is_flipping = True

    async def _pass(self, reader, writer):
        while data := await reader.read(65536):
            if self.is_flipping and (at := data.find(ZSTD)) >= 0 and at + 9 < len(data):
                data = data[: at + 9] + bytes([data[at + 9] ^ 16]) + data[at + 10 :]
                self.flips += 1
            writer.write(data)
            await writer.drain()
        writer.close()


async def test_bits_that_flip_on_the_wire_are_found_before_they_are_served(bus, broker, blobs):
    site = await Site(bus).first(steps=2)
    async with (
        FlippingLink.to(broker.url) as link,
        over(link, blobs) as far,
        replica(far, site) as reader,
    ):
        await reader.until(lambda _: link.flips > 2, "flipped")
        assert reader.receiver.serving is None
        link.is_flipping = False
        await site.step()  # when all before it has been given up, a whole state is asked for
        await reader.until(
            lambda r: r.receiver.serving or r.receiver.status().wants_full, "going on"
        )
        if reader.receiver.serving is None:
            await site.publisher.upkeep(wants_full=True)
        await reader.at(4)
    await served_only_what_is_in_the_log(site, reader)


async def test_a_publisher_that_lies_about_a_root_is_not_believed(bus):
    """Chunks that are what they should be, under an entry that is not."""
    site = await Site(bus).first(steps=1)
    async with replica(bus, site) as reader:
        await reader.at(2)
        true = (await site.stored())[-1]
        lie = msgspec.structs.replace(
            true, version=3, base_version=2, base_root=true.root, root="0" * 64
        )
        await site.publisher._writer.store(lie)
        await reader.until(lambda r: r.receiver.status().wants_full, "asks for another way")

        assert reader.receiver.serving.version == 2
        assert reader.receiver.status().mismatches == 1
    await served_only_what_is_in_the_log(site, reader)


async def test_an_entry_whose_chunks_are_too_short_for_it_is_not_used(bus):
    site = await Site(bus).first(steps=1)
    delta = (await site.stored())[-1]
    (ref,) = delta.manifest
    manifest = decode_manifest([await bus.lineages.chunks.get(site.lineage_id, ref)])
    data = await bus.lineages.chunks.get(site.lineage_id, manifest.chunks[0])
    cut = (await bus.lineages.chunks.put(site.lineage_id, data[:-3])).ref
    manifest = msgspec.structs.replace(manifest, chunks=(cut,))
    put = await bus.lineages.chunks.put(site.lineage_id, msgspec.msgpack.encode(manifest))
    wrong = msgspec.structs.replace(
        delta, version=3, base_version=2, base_root=delta.root, root="1" * 64, manifest=(put.ref,)
    )
    await site.publisher._writer.store(wrong)
    async with replica(bus, site) as reader:
        await reader.until(lambda r: r.receiver.status().wants_full, "asks for another way")
        assert reader.receiver.serving is None


# The chain


class ShakyLineages(Lineages):
    """Loses, repeats and swaps entries on their way from a real broker."""

    def __init__(self, connection, seed):
        super().__init__(connection)
        self._rng = random.Random(seed)
        self.shaken = 0

    async def follow(self, lineage_id, *, first=1):
        waiting = None
        async for entry in super().follow(lineage_id, first=first):
            fault = self._rng.choice(("none", "none", "drop", "twice", "later"))
            self.shaken += fault != "none"
            if fault == "later" and waiting is None:
                waiting = entry
                continue
            if fault != "drop":
                yield entry
            if fault == "twice":
                yield entry
            if waiting is not None:
                yield waiting
                waiting = None


@pytest.mark.parametrize("seed", range(3))
async def test_entries_may_be_lost_repeated_and_swapped_on_their_way(bus, seed):
    site = await Site(bus).first()
    bus.lineages = ShakyLineages(bus._connection, seed)
    async with replica(bus, site) as reader:
        for _ in range(20):
            await site.step()
            await asyncio.sleep(0)
        for _ in range(100):  # what was lost at the very end is seen with the next entry
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await reader.at(site.publisher.version)
                    break
            await site.step()
    assert bus.lineages.shaken
    await served_only_what_is_in_the_log(site, reader)


async def test_an_entry_that_follows_nothing_is_not_believed(bus):
    """Written into the stream by somebody who is no publisher."""
    site = await Site(bus).first(steps=1)
    async with replica(bus, site) as reader:
        await reader.at(2)
        true = (await site.stored())[-1]
        lie = msgspec.structs.replace(true, version=3, base_version=2, base_root=true.root)
        place = f"tinsmith.v1.weights.{ids.token(site.lineage_id)}.delta.3"
        await js(bus).publish(place, encode(lie))
        await reader.until(lambda r: "follows" in r.receiver.status().reason, "told of it")

        assert reader.receiver.serving.version == 2
    assert reader.engine.served[-1][0] == 2


async def test_a_second_publisher_fences_the_first(bus):
    site = await Site(bus).first(steps=1)
    old, bits = site.publisher, site.bits
    async with replica(bus, site) as reader:
        await reader.at(2)
        new = await site.open()
        with pytest.raises(Fenced, match="another owner"):
            await old.publish({n: b ^ np.uint16(1) for n, b in bits.items()})
        await site.step()
        await reader.at(3)

        assert (old.epoch, new.epoch, reader.receiver.status().epoch) == (1, 2, 2)
    assert [entry.form for entry in await site.stored()] == ["full", "delta", "delta"]
    await served_only_what_is_in_the_log(site, reader)


async def test_publishers_that_race_leave_one_chain(bus):
    """All take the lineage and publish; whoever is fenced says so, and versions have no gap."""
    sites = [Site(bus, lineage_id="race") for _ in range(4)]

    async def publish_some(site, seed):
        site.rng = np.random.default_rng(seed)
        with suppress(Fenced):
            await site.open()
            for _ in range(4):
                await site.step()

    async with replica(bus, "race") as reader:
        await asyncio.gather(*(publish_some(site, i) for i, site in enumerate(sites)))
        versions = [entry.version for entry in await sites[0].stored()]
        await reader.at(versions[-1])
    assert versions == list(range(1, len(versions) + 1))
    await served_only_what_is_in_the_log(sites[0], reader)


async def test_a_publisher_with_other_bits_than_the_newest_version_begins_with_all_of_them(bus):
    """A trainer that was restored from before: no delta may start from what it never had."""
    site = await Site(bus).first()
    before = site.bits
    await site.step()
    site.bits = before
    async with replica(bus, site) as reader:
        await reader.at(2)
        await site.open()
        await site.step()
        await reader.at(3)
    assert [entry.form for entry in await site.stored()] == ["full", "delta", "full"]
    await served_only_what_is_in_the_log(site, reader)


async def test_a_chain_that_was_replaced_is_not_served_from(bus):
    site = await Site(bus).first(steps=2)
    other = Site(bus, lineage_id=site.lineage_id)
    other.bits = {name: bits ^ np.uint16(1) for name, bits in site.bits.items()}
    async with replica(bus, site) as reader:
        await reader.at(3)
        await js(bus).delete_stream(LINEAGE_STREAM)
        await bus.ensure()
        await other.first(steps=3)
        await reader.until(
            lambda r: r.receiver.serving and r.receiver.serving.root == other.publisher.root,
            "on the other chain",
        )
        assert "fenced" in reader.states()


# Crashes of the publisher


class Crash(Exception):
    """The process ended here."""


def crashing(obj, name, monkeypatch):
    async def crash(*_, **__):
        raise Crash

    monkeypatch.setattr(obj, name, crash)


async def test_a_crash_between_the_chunks_and_the_commit_publishes_nothing(bus, monkeypatch):
    site = await Site(bus).first(steps=1)
    kept, bits = await chunks_kept(bus), site.bits
    crashing(site.publisher._writer, "store", monkeypatch)
    async with replica(bus, site) as reader:
        await reader.at(2)
        with pytest.raises(Crash):
            await site.step()

        assert await chunks_kept(bus) > kept
        assert len(await site.stored()) == 2
        site.bits = bits
        await site.open()
        await site.step()
        await reader.at(3)
    assert [entry.form for entry in await site.stored()] == ["full", "delta", "delta"]
    await served_only_what_is_in_the_log(site, reader)


async def test_a_crash_between_the_commit_and_the_head_loses_nothing(bus, monkeypatch):
    site = await Site(bus).first(steps=1)
    crashing(site.publisher._writer, "move_head", monkeypatch)
    async with replica(bus, site) as reader:
        with pytest.raises(Crash):
            await site.step()
        await reader.at(3)
        assert (await bus.lineages.head(site.lineage_id)).version == 2
        await site.open()
        await site.step()
        await reader.at(4)
    assert (await bus.lineages.head(site.lineage_id)).version == 4
    assert [entry.form for entry in await site.stored()] == ["full", "delta", "delta", "delta"]
    await served_only_what_is_in_the_log(site, reader)


async def test_chunks_of_a_crash_are_forgotten_with_those_around_them(bus, monkeypatch):
    site = await Site(bus, msgspec.structs.replace(DELTAS, keep_full=1)).first()
    with monkeypatch.context() as patch:
        crashing(site.publisher._writer, "store", patch)
        with pytest.raises(Crash):
            await site.step()
    await site.step()
    await site.publisher.upkeep(wants_full=True)
    (full,) = (await site.stored("full"))[-1:]

    assert await chunks_kept(bus) == len(full.manifest) + len(await body_of(bus, full))


class DeafLink(Link):
    """Lets everything to the broker through; what it answers is swallowed when told so."""

    is_deaf = False

    async def _pass(self, reader, writer):
        to_client = writer in self._clients
        while data := await reader.read(65536):
            await self._is_open.wait()
            if self.is_deaf and to_client:
                continue
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _accept(self, reader, writer):
        self._clients = {*getattr(self, "_clients", ()), writer}
        await super()._accept(reader, writer)


@pytest.mark.parametrize("fault", ["answers swallowed", "nothing goes out"])
async def test_a_commit_in_doubt_is_settled_before_the_next(bus, broker, blobs, monkeypatch, fault):
    monkeypatch.setattr(publisher_module, "COMMIT_PATIENCE_S", 0.2)
    monkeypatch.setattr("tinsmith.bus.wire.PUBLISH_TRY_S", 0.2)
    async with (
        DeafLink.to(broker.url) as link,
        over(link, blobs) as far,
        replica(bus, lineage := ids.model_id(ids.new_session_id(), 0)) as reader,
    ):
        site = await Site(far, lineage_id=lineage).first(steps=1)
        sent = far.lineages.chunks.put
        chunks = 0

        async def put_then_break(*args):
            """The chunks arrive; what follows them meets the fault."""
            nonlocal chunks
            chunks += 1
            found = await sent(*args)
            if chunks == 2:
                link.is_deaf = fault == "answers swallowed"
                if not link.is_deaf:
                    link.swallow()
            return found

        monkeypatch.setattr(far.lineages.chunks, "put", put_then_break)
        base = site.publisher.root
        with pytest.raises(BrokerUnavailable):
            await site.step()
        assert site.publisher.root == base
        link.is_deaf = False
        link.heal()
        link.cut()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(BrokerUnavailable):
                    await site.step()
                    break
        await reader.at(site.publisher.version)
    site.bus = bus
    stored = await site.stored()
    versions = [entry.version for entry in stored]

    assert versions == list(range(1, len(versions) + 1))
    assert site.publisher.root == stored[-1].root
    await served_only_what_is_in_the_log(site, reader)


# The broker and the way to it


async def test_a_lineage_survives_kills_of_the_broker(bus, broker):
    site = await Site(bus, Policy(full_below_bytes=0, full_every=5, fold=3)).first()
    async with replica(bus, site) as reader, replica(bus, site, plane="fp32") as wide:
        for version in range(2, 14):
            if version % 4:
                await published(site)
            else:
                await asyncio.gather(published(site), asyncio.to_thread(killed, broker))
        await reader.at(site.publisher.version)
        await wide.at(site.publisher.version)
    await served_only_what_is_in_the_log(site, reader)
    assert {served[1] for served in wide.engine.served} == {s[2] for s in wide.engine.served}


def killed(broker):
    broker.kill()
    broker.restart()


async def published(site):
    """A step whose version is durable, however often it takes."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(BrokerUnavailable):
                await site.step()
                await site.publisher.upkeep()
                return


async def test_a_slow_engine_is_not_fed_every_version_but_the_newest(bus):
    """It is stopped in the middle of a pause, while the trainer goes on."""
    site = await Site(bus).first()
    engine = SlowEngine()
    async with replica(bus, site, engine) as reader:
        await reader.at(1)
        engine.gate.clear()
        await site.step()
        await reader.until(lambda r: r.engine.pauses == 2, "in its pause")
        for _ in range(20):
            await site.step()
        engine.gate.set()
        await reader.at(22)

        assert engine.pauses == 3
    await served_only_what_is_in_the_log(site, reader)


class SlowEngine(Engine):
    """Pauses when its gate is open."""

    def __init__(self):
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    @asynccontextmanager
    async def pause(self):
        async with super().pause():
            await self.gate.wait()
            yield


async def test_a_link_that_breaks_and_stalls_delays_versions_and_loses_none(bus, broker, blobs):
    site = await Site(bus).first()
    async with Link.to(broker.url) as link, over(link, blobs) as far, replica(far, site) as reader:
        for version in range(2, 12):
            if version % 3 == 0:
                link.cut()
            if version % 4 == 0:
                link.swallow()
            await site.step()
            link.heal()
        await reader.at(11)
    await served_only_what_is_in_the_log(site, reader)


async def test_chunks_that_were_purged_under_a_late_receiver_are_asked_for_again(bus):
    site = await Site(bus).first(steps=3)
    await js(bus).purge_stream(CHUNK_STREAM)
    async with replica(bus, site) as reader:
        await repaired(site, reader)

        assert not reader.receiver.status().wants_full
    await served_only_what_is_in_the_log(site, reader)


# The engine


class BadEngine(Engine):
    """Writes as it should, but for what ``fault`` does to each write while it is set."""

    fault = None

    def write(self, name, values, indices):
        if self.fault is not None:
            name, values, indices = self.fault(name, values, indices)
        super().write(name, values, indices)


def forgets_one(name, values, indices):
    return (name, values, indices) if indices is None else (name, values[:-1], indices[:-1])


def hits_a_neighbour(name, values, indices):
    return (name, values, indices) if indices is None else (name, values, indices - 1)


def does_too_much(name, values, indices):
    if indices is None or 3 in indices:
        return name, values, indices
    return name, np.append(values, np.uint16(7)), np.append(indices, 3)


@pytest.mark.parametrize("fault", [forgets_one, hits_a_neighbour, does_too_much])
async def test_an_engine_that_writes_elsewhere_never_computes_with_it(bus, fault):
    site = await Site(bus).first()
    async with replica(bus, site, BadEngine(), checks_all_in_pause=True) as reader:
        await reader.at(1)
        reader.engine.fault = fault
        await site.step()
        await reader.until(lambda r: r.receiver.status().mismatches > 1, "fenced more than once")
        reader.engine.fault = None
        await reader.at(2)

        assert "fenced" in reader.states()
    await served_only_what_is_in_the_log(site, reader)


@pytest.mark.parametrize("plane_id", ["bf16", "fp8e4m3.b128.pow2.rne.v1"])
async def test_a_bit_that_flips_in_the_engine_fences_it_until_it_is_right_again(bus, plane_id):
    site = await Site(bus, planes=(plane_id,)).first(steps=1)
    async with replica(bus, site, plane=plane_id, recheck_s=0.05) as reader:
        await reader.at(2)
        reader.engine.arrays["mlp.up"][77] ^= 1
        await reader.until(lambda r: "fenced" in r.states(), "fenced")
        fenced = next(status for status in reader.told if status.state == "fenced")
        await reader.until(lambda r: r.told[-1].state == "active", "active again")

        assert (fenced.version, fenced.root) == (0, "")
        assert "'mlp.up'" in fenced.reason
        assert reader.engine.root() == reader.receiver.serving.plane_root
    await served_only_what_is_in_the_log(site, reader)


async def test_a_bit_that_flips_beside_the_engine_costs_a_whole_state_and_no_wrong_one(bus):
    site = await Site(bus).first(steps=1)
    async with replica(bus, site) as reader:
        await reader.at(2)
        reader.receiver._held.state["embed"][:] ^= np.uint16(1)
        await site.step()
        await reader.at(3)

        assert reader.receiver.status().mismatches > 0
        reader.receiver._held.check(reader.engine, canonical=True)
    await served_only_what_is_in_the_log(site, reader)


async def test_planes_that_differ_from_the_publishers_are_not_served(bus):
    plane_id = "int8.row.pow2.rne.v1"
    site = await Site(bus, planes=(plane_id,)).first()
    async with replica(bus, site, plane=plane_id) as reader:
        await reader.at(1)
        true = (await site.stored())[-1]
        lie = msgspec.structs.replace(
            true, version=2, plane_roots={plane_id: "0" * 64}, commit_seq=0
        )
        await site.publisher._writer.store(lie)
        await reader.until(lambda r: "fenced" in r.states(), "fenced")

        assert plane_id in reader.receiver.status().reason
    assert [version for version, *_ in reader.engine.served if version > 1] == []


# What may be forgotten


async def test_what_is_forgotten_is_never_needed_by_who_joins_or_lives(bus):
    site = await Site(bus, msgspec.structs.replace(DELTAS, full_every=3, fold=3)).first()
    for _ in range(12):
        await site.step()
        await site.publisher.upkeep()
    kept = await chunks_kept(bus)
    oldest, newest = (await site.stored("full"))[-2:]
    async with replica(bus, site) as late:
        await late.at(13)

    assert kept < sum(2 for _ in await site.stored())
    for stored in await site.stored():
        if stored.version > oldest.version:
            await body_of(bus, stored)
    assert newest.version > oldest.version > 1
    await served_only_what_is_in_the_log(site, late)


async def test_the_way_on_from_a_live_version_is_kept(bus):
    site = await Site(bus, msgspec.structs.replace(DELTAS, full_every=2)).first()
    engine = Engine()
    async with replica(bus, site, engine) as reader:
        await reader.at(1)
        with held_back(reader.receiver):
            for _ in range(8):
                await site.step()
                await site.publisher.upkeep(live=[1])
        await reader.at(9)

        assert engine.pauses == 2
        assert not reader.receiver.status().mismatches
    for stored in (await site.stored("delta"))[:2]:
        await body_of(bus, stored)
