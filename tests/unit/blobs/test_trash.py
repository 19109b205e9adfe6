"""Deleting blobs while others put the same bytes."""

from __future__ import annotations

import os

import pytest

from tinsmith.blobs import BlobStore, trash
from tinsmith.errors import BlobMissing

DATA = b"some bytes"


@pytest.fixture
def store(tmp_path):
    return BlobStore.open("", default=tmp_path)


def age(folder, ref, seconds):
    path = folder / ref.blake3[:2] / ref.blake3[2:]
    old = path.stat().st_mtime - seconds
    os.utime(path, (old, old))


async def test_bytes_that_were_put_long_ago_are_freed(store, tmp_path):
    ref = await store.put(DATA)
    age(tmp_path, ref, 100)

    assert await store.free(ref, unused_s=60)
    with pytest.raises(BlobMissing):
        await store.get(ref)


async def test_bytes_that_were_put_just_now_stay(store):
    ref = await store.put(DATA)

    assert not await store.free(ref, unused_s=60)
    assert await store.get(ref) == DATA


async def test_putting_the_same_bytes_again_keeps_them(store, tmp_path):
    ref = await store.put(DATA)
    age(tmp_path, ref, 100)
    await store.put(DATA)

    assert not await store.free(ref, unused_s=60)
    assert await store.get(ref) == DATA


async def test_bytes_that_are_marked_while_they_are_moved_aside_come_back(
    store, tmp_path, monkeypatch
):
    ref = await store.put(DATA)
    age(tmp_path, ref, 100)
    answers = iter([True, False])  # old before the move, marked after it
    monkeypatch.setattr(trash, "_is_unused", lambda *_: next(answers))

    assert not await store.free(ref, unused_s=60)
    assert await store.get(ref) == DATA


async def test_to_free_what_is_not_there_is_to_have_freed_it(store):
    ref = await store.put(DATA)
    await store.free(ref, unused_s=0)

    assert await store.free(ref, unused_s=60)


async def test_what_a_process_that_died_had_moved_aside_comes_back(store, tmp_path, monkeypatch):
    ref = await store.put(DATA)
    path = tmp_path / ref.blake3[:2] / ref.blake3[2:]
    (tmp_path / trash.ASIDE).mkdir()
    path.rename(tmp_path / trash.ASIDE / f"{ref.blake3[:2]}.{ref.blake3[2:]}.0")

    BlobStore.open("", default=tmp_path)
    assert not path.exists()  # who moved it may still live
    monkeypatch.setattr(trash, "MAX_ASIDE_S", 0.0)
    BlobStore.open("", default=tmp_path)

    assert await store.get(ref) == DATA


async def test_what_was_moved_aside_is_found_by_whoever_needs_it(store, tmp_path):
    ref = await store.put(DATA)
    (tmp_path / trash.ASIDE).mkdir()
    path = tmp_path / ref.blake3[:2] / ref.blake3[2:]
    path.rename(tmp_path / trash.ASIDE / f"{ref.blake3[:2]}.{ref.blake3[2:]}.0")

    assert await store.get(ref) == DATA
    assert await store.has(ref)


async def test_unfinished_writes_are_left_over_and_blobs_are_not(store, tmp_path):
    ref = await store.put(DATA)
    age(tmp_path, ref, 100)
    (tmp_path / ref.blake3[:2] / f"{ref.blake3[2:]}#1").write_bytes(b"half")

    assert await store.leftovers(older_s=60, remove=True) == 0
    assert await store.leftovers(older_s=0, remove=True) == 4
    assert await store.leftovers(older_s=0, remove=True) == 0
    assert [blob.blake3 for blob in await store.stored()] == [ref.blake3]
