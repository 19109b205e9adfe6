"""What a lineage's parts decide without a broker: ways, folds, what is kept, who is alive."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from tinsmith.bus.lineages import Entry
from tinsmith.messages.weights import LineageOpened, WeightsStatus, WeightsStored
from tinsmith.weights.catchup import BrokenChain, Chronicle
from tinsmith.weights.folding import Folding, folded
from tinsmith.weights.policy import Policy, kept_from
from tinsmith.weights.roll import SILENT_S, Roll
from tinsmith.weights.specs import TensorSpec
from tinsmith.weights.state import WeightState


def root(version):
    return f"root {version}"


def stored(form, version, base=0, *, size=10, chunk=0, epoch=1, prev=""):
    return WeightsStored(
        lineage_id="l",
        epoch=epoch,
        version=version,
        form=form,
        root=root(version),
        base_version=base,
        base_root=root(base) if base else "",
        manifest=(),
        size=size,
        first_chunk=chunk or 10 * version,
        prev_blake3=prev,
    )


def chronicle(*entries):
    found = Chronicle()
    for place, message in enumerate(entries, 1):
        prev = str(place - 1) if place > 1 else ""
        found.add(Entry(place, str(place), msgspec.structs.replace(message, prev_blake3=prev)))
    return found


def names(route):
    return None if route is None else [f"{entry.form}{entry.version}" for entry in route]


FIVE = [stored("full", 1, size=100), *(stored("delta", v, v - 1) for v in range(2, 6))]


def test_nothing_to_do_is_an_empty_way():
    assert names(chronicle(*FIVE).route(5, root(5))) == []


def test_who_has_nothing_begins_with_the_whole():
    assert names(chronicle(*FIVE).route(0, "")) == ["full1", "delta2", "delta3", "delta4", "delta5"]


def test_who_has_a_version_goes_on_from_it():
    assert names(chronicle(*FIVE).route(3, root(3))) == ["delta4", "delta5"]


def test_a_cheaper_skip_is_taken_and_a_dearer_one_is_not():
    cheap = chronicle(*FIVE, stored("skip", 4, 1, size=25))
    dear = chronicle(*FIVE, stored("skip", 4, 1, size=35))

    assert names(cheap.route(1, root(1))) == ["skip4", "delta5"]
    assert names(dear.route(1, root(1))) == ["delta2", "delta3", "delta4", "delta5"]


def test_a_whole_state_is_taken_by_who_serves_only_if_it_is_much_smaller():
    near = chronicle(*FIVE, stored("full", 5, size=39))
    tiny = chronicle(*FIVE, stored("full", 5, size=4))

    assert names(near.route(1, root(1))) == ["delta2", "delta3", "delta4", "delta5"]
    assert names(near.route(0, "")) == ["full5"]
    assert names(tiny.route(1, root(1))) == ["full5"]


def test_other_bits_under_the_same_version_have_no_way_on_by_deltas():
    assert names(chronicle(*FIVE).route(4, "other")) is None
    assert names(chronicle(*FIVE, stored("full", 5, size=99)).route(4, "other")) == ["full5"]


def test_what_was_lost_is_gone_around_or_there_is_no_way():
    found = chronicle(*FIVE, stored("skip", 4, 2, size=99))
    found.lose(FIVE[2])

    assert names(found.route(2, root(2))) == ["skip4", "delta5"]
    found.lose(stored("skip", 4, 2, size=99))
    assert found.route(2, root(2)) is None


def test_a_whole_state_that_is_stored_again_is_not_the_one_that_was_lost():
    found = chronicle(FIVE[0])
    found.lose(FIVE[0])
    assert found.route(0, "") is None
    found.add(Entry(2, "2", stored("full", 1, chunk=77, prev="1")))

    assert names(found.route(0, "")) == ["full1"]


def test_an_entry_that_comes_twice_changes_nothing():
    found = chronicle(*FIVE)
    found.add(Entry(2, "2", FIVE[1]))

    assert found.stream_seq == 5
    assert names(found.route(4, root(4))) == ["delta5"]


def test_a_gap_in_the_chain_is_seen():
    with pytest.raises(BrokenChain, match="follows"):
        chronicle(*FIVE).add(Entry(7, "7", stored("delta", 7, 6, prev="6")))


def test_a_publisher_of_before_is_not_believed_whatever_it_follows():
    found = chronicle(FIVE[0])
    opened = LineageOpened(
        lineage_id="l", epoch=2, publisher_id="b", content="full", prev_blake3="1"
    )
    found.add(Entry(2, "2", opened))

    with pytest.raises(BrokenChain, match="epoch 1"):
        found.add(Entry(3, "3", stored("delta", 2, 1, epoch=1, prev="2")))


def test_what_is_pruned_is_needed_by_nobody_who_starts_anew():
    found = chronicle(*FIVE, stored("full", 5, size=90))
    found.prune(5)

    assert names(found.route(0, "")) == ["full5"]


def test_a_served_state_is_missed_only_in_a_chain_that_lacks_it():
    found = chronicle(*FIVE)

    assert not found.is_without(3, root(3))
    assert found.is_without(3, "other")
    assert found.is_without(9, root(9))
    assert not Chronicle().is_without(9, root(9))


# What is kept

LONG = [
    stored("full", 1, chunk=1),
    stored("delta", 2, 1, chunk=2),
    stored("delta", 3, 2, chunk=3),
    stored("full", 3, chunk=4),
    stored("delta", 4, 3, chunk=5),
    stored("full", 4, chunk=6),
    stored("delta", 5, 4, chunk=7),
]


def test_nothing_is_forgotten_before_there_are_enough_whole_states():
    assert kept_from(LONG[:3], keep_full=2) is None


def test_the_oldest_kept_whole_state_and_all_that_follows_it_stay():
    assert kept_from(LONG, keep_full=2) == 4
    assert kept_from(LONG, keep_full=1) == 6


def test_the_way_on_from_a_live_version_stays():
    assert kept_from(LONG, keep_full=1, live=[2]) == 3
    assert kept_from(LONG, keep_full=1, live=[5, 4]) == 6


def test_a_delta_before_its_whole_state_in_the_stream_stays_for_who_starts_there():
    late_full = [*LONG[:3], stored("delta", 4, 3, chunk=4), stored("full", 3, chunk=5)]

    assert kept_from(late_full, keep_full=1) == 4


def test_a_whole_state_is_due_by_number_or_by_bytes():
    policy = Policy(full_every=8, full_share=0.5)

    assert not policy.is_full_due(versions=7, delta_bytes=50, full_bytes=100)
    assert policy.is_full_due(versions=8, delta_bytes=0, full_bytes=100)
    assert policy.is_full_due(versions=1, delta_bytes=51, full_bytes=100)


# Folds

SPECS = {"a": TensorSpec("bfloat16", (4000,)), "b": TensorSpec("bfloat16", (300,))}


def random_walk(steps, density):
    rng = np.random.default_rng(0)
    state = WeightState(SPECS, {n: rng.integers(0, 9, s.size, np.uint16) for n, s in SPECS.items()})
    deltas = []
    for _ in range(steps):
        new = {name: state[name].copy() for name in SPECS}
        for array in new.values():
            at = rng.random(array.size) < density
            array[at] = rng.integers(0, 1 << 16, int(at.sum()), np.uint16)
        delta, staged = state.prepare(new)
        state.swap(staged)
        deltas.append(delta)
    return state, deltas


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.6, 1.0])
def test_a_fold_leads_where_its_deltas_do(density):
    state, deltas = random_walk(5, density)
    start, _ = random_walk(0, density)

    assert start.stage(folded(deltas, state)).root == state.root


def test_folds_are_folded_again():
    state, deltas = random_walk(4, 0.01)
    folding, found = Folding(2), []
    for version, delta in enumerate(deltas, 2):
        folding.add(version, delta)
        if version < 5:
            found += folding.due(state) if version % 2 else []
    found += folding.due(state)

    assert [(skip.base_version, skip.version) for skip in found] == [(1, 3), (3, 5), (1, 5)]


def test_nothing_is_folded_when_it_is_off():
    state, deltas = random_walk(3, 0.01)
    folding = Folding(0)
    for version, delta in enumerate(deltas, 2):
        folding.add(version, delta)

    assert folding.due(state) == []


# Replicas


def status(replica, version, **fields):
    return WeightsStatus(
        lineage_id="l", replica=replica, plane="bf16", state="active", version=version, **fields
    )


def test_replicas_count_as_long_as_they_are_heard_of():
    now = 0.0
    roll = Roll(clock=lambda: now)
    roll.hear(status("a", 3))
    now = SILENT_S - 1
    roll.hear(status("b", 0, wants_full=True))

    assert roll.live("l") == [3]
    assert roll.wants_full("l")
    now = SILENT_S + 1
    assert roll.live("l") == []
    assert roll.live("other") == []


def test_replicas_with_other_bits_of_one_version_are_named():
    roll = Roll()
    roll.hear(status("a", 3, root="x"))
    roll.hear(status("b", 3, root="x"))
    roll.hear(status("c", 4, root="y"))
    assert roll.disagreeing("l") == []
    roll.hear(status("d", 3, root="z"))

    assert [(one.replica, other.replica) for one, other in roll.disagreeing("l")] == [("a", "d")]


async def test_waiting_for_replicas_ends_when_enough_are_there():
    roll = Roll()
    waiting = asyncio.create_task(roll.active("l", 3, count=2, timeout_s=60.0))
    for name, version in (("a", 3), ("b", 2), ("b", 4)):
        await asyncio.sleep(0)
        roll.hear(status(name, version))

    assert await waiting == 2
    assert await roll.active("l", 5, count=1, timeout_s=0.0) == 0
