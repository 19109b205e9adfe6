"""What a seal promises, whatever the bytes."""

from __future__ import annotations

import threading

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import Forgotten, SealBroken
from tinsmith.sealing import PLAIN, ClosedSeal, KeySeal, aside
from tinsmith.sealing.seal import THREAD_BYTES, is_sealed

KEY = bytes(range(32))


@given(st.binary(max_size=2000))
def test_what_was_sealed_is_opened(data):
    seal = KeySeal(KEY)

    assert seal.open(seal.seal(data)) == data


@given(st.binary(min_size=8, max_size=200))
def test_sealed_bytes_do_not_hold_the_plaintext(data):
    assert data not in KeySeal(KEY).seal(data)


def test_equal_plaintexts_of_one_run_give_equal_bytes():
    assert KeySeal(KEY).seal(b"tokens") == KeySeal(KEY).seal(b"tokens")


def test_runs_do_not_share_bytes_or_digests():
    other = KeySeal(KeySeal.new_key())

    assert other.seal(b"tokens") != KeySeal(KEY).seal(b"tokens")
    assert other.digest(b"tokens") != KeySeal(KEY).digest(b"tokens")


def test_the_format_stays():
    """Logs live for years: these bytes must open for ever."""
    seal = KeySeal(KEY)

    assert seal.seal(b"a payload").hex() == (
        "c17473318db8fd3ac7c8fd513432d48f26cd2c8ccfcfc10f3041730cd92d502d80103a36eb8652f211"
    )
    assert seal.digest(b"a payload") == (
        "1f3cfaeba84e72e5c613f2295e870487e4b48a2d0d53dc574e11ac84e9a499b1"
    )


def test_a_digest_without_the_key_is_no_guess():
    assert KeySeal(KEY).digest(b"tokens") != blake3(b"tokens").hexdigest()


@given(st.binary(max_size=100), st.data())
def test_any_flipped_bit_shows(data, draw):
    sealed = bytearray(KeySeal(KEY).seal(data))
    bit = draw.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8

    with pytest.raises(SealBroken):
        KeySeal(KEY).open(bytes(sealed))


@given(st.binary(max_size=64))
def test_bytes_that_were_never_sealed_are_refused(data):
    with pytest.raises(SealBroken):
        KeySeal(KEY).open(data)


def test_another_runs_key_does_not_open_it():
    with pytest.raises(SealBroken, match="another key"):
        KeySeal(KeySeal.new_key()).open(KeySeal(KEY).seal(b"tokens"))


def test_a_revoked_seal_is_of_no_use():
    seal = KeySeal(KEY)
    sealed = seal.seal(b"tokens")
    seal.revoke(Forgotten("gone"))

    for use in (seal.seal, seal.open, seal.digest):
        with pytest.raises(Forgotten, match="gone"):
            use(sealed)
    with pytest.raises(Forgotten):
        _ = seal.key
    assert isinstance(seal.why_closed, Forgotten)


def test_a_closed_seal_says_why():
    seal = ClosedSeal(SealBroken("no key here"))

    for use in (seal.seal, seal.open, seal.digest):
        with pytest.raises(SealBroken, match="no key here"):
            use(b"")


def test_plain_payloads_stay_as_they_are():
    assert PLAIN.open(PLAIN.seal(b"tokens")) == b"tokens"
    assert PLAIN.digest(b"tokens") == blake3(b"tokens").hexdigest()
    assert not is_sealed(PLAIN.seal(b"\x81\xa1t"))


async def test_only_what_is_large_is_worth_a_thread():
    def thread(data):
        return threading.get_ident()

    assert await aside(thread, bytes(THREAD_BYTES)) == threading.get_ident()
    assert await aside(thread, bytes(THREAD_BYTES + 1)) != threading.get_ident()


@pytest.mark.parametrize("size", [10, THREAD_BYTES + 1], ids=["small", "large"])
async def test_a_thread_makes_no_difference(size):
    seal = KeySeal(KEY)

    assert await aside(seal.open, await aside(seal.seal, bytes(size))) == bytes(size)
