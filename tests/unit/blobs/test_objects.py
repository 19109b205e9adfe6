"""Freeing objects while others put the same bytes: every order of the two, step by step."""

from __future__ import annotations

import contextlib
import time

import obstore
import pytest
from obstore.store import MemoryStore

from tinsmith.blobs.objects import AGAIN, DYING, Objects

KEY = f"ab/{'c' * 62}"
DATA = b"some bytes"


class Interrupted(Exception):
    """The process died here."""


class Steps(Objects):
    """Objects that let somebody else do something before each request that changes any."""

    def __init__(self, store, before):
        super().__init__(store, once=store)
        self._before = before
        self._step = 0

    def _write(self, key, data):
        self._next()
        super()._write(key, data)

    def _once_deleted(self, key):
        self._next()
        super()._once_deleted(key)

    def _head(self, key):
        self._next()
        return super()._head(key)

    def _list(self, prefix):
        self._next()
        return super()._list(prefix)

    def _next(self):
        self._step += 1
        self._before(self._step)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def put_long_ago(store, monkeypatch):
    """An object, and a clock by which it and nothing else is old."""
    places = Objects(store, once=store)
    places.put(KEY, DATA)
    old = obstore.head(store, KEY)["last_modified"].timestamp()
    monkeypatch.setattr(
        "tinsmith.blobs.objects._at",
        lambda meta: (
            meta["last_modified"].timestamp()
            - (1000 if meta["last_modified"].timestamp() == old else 0)
        ),
    )
    return places


def read(places):
    key = places.find(KEY, len(DATA))
    return None if key is None else bytes(obstore.get(places.store, key).bytes())


def test_what_was_put_long_ago_is_freed_without_a_trace(store, put_long_ago):
    assert put_long_ago.free(KEY, 500)
    assert [meta for page in obstore.list(store) for meta in page] == []


def test_what_was_put_again_stays(put_long_ago):
    put_long_ago.put(KEY, DATA)

    assert not put_long_ago.free(KEY, 500)
    assert read(put_long_ago) == DATA


@pytest.mark.parametrize("step", range(1, 12))
def test_bytes_that_are_put_at_any_moment_of_their_deletion_are_there(store, put_long_ago, step):
    def put(now):
        if now == step:
            put_long_ago.put(KEY, DATA)

    Steps(store, put).free(KEY, 500)
    if step > 10:  # later than everything
        put_long_ago.put(KEY, DATA)

    assert read(put_long_ago) == DATA


@pytest.mark.parametrize("step", range(1, 8))
def test_bytes_that_are_deleted_at_any_moment_of_putting_them_are_there(store, put_long_ago, step):
    def free(now):
        if now == step:
            put_long_ago.free(KEY, 500)

    Steps(store, free).put(KEY, DATA)

    assert read(put_long_ago) == DATA


@pytest.mark.parametrize("step", range(1, 11))
def test_a_deletion_that_dies_harms_nobody_who_puts_later(store, put_long_ago, step):
    def die(now):
        if now == step:
            raise Interrupted

    with contextlib.suppress(Interrupted):
        Steps(store, die).free(KEY, 500)
    put_long_ago.put(KEY, DATA)

    assert read(put_long_ago) == DATA


@pytest.mark.parametrize("dies", range(1, 8))
@pytest.mark.parametrize("wakes", [1, 2, 3])
def test_one_who_was_stopped_in_the_midst_of_deleting_harms_nobody_when_it_goes_on(
    store, put_long_ago, dies, wakes
):
    """While it stands still, somebody puts the bytes, others delete them, somebody puts again."""

    def meanwhile(now):
        if now == dies:
            for _ in range(wakes):
                put_long_ago.put(KEY, DATA)
                put_long_ago.free(KEY, 500)
            put_long_ago.put(KEY, DATA)

    Steps(store, meanwhile).free(KEY, 500)

    assert read(put_long_ago) == DATA


def test_who_looked_too_long_ago_deletes_nothing(store, put_long_ago, monkeypatch):
    monkeypatch.setattr("tinsmith.blobs.objects.MAX_DELETE_S", 0.0)

    assert not put_long_ago.free(KEY, 500)
    assert read(put_long_ago) == DATA


def test_a_note_of_somebody_who_died_costs_a_copy_and_is_removed_after_a_day(
    store, put_long_ago, monkeypatch
):
    obstore.put(store, f"{DYING}/{KEY}/x", b"")
    put_long_ago.put(KEY, DATA)
    paths = [meta["path"] for page in obstore.list(store) for meta in page]
    assert any(path.startswith(f"{AGAIN}/{KEY}/") for path in paths)

    put_long_ago.leftovers(0, remove=True)
    assert obstore.head(store, f"{DYING}/{KEY}/x")
    day = time.time() + 90_000
    monkeypatch.setattr("tinsmith.blobs.objects.time.time", lambda: day)
    put_long_ago.leftovers(0, remove=True)

    with pytest.raises(FileNotFoundError):
        obstore.head(store, f"{DYING}/{KEY}/x")


def test_a_blob_with_copies_is_listed_once_and_freed_with_them(store, put_long_ago, monkeypatch):
    obstore.put(store, f"{DYING}/{KEY}/x", b"")
    put_long_ago.put(KEY, DATA)
    (blob,) = put_long_ago.stored()
    assert (blob.blake3, blob.size) == (KEY.replace("/", ""), 2 * len(DATA))

    monkeypatch.setattr("tinsmith.blobs.objects._at", lambda meta: 10.0 * (DYING in meta["path"]))
    assert put_long_ago.free(KEY, 5)
    assert list(put_long_ago.stored()) == []
