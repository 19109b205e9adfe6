"""Blobs: named by content, verified, and honest about trouble."""

from __future__ import annotations

import subprocess
import sys

import pytest
from blake3 import blake3

from tinsmith.blobs import BlobStore
from tinsmith.errors import BlobMissing, StartupError, StorageFull
from tinsmith.messages.base import BlobRef


@pytest.fixture
def store(tmp_path):
    return BlobStore.open("", default=tmp_path)


def path_of(folder, ref):
    return folder / ref.blake3[:2] / ref.blake3[2:]


async def test_bytes_come_back_under_the_name_of_their_content(store):
    ref = await store.put(b"hello")

    assert ref == BlobRef(blake3(b"hello").hexdigest(), 5)
    assert await store.get(ref) == b"hello"


async def test_equal_bytes_are_stored_once(store, tmp_path):
    assert await store.put(b"twice") == await store.put(b"twice")
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1


async def test_has_tells_what_is_there(store):
    ref = await store.put(b"x")

    assert await store.has(ref)
    assert not await store.has(BlobRef(ref.blake3, 2))


@pytest.mark.parametrize("size", [0, 3 << 20])
async def test_any_size_comes_back_whole(store, size):
    assert len(await store.get(await store.put(bytes(size)))) == size


async def test_what_was_never_stored_is_missing_and_named(store):
    with pytest.raises(BlobMissing, match="0123"):
        await store.get(BlobRef("0123" * 16, 4))


async def test_a_flipped_bit_is_noticed(store, tmp_path):
    ref = await store.put(b"precious")
    path_of(tmp_path, ref).write_bytes(b"precioux")

    with pytest.raises(BlobMissing, match="damaged"):
        await store.get(ref)


async def test_a_full_disk_is_named_and_leaves_nothing_half_written(small_disk):
    store = BlobStore.open("", default=small_disk)
    with pytest.raises(StorageFull, match="free space"):
        await store.put(bytes(40 << 20))

    assert await store.get(await store.put(b"small")) == b"small"
    assert sum(path.is_file() for path in small_disk.rglob("*")) == 1


async def test_a_store_can_live_in_memory():
    store = BlobStore.open("memory:///", default=None)

    assert await store.get(await store.put(b"x")) == b"x"


@pytest.mark.parametrize("url", ["martian://x", "not a url"])
def test_an_address_nobody_understands_is_a_startup_error(url, tmp_path):
    with pytest.raises(StartupError, match=r"blobs\.url"):
        BlobStore.open(url, default=tmp_path)


EXITS = """
import asyncio, sys
from pathlib import Path
from tinsmith.blobs import BlobStore

async def main():
    store = BlobStore.open("", default=Path(sys.argv[1]))
    ref = await store.put(b"x" * 181)
    await asyncio.gather(*(store.get(ref) for _ in range(4)))

asyncio.run(main())
"""


def test_a_process_that_exits_right_after_a_read_is_not_aborted(tmp_path):
    command = [sys.executable, "-c", EXITS, str(tmp_path)]

    assert [subprocess.run(command, timeout=60, check=False).returncode for _ in range(8)] == [
        0
    ] * 8
