"""States follow deltas to proven roots, by any route, and never to another."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from tinsmith.weights import DamagedStream
from tinsmith.weights.bits import ordered, unordered
from tinsmith.weights.delta import TensorChange, from_chunks, to_chunks
from tinsmith.weights.state import TensorSpec, WeightState, WrongBits, bits_of

SHAPES = {"embed": (500, 16), "norm": (16,), "mlp.up": (64, 16), "mlp.down": (16, 64)}
SPECS = {name: TensorSpec("bfloat16", shape) for name, shape in SHAPES.items()}


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


def over_the_wire(delta):
    table, chunks = to_chunks(delta)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=tuple[TensorChange, ...])
    return from_chunks(read, chunks, base_root=delta.base_root, root=delta.root)


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
    table, chunks = to_chunks(delta)
    damaged = bytearray(chunks[0])
    damaged[place % len(damaged)] ^= 1 << place % 8
    receiver, expected = state(), versions[0]
    arrived = from_chunks(table, [bytes(damaged)], base_root=delta.base_root, root=delta.root)

    try:
        receiver.swap(receiver.stage(arrived))
    except (WrongBits, DamagedStream):
        pass
    else:
        expected = versions[1]
    assert all(np.array_equal(receiver[name], expected[name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("field", "value"), [("chunk", 1), ("chunk", -1), ("start", 10**9), ("length", -1)]
)
def test_a_table_that_points_elsewhere_is_refused(field, value):
    _, (delta,) = history(1)
    table, chunks = to_chunks(delta)
    wrong = (msgspec.structs.replace(table[0], **{field: value}), *table[1:])

    with pytest.raises(DamagedStream, match=table[0].name):
        from_chunks(wrong, chunks, base_root="", root="")


def test_a_tensor_changed_twice_is_refused():
    _, (delta,) = history(1)
    table, chunks = to_chunks(delta)

    with pytest.raises(DamagedStream, match="twice"):
        from_chunks((table[0], *table), chunks, base_root="", root="")


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


def test_chunks_hold_whole_tensors(monkeypatch):
    from tinsmith.weights import delta as delta_module

    monkeypatch.setattr(delta_module, "CHUNK_BYTES", 100)
    _, (delta,) = history(1)
    table, chunks = to_chunks(delta)

    assert len(chunks) > 1
    assert from_chunks(table, chunks, base_root=delta.base_root, root=delta.root) == delta


def test_rounding_to_bfloat16_is_that_of_everybody_else():
    rng = np.random.default_rng(2)
    values = rng.integers(0, 1 << 32, 200_000, np.uint64).astype(np.uint32).view(np.float32)
    specials = np.array([0, -0.0, np.inf, -np.inf, 3.3961776e38, 1e-45], np.float32)
    values = np.concatenate([values[~np.isnan(values)], specials])

    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()

    assert np.array_equal(bits_of(values), theirs)
    assert bits_of(np.array([np.nan], np.float32)) == 0x7FC0
