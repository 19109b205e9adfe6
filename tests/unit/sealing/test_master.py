"""The master key: files, and the wrapping of keys."""

from __future__ import annotations

import base64

import pytest

from tinsmith.errors import SealBroken, StartupError
from tinsmith.sealing.master import KeySource, MasterKey

KEY = bytes(range(32))
RUN = "a" * 26 + ":train:0"


def test_a_wrapped_key_is_unwrapped_by_the_same_master_key():
    assert MasterKey(KEY).unwrap(RUN, MasterKey(KEY).wrap(RUN, b"k" * 32)) == b"k" * 32


def test_a_wrapped_key_is_of_no_use_to_another_run():
    with pytest.raises(SealBroken):
        MasterKey(KEY).unwrap(RUN + "0", MasterKey(KEY).wrap(RUN, b"k" * 32))


@pytest.mark.parametrize("wrapped", [b"", b"short", bytes(60)])
def test_what_was_never_wrapped_is_refused(wrapped):
    with pytest.raises(SealBroken):
        MasterKey(KEY).unwrap(RUN, wrapped)


def test_a_fingerprint_tells_keys_apart_and_does_not_hold_them():
    assert MasterKey(KEY).fingerprint != MasterKey(bytes(32)).fingerprint
    assert MasterKey(KEY).fingerprint not in KEY.hex()


def test_a_file_that_was_made_is_found_and_kept(tmp_path):
    source = KeySource("", tmp_path / "data" / "master.key")
    assert source.find() is None
    source.make()
    first = source.find().fingerprint

    source.make()

    assert source.find().fingerprint == first


@pytest.mark.parametrize("text", [b"", b"not base64!", base64.b64encode(bytes(31)), b"\xff\xfe"])
def test_a_file_without_a_key_is_named_with_the_remedy(tmp_path, text):
    (tmp_path / "master.key").write_bytes(text)

    with pytest.raises(StartupError, match=r"master\.key.*32 bytes in base64.*openssl rand"):
        KeySource("", tmp_path / "master.key").find()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StartupError, match=r"master\.key: cannot be made"):
        KeySource("", tmp_path / "file" / "master.key").make()
