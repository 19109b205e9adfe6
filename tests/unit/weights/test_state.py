"""States follow deltas to proven roots, by any route, and never to another."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from tinsmith.errors import InvalidRequest
from tinsmith.weights import DamagedStream
from tinsmith.weights.bits import ordered, unordered
from tinsmith.weights.body import BodyReader, BodyWriter, Whole
from tinsmith.weights.change import dense, raw
from tinsmith.weights.delta import Delta
from tinsmith.weights.specs import TensorSpec
from tinsmith.weights.state import StateReader, WeightState, WrongBits, bits_of

SHAPES = {"embed": (500, 16), "norm": (16,), "mlp.up": (64, 16), "mlp.down": (16, 64)}
SPECS = {name: TensorSpec("bfloat16", shape) for name, shape in SHAPES.items()}

both_codes = pytest.mark.parametrize("code", [dense, raw])


def first_bits():
    rng = np.random.default_rng(0)
    return {n: bits_of(rng.standard_normal(shape, np.float32)) for n, shape in SHAPES.items()}


def state():
    return WeightState(SPECS, first_bits())


def stepped(rng, bits):
    """A training step: few elements of most tensors, by a unit in the last place or two."""
    new = {}
    for name, old in bits.items():
        new[name] = old.copy()
        at = np.flatnonzero(rng.random(old.size) < (0 if name == "norm" else 0.02))
        steps = rng.choice(np.array([1, -1, 2], np.int16), at.size).view(np.uint16)
        new[name][at] = unordered(ordered(old[at]) + steps)
    return new


def history(steps):
    """The bits of each version, and the delta to each from the one before."""
    rng = np.random.default_rng(1)
    versions, deltas, publisher = [first_bits()], [], state()
    for _ in range(steps):
        versions.append(stepped(rng, versions[-1]))
        deltas.append(publisher.delta(versions[-1]))
        publisher.swap(publisher.stage(deltas[-1]))
    return versions, deltas


def sent(delta, limit=1000):
    """The table of changes, and the chunks that it is about."""
    body = BodyWriter(limit)
    wholes = [Whole(n, change, delta.digests[n]) for n, change in delta.changes.items()]
    chunks = [chunk for whole in wholes for chunk in body.add(whole)]
    return tuple(body.tensors), [*chunks, *body.finish()]


def arrived(table, chunks, like):
    body = BodyReader(table)
    wholes = [whole for chunk in chunks for whole in body.feed(chunk)] + list(body.finish())
    changes = {whole.name: whole.change for whole in wholes}
    digests = {whole.name: whole.digest for whole in wholes}
    return Delta(like.base_root, like.root, changes, digests)


def read_whole(wholes, root):
    reader = StateReader(SPECS)
    for whole in wholes:
        reader.take(whole)
    return reader.finish(root)


def over_the_wire(delta):
    return arrived(*sent(delta), like=delta)


def test_a_receiver_follows_two_hundred_steps_to_every_root():
    versions, deltas = history(200)
    receiver = state()
    for delta in deltas:
        receiver.swap(receiver.stage(over_the_wire(delta)))

        assert receiver.root == delta.root
        receiver.check(delta.changes)
    assert all(np.array_equal(receiver[name], versions[-1][name]) for name in SHAPES)
    assert receiver.root == WeightState(SPECS, versions[-1]).root


def test_several_deltas_at_once_lead_to_the_same_root():
    _, deltas = history(8)
    receiver = state()

    receiver.swap(receiver.stage(*deltas))

    assert receiver.root == deltas[-1].root
    receiver.check()


def test_a_missing_delta_between_others_is_seen():
    _, deltas = history(3)

    with pytest.raises(WrongBits, match="starts from"):
        state().stage(deltas[0], deltas[2])


def test_only_what_changed_travels():
    _, deltas = history(1)

    assert "norm" not in deltas[0].changes
    assert 0 < deltas[0].size_bytes < 0.1 * sum(2 * np.prod(s) for s in SHAPES.values())


def test_a_delta_of_another_state_is_refused():
    _, (first, second) = history(2)
    receiver = state()

    with pytest.raises(WrongBits, match="starts from"):
        receiver.stage(second)
    assert receiver.root == first.base_root


@pytest.mark.parametrize("place", range(0, 200, 7))
def test_a_flipped_bit_on_the_way_never_leads_to_other_bits(place):
    """A few bits of a zstd frame mean nothing; any other must be noticed before the swap."""
    versions, (delta,) = history(1)
    table, chunks = sent(delta)
    chunk, byte = place % len(chunks), place % len(chunks[-1])
    chunks[chunk] = bytearray(chunks[chunk])
    chunks[chunk][byte] ^= 1 << place % 8
    receiver, expected = state(), versions[0]

    try:
        receiver.swap(receiver.stage(arrived(table, chunks, delta)))
    except (WrongBits, DamagedStream):
        pass
    else:
        expected = versions[1]
    assert all(np.array_equal(receiver[name], expected[name]) for name in SHAPES)


def test_a_lie_about_a_digest_or_the_root_is_refused():
    _, (delta,) = history(1)
    name = next(iter(delta.digests))
    lie = dataclasses.replace(delta, digests={**delta.digests, name: 1})

    for wrong in (lie, dataclasses.replace(delta, root="0" * 64)):
        with pytest.raises(WrongBits):
            state().stage(wrong)


def test_a_tensor_that_is_not_there_is_refused():
    _, (delta,) = history(1)
    change = next(iter(delta.changes.values()))
    wrong = dataclasses.replace(delta, changes={"other": change}, digests={"other": 0})

    with pytest.raises(WrongBits, match="other"):
        state().stage(wrong)


def test_a_bit_flipped_in_memory_is_found():
    held = state()
    held["mlp.up"][77] ^= 1

    held.check(["norm", "embed"])
    with pytest.raises(WrongBits, match=r"mlp\.up"):
        held.check()


@both_codes
def test_a_full_state_is_read_as_it_was_written_and_goes_on(code):
    versions, deltas = history(1)
    read = read_whole(state().full(code), state().root)
    read.swap(read.stage(deltas[0]))

    for name, bits in versions[1].items():
        assert np.array_equal(read[name], bits)


@both_codes
def test_a_full_state_is_read_into_arrays_that_are_there(code):
    into = {name: np.empty_like(bits) for name, bits in first_bits().items()}
    reader = StateReader(SPECS, into)
    for whole in state().full(code):
        reader.take(whole)
    read = reader.finish(state().root)

    for name, bits in first_bits().items():
        assert read[name] is into[name]
        assert np.array_equal(into[name], bits)


@both_codes
def test_a_full_state_without_one_of_its_tensors_is_refused(code):
    first, *others = state().full(code)

    with pytest.raises(WrongBits, match=first.name):
        read_whole(others, state().root)


@both_codes
def test_a_full_state_with_a_flipped_bit_is_refused(code):
    held = state()
    wholes = list(held.full(code))
    held["norm"][3] ^= 1
    damaged = [*wholes[:1], *list(held.full(code))[1:]]

    with pytest.raises(WrongBits, match="norm"):
        read_whole(damaged, held.root)


def test_a_full_state_of_another_root_is_refused():
    with pytest.raises(WrongBits, match="the state is "):
        read_whole(state().full(), "0" * 64)


@both_codes
def test_a_tensor_that_no_spec_names_is_refused(code):
    (whole, *_) = state().full(code)

    with pytest.raises(WrongBits, match="'other' is no tensor"):
        StateReader(SPECS).take(msgspec.structs.replace(whole, name="other"))


def test_a_change_is_no_tensor_of_a_full_state():
    (delta,) = history(1)[1]
    whole = Whole("embed", delta.changes["embed"], delta.digests["embed"])

    with pytest.raises(DamagedStream, match="has not all patterns"):
        StateReader(SPECS).take(whole)


def test_what_is_prepared_is_what_others_stage():
    versions, _ = history(1)
    publisher, receiver = state(), state()
    delta, staged = publisher.prepare(versions[1])
    publisher.swap(staged)
    receiver.swap(receiver.stage(delta))

    assert publisher.root == receiver.root == WeightState(SPECS, versions[1]).root
    publisher.check()


@pytest.mark.parametrize("wrong", [np.zeros(3, np.uint16), np.zeros(16, np.uint32)])
def test_bits_that_are_not_what_their_spec_says_are_refused(wrong):
    with pytest.raises(InvalidRequest, match="norm"):
        WeightState(SPECS, {**first_bits(), "norm": wrong})


def test_rounding_to_bfloat16_is_that_of_everybody_else():
    rng = np.random.default_rng(2)
    values = rng.integers(0, 1 << 32, 200_000, np.uint64).astype(np.uint32).view(np.float32)
    specials = np.array([0, -0.0, np.inf, -np.inf, 3.3961776e38, 1e-45], np.float32)
    values = np.concatenate([values[~np.isnan(values)], specials])

    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()

    assert np.array_equal(bits_of(values), theirs)
    assert bits_of(np.array([np.nan], np.float32)) == 0x7FC0
