"""Changes between versions: no bit is lost, forms add up, and damaged ones are refused."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tinsmith.errors import InvalidRequest
from tinsmith.weights import Change, DamagedStream, apply, between, fold, invert
from tinsmith.weights import change as change_module
from tinsmith.weights.bits import ordered, unordered, unzigzag, zigzag

WIDTHS = [np.uint8, np.uint16, np.uint32]
KINDS = ["ulp", "set", "xor", "dense", "raw"]


def random_bits(rng, size, dtype=np.uint16):
    return rng.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)


def some_changed(rng, old, density):
    new = old.copy()
    at = rng.random(old.size) < density
    new[at] = random_bits(rng, int(at.sum()), old.dtype)
    return new


def nudged(rng, old, density):
    """As training changes weights: some elements by one or two units in the last place."""
    new = old.copy()
    at = rng.random(old.size) < density
    steps = rng.choice(np.array([1, -1, 2, -2], old.dtype.str.replace("u", "i")), int(at.sum()))
    new[at] = unordered(ordered(old[at]) + steps.view(old.dtype))
    return new


@given(pair=st.sampled_from(WIDTHS).flatmap(
    lambda dtype: st.integers(0, 70).flatmap(
        lambda size: st.tuples(arrays.arrays(dtype, size), arrays.arrays(dtype, size))
    )
))  # fmt: skip
def test_any_two_patterns_come_back(pair):
    old, new = pair

    change = between(old, new)

    assert np.array_equal(apply(change, old), new)
    assert change.count == np.count_nonzero(old != new)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("density", [0, 1e-5, 1e-3, 0.02, 0.3, 0.97, 1])
def test_every_density_comes_back(dtype, density):
    rng = np.random.default_rng(1)
    old = random_bits(rng, 300_000, dtype)

    for new in (some_changed(rng, old, density), nudged(rng, old, density)):
        assert np.array_equal(apply(between(old, new), old), new)


def test_special_patterns_of_bfloat16_come_back():
    special = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 1, 0x8001], np.uint16)

    for old, new in ((special, special[::-1].copy()), (special, np.roll(special, 3))):
        assert np.array_equal(apply(between(old, new), old), new)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("density", [1e-4, 0.05, 0.9])
def test_every_form_leads_to_the_same_bits(kind, dtype, density, monkeypatch):
    monkeypatch.setattr(change_module, "_smallest", lambda *_, **__: kind)
    rng = np.random.default_rng(2)
    old = random_bits(rng, 200_000, dtype)
    new = some_changed(rng, old, density)

    change = between(old, new)

    assert change.kind == kind
    assert np.array_equal(apply(change, old), new)


def test_a_gap_of_more_than_two_bytes_comes_back():
    old = np.zeros(1 << 21, np.uint16)
    new = old.copy()
    new[[0, 70_000, (1 << 21) - 1]] = 5

    change = between(old, new)

    assert change.kind in ("ulp", "set")
    assert np.array_equal(apply(change, old), new)


def test_equal_tensors_cost_nothing():
    bits = np.arange(1000, dtype=np.uint16)

    assert between(bits, bits.copy()) == Change("same", 2, 1000, 0)


def test_small_steps_are_coded_near_their_entropy():
    """At least 80 % of what independent positions and steps must cost."""
    rng = np.random.default_rng(3)
    old = (rng.standard_normal(1 << 20, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for density in (0.006, 0.02, 0.1, 0.5):
        new = nudged(rng, old, density)
        share = np.count_nonzero(old != new) / old.size
        position = -(share * np.log2(share) + (1 - share) * np.log2(1 - share))
        bound = old.size * (position + share * 2) / 8  # four steps, equally often

        change = between(old, new)

        assert change.kind == "ulp"
        assert bound / len(change.data) > 0.8


def test_steps_add_up_and_cancel_out():
    rng = np.random.default_rng(4)
    versions = [random_bits(rng, 100_000)]
    for _ in range(4):
        versions.append(nudged(rng, versions[-1], 0.03))
    changes = [between(*pair) for pair in itertools.pairwise(versions)]
    folded = changes[0]
    for change in changes[1:]:
        folded = fold(folded, change)

    assert folded == between(versions[0], versions[-1])
    assert np.array_equal(apply(invert(folded), versions[-1]), versions[0])
    assert fold(folded, invert(folded)).kind == "same"


@pytest.mark.parametrize(
    ("first", "second"), [("dense", "ulp"), ("dense", "set"), ("ulp", "dense"), ("xor", "xor")]
)
def test_other_forms_that_fold(first, second, monkeypatch):
    rng = np.random.default_rng(5)
    a = random_bits(rng, 5000)
    b = some_changed(rng, a, 0.5)
    c = some_changed(rng, b, 0.5)
    monkeypatch.setattr(change_module, "_smallest", lambda *_, **__: first)
    one = between(a, b)
    monkeypatch.setattr(change_module, "_smallest", lambda *_, **__: second)

    assert np.array_equal(apply(fold(one, between(b, c)), a), c)


@pytest.mark.parametrize(
    ("first", "second"), [("ulp", "set"), ("set", "ulp"), ("xor", "ulp"), ("set", "set")]
)
def test_forms_without_a_sum_say_so(first, second, monkeypatch):
    rng = np.random.default_rng(6)
    a = random_bits(rng, 5000)
    b = some_changed(rng, a, 0.2)
    monkeypatch.setattr(change_module, "_smallest", lambda *_, **__: first)
    one = between(a, b)
    monkeypatch.setattr(change_module, "_smallest", lambda *_, **__: second)

    with pytest.raises(InvalidRequest, match="apply them in turn"):
        fold(one, between(b, a))


@pytest.mark.parametrize("kind", ["set", "dense", "raw"])
def test_what_does_not_know_the_old_cannot_be_undone(kind, monkeypatch):
    monkeypatch.setattr(change_module, "_smallest", lambda *_, **__: kind)
    old = np.arange(100, dtype=np.uint16)

    with pytest.raises(InvalidRequest, match="does not know"):
        invert(between(old, old[::-1].copy()))


def test_versions_of_different_tensors_are_refused():
    with pytest.raises(InvalidRequest, match="not two versions of one tensor"):
        between(np.zeros(3, np.uint16), np.zeros(4, np.uint16))
    with pytest.raises(DamagedStream, match="the tensor has 4"):
        apply(between(np.zeros(3, np.uint16), np.ones(3, np.uint16)), np.zeros(4, np.uint16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [0.01, 0.5])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_changes_are_refused_or_stay_within_the_tensor(kind, density, data):
    rng = np.random.default_rng(7)
    old = random_bits(rng, 3000)
    new = some_changed(rng, old, density)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change_module, "_smallest", lambda *_, **__: kind)
        change = between(old, new)
    raw = bytearray(change.data)
    at = data.draw(st.integers(0, len(raw) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "extend", "count", "kind"])):
        case "flip":
            raw[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del raw[at:]
        case "extend":
            raw += bytes(at % 9 + 1)
        case "count":
            count = data.draw(st.integers(-5, 1 << 62))
            change = msgspec.structs.replace(change, count=count)
        case "kind":
            change = msgspec.structs.replace(change, kind=data.draw(st.sampled_from(KINDS)))

    try:
        result = apply(msgspec.structs.replace(change, data=bytes(raw)), old)
    except DamagedStream:
        return
    assert result.shape == old.shape
    assert result.dtype == old.dtype


def test_a_bomb_is_not_unpacked():
    """A stream that claims a small size and unpacks to a large one stops at the small one."""
    from tinsmith.weights.streams import Unpacker, pack

    bomb = pack([np.zeros(1 << 26, np.uint8)])

    with pytest.raises(DamagedStream, match="100 bytes expected"):
        Unpacker(bomb, 1).next(100)


@given(arrays.arrays(np.uint16, st.integers(0, 50)))
def test_orders_are_bijections(bits):
    assert np.array_equal(unordered(ordered(bits)), bits)
    assert np.array_equal(unzigzag(zigzag(bits)), bits)


def test_order_of_patterns_is_that_of_the_numbers():
    numbers = np.array([-np.inf, -1e30, -1, -1e-40, -0.0, 0.0, 1e-40, 1, 1e30, np.inf], np.float32)

    assert (np.diff(ordered(numbers.view(np.uint32)).astype(np.int64)) > 0).all()
