"""Receivers follow a lineage through a real broker, from any beginning, by the cheapest way."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.integration.weights.lineage import (
    DELTAS,
    SPECS,
    Engine,
    Site,
    replica,
    served_only_what_is_in_the_log,
)

from tinsmith.errors import InvalidRequest, VersionUnmet
from tinsmith.weights.planes import PLANES, plane
from tinsmith.weights.policy import Policy
from tinsmith.weights.specs import TensorSpec

pytestmark = pytest.mark.integration


def policy(**changes):
    return msgspec.structs.replace(DELTAS, **changes)


async def test_a_receiver_follows_every_version_to_the_bits_that_were_published(bus):
    site = await Site(bus).first()
    async with replica(bus, site) as reader:
        for version in range(2, 12):
            await site.step()
            await reader.at(version)

            for name, bits in site.bits.items():
                assert np.array_equal(reader.engine.arrays[name], bits)
    assert [entry.form for entry in await site.stored()] == ["full"] + ["delta"] * 10
    await served_only_what_is_in_the_log(site, reader)


async def test_a_late_receiver_starts_from_the_newest_whole_state_and_pauses_once(bus):
    site = Site(bus, policy(full_every=4))
    await site.first()
    for _ in range(6):
        await site.step()
        await site.publisher.upkeep()
    async with replica(bus, site) as late:
        await late.at(7)

    assert late.engine.pauses == 1
    assert late.receiver.status().root == site.publisher.root
    assert [entry.version for entry in await site.stored("full")] == [1, 5]
    await served_only_what_is_in_the_log(site, late)


async def test_who_was_away_goes_by_a_skip_in_one_step(bus):
    site = await Site(bus, policy(fold=4)).first()
    engine = Engine()
    async with replica(bus, site, engine) as reader:
        await reader.at(1)
        held = reader.receiver._held
    for _ in range(6):
        await site.step()
        await site.publisher.upkeep()
    async with replica(bus, site, engine) as reader:
        reader.receiver._held, reader.receiver._version = held, 1
        await reader.at(7)
        way = reader.receiver._chronicle.route(1, (await site.roots())[1])

    assert [(entry.form, entry.base_version, entry.version) for entry in way] == [
        ("skip", 1, 5),
        ("delta", 5, 6),
        ("delta", 6, 7),
    ]
    await served_only_what_is_in_the_log(site, reader)


async def test_skips_of_skips_lead_to_the_same_roots(bus):
    site = await Site(bus, policy(fold=2)).first()
    for _ in range(8):
        await site.step()
        await site.publisher.upkeep()
    skips = await site.stored("skip")
    roots = await site.roots()

    assert [(s.base_version, s.version) for s in skips] == [
        (1, 3), (3, 5), (1, 5), (5, 7), (7, 9), (5, 9),
    ]  # fmt: skip
    assert all((s.root, s.base_root) == (roots[s.version], roots[s.base_version]) for s in skips)
    async with replica(bus, site) as reader:
        await reader.at(9)
    await served_only_what_is_in_the_log(site, reader)


@pytest.mark.parametrize("plane_id", sorted(PLANES))
async def test_an_engine_holds_its_plane_bit_for_bit(bus, plane_id):
    site = await Site(bus, planes=(plane_id,)).first()
    async with replica(bus, site, plane=plane_id) as reader:
        for version in range(2, 6):
            await site.step()
            await reader.at(version)

            for name, spec in SPECS.items():
                for array, wanted in plane(plane_id).whole(name, spec, site.bits[name]).items():
                    assert np.array_equal(reader.engine.arrays[array], wanted)
            stored = (await site.stored())[-1]
            status = reader.receiver.status()

            assert status.plane_root == stored.plane_roots[plane_id] == reader.engine.root()
            assert status.root == stored.root


async def test_a_small_state_goes_as_a_whole_every_time(bus):
    site = await Site(bus, Policy()).first()
    async with replica(bus, site) as reader:
        for version in (2, 3):
            await site.step()
            await reader.at(version)
    assert [entry.form for entry in await site.stored()] == ["full"] * 3
    await served_only_what_is_in_the_log(site, reader)


async def test_nothing_is_published_when_nothing_has_changed(bus):
    site = await Site(bus).first()
    again = await site.publisher.publish(site.bits)

    assert (again.form, again.version) == ("same", 1)
    assert len(await site.stored()) == 1


async def test_any_density_travels(bus):
    site = await Site(bus).first()
    async with replica(bus, site) as reader:
        for version, density in enumerate((0.0005, 0.3, 0.9, 1.0), 2):
            await site.step(density)
            await reader.at(version)
    await served_only_what_is_in_the_log(site, reader)


async def test_a_tensor_that_is_not_of_the_lineage_is_refused_and_nothing_moves(bus):
    site = await Site(bus).first()

    with pytest.raises(InvalidRequest, match="other"):
        await site.publisher.publish({"other": np.zeros(3, np.uint16)})
    assert (await site.step()).version == 2


async def test_the_head_follows_the_chain(bus):
    site = await Site(bus).first(steps=2)
    head = await bus.lineages.head(site.lineage_id)
    last = (await site.entries())[-1]

    assert (head.version, head.root, head.epoch, head.full_version) == (
        3, site.publisher.root, 1, 1,
    )  # fmt: skip
    assert head.stream_seq == last.stream_seq


async def test_chunks_are_small_enough_for_the_broker_and_a_large_state_takes_several(
    bus, monkeypatch
):
    monkeypatch.setattr("tinsmith.bus.chunks.CHUNK_BYTES", 1000)
    site = await Site(bus).first(steps=2)
    async with replica(bus, site) as reader:
        await reader.at(3)
    whole = (await site.stored("full"))[0]

    assert whole.size > 10 * 1000
    assert max(ref.size for ref in whole.manifest) <= 1000
    await served_only_what_is_in_the_log(site, reader)


async def test_a_request_for_a_version_is_served_by_it_or_refused(bus):
    site = await Site(bus).first()
    async with replica(bus, site) as reader:
        receiver = reader.receiver
        with pytest.raises(VersionUnmet, match="serves none"):
            receiver.require()
        await reader.at(1)
        with pytest.raises(VersionUnmet, match="at least 2"):
            receiver.require(min_version=2)
        await site.step()
        await reader.at(2)

        assert receiver.require(min_version=1).version == 2
        assert receiver.require(exact_version=2).root == site.publisher.root
        with pytest.raises(VersionUnmet, match="exactly 1"):
            receiver.require(exact_version=1)


async def test_statuses_tell_what_was_received(bus):
    site = await Site(bus).first(steps=1)
    async with replica(bus, site) as reader:
        await reader.at(2)
        await site.step()
        await reader.at(3)
    status = reader.told[-1]

    assert (status.version, status.behind, status.epoch, status.mismatches) == (3, 0, 1, 0)
    assert status.received_bytes == sum(entry.size for entry in await site.stored())
    assert min(status.stage_ms, status.pause_ms) > 0
    assert reader.states()[-4:] == ["staging", "active", "staging", "active"]


async def test_two_lineages_do_not_touch_each_other(bus):
    one, other = await Site(bus).first(steps=1), await Site(bus).first(steps=2)
    async with replica(bus, one) as first, replica(bus, other) as second:
        await first.at(2)
        await second.at(3)
    assert first.engine.root() == one.publisher.root != second.engine.root()


async def test_an_engine_of_another_model_is_fenced_and_told_why(bus):
    site = await Site(bus).first()
    specs = {name: spec for name, spec in SPECS.items() if name != "norm"}
    async with replica(bus, site, Engine(specs=specs)) as reader:
        await reader.until(lambda r: "fenced" in r.states(), "fenced")

        assert "'norm'" in reader.receiver.status().reason
    assert not reader.engine.served


async def test_an_engine_whose_arrays_have_another_size_is_fenced_and_told_why(bus):
    site = await Site(bus).first()
    specs = {**SPECS, "norm": TensorSpec("bfloat16", (17,))}
    async with replica(bus, site, Engine(specs=specs)) as reader:
        await reader.until(lambda r: "fenced" in r.states(), "fenced")

        assert "'norm'" in reader.receiver.status().reason
    assert not reader.engine.served


async def test_a_receiver_waits_for_a_lineage_that_is_not_there_yet(bus):
    site = Site(bus)
    async with replica(bus, site) as reader:
        await reader.until(lambda r: r.told, "told")
        assert reader.receiver.status().state == "cold"
        await site.first()
        await reader.at(1)
