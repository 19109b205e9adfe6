"""The blob store on an S3 server, with a network and a server that fail."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import obstore
import pytest
from msgspec import structs
from tests.integration.storage import s3_server

from tinsmith.blobs import BlobStore
from tinsmith.errors import BlobMissing, ServerError
from tinsmith.messages.base import BlobRef

MIB = 1 << 20
PATIENCE_S = 60.0


def other_bytes(size, seed=b"x"):
    return (seed + bytes(range(256)) * (size // 256 + 1))[:size]


async def freed(store, ref, unused_s=0.0):
    """Wait until the store's clock, which counts seconds, has gone on."""
    deadline = time.monotonic() + PATIENCE_S
    while not await store.free(ref, unused_s=unused_s):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("size", [0, 5, MIB, 20 * MIB])
async def test_any_size_comes_back_whole_and_in_parts(objects, size):
    data = other_bytes(size)
    ref = await objects.put(data)

    assert await objects.get(ref) == data
    assert (
        b"".join([part async for part in objects.read(ref, size // 3, size)]) == data[size // 3 :]
    )
    assert await objects.has(ref)
    assert not await objects.has(BlobRef(ref.blake3, size + 1))


async def test_what_is_not_there_is_missing_and_damage_is_noticed(objects, s3_settings):
    with pytest.raises(BlobMissing, match="0123"):
        await objects.get(BlobRef("0123" * 16, 4))

    ref = await objects.put(b"precious")
    bucket = s3_server.client(s3_settings.endpoint, s3_settings.url.rpartition("/")[2])
    obstore.put(bucket, f"{ref.blake3[:2]}/{ref.blake3[2:]}", b"precioux")
    with pytest.raises(BlobMissing, match="damaged"):
        await objects.get(ref)


async def test_bytes_are_freed_and_can_be_put_again(objects):
    data = other_bytes(MIB)
    ref = await objects.put(data)
    assert not await objects.free(ref, unused_s=3600)
    await objects.put(data)
    assert [(blob.blake3, blob.size) for blob in await objects.stored()] == [(ref.blake3, MIB)]

    await freed(objects, ref)
    assert not await objects.has(ref)
    assert await objects.stored() == []

    assert await objects.put(data) == ref
    assert await objects.get(ref) == data


async def test_bytes_that_are_put_all_the_time_survive_those_who_free_all_the_time(s3_settings):
    """Two stores free what they can, four put and read what they have put."""
    stores = [BlobStore.configured(s3_settings, default=None) for _ in range(3)]
    blobs = [b"a" * 1000, b"b" * 1000]
    is_over = asyncio.Event()

    async def put(number):
        for _ in range(25):
            data = blobs[number % 2]
            ref = await stores[0].put(data)
            # For as long as a grace it is there, whoever frees.
            assert await stores[0].get(ref) == data

    async def free(store):
        refs = [await store.name(data) for data in blobs]
        while not is_over.is_set():
            for ref in refs:
                await store.free(ref, unused_s=3.0)

    async with asyncio.TaskGroup() as tasks:
        freeing = [tasks.create_task(free(store)) for store in stores[1:]]
        await asyncio.gather(*map(put, range(4)))
        is_over.set()
        await asyncio.gather(*freeing)


@pytest.mark.parametrize("fault", ["slow down", "drop", "cut"])
@pytest.mark.parametrize("size", [1000, 20 * MIB])
async def test_a_server_that_fails_for_a_while_is_asked_again(s3_settings, link, fault, size):
    store = BlobStore.configured(structs.replace(s3_settings, endpoint=link.endpoint), default=None)
    data = other_bytes(size, seed=fault.encode())
    await store.has(BlobRef("0" * 64, 1))  # connected
    link.fail(*[fault] * 3)
    ref = await store.put(data)
    link.fail(*[fault] * 2)

    assert await store.get(ref) == data
    assert await store.has(ref)
    assert link.met == [fault] * 5
    link.fail(*[fault] * 2)
    assert b"".join([part async for part in store.read(ref, 0, size)]) == data


async def test_a_server_that_stays_away_is_an_error_that_names_it(s3_settings, link, monkeypatch):
    monkeypatch.setattr("tinsmith.blobs.opening.RETRIES", 2)
    store = BlobStore.configured(structs.replace(s3_settings, endpoint=link.endpoint), default=None)
    link.fail(*["slow down"] * 100)

    with pytest.raises(ServerError, match=r"s3://.*cannot be written: .*503") as put:
        await store.put(b"x")
    with pytest.raises(ServerError, match="cannot be read"):
        await store.get(BlobRef("0" * 64, 1))
    assert "\n" not in str(put.value)
    assert len(str(put.value)) < 600


async def test_wrong_credentials_are_named_and_not_told(s3_settings):
    wrong = structs.replace(s3_settings, secret_access_key="not-the-secret")
    store = BlobStore.configured(wrong, default=None)

    with pytest.raises(ServerError, match=r"403 Forbidden.*check blobs\.access_key_id") as caught:
        await store.put(b"x")
    for secret in (s3_server.SECRET, s3_server.KEY_ID, "not-the-secret"):
        assert secret not in str(caught.value)


async def test_credentials_may_come_from_the_environment(s3_settings, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_settings.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    store = BlobStore.open(s3_settings.url, default=None)

    assert await store.get(await store.put(b"x")) == b"x"


STREAMS = """
import asyncio, resource, sys
import msgspec
from tinsmith.blobs import BlobStore
from tinsmith.config import BlobsConfig
from tinsmith.messages.base import BlobRef

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

async def main():
    store = BlobStore.configured(msgspec.json.decode(sys.argv[1], type=BlobsConfig), default=None)
    data = bytes(range(256)) * (SIZE // 256)
    before = peak()
    ref = await store.put(data)
    put = peak() - before
    del data
    print(put, ref.blake3, ref.size)

async def read(digest, size):
    store = BlobStore.configured(msgspec.json.decode(sys.argv[1], type=BlobsConfig), default=None)
    ref = BlobRef(digest, int(size))
    first = [part async for part in store.read(ref, 0, 1000)]
    before = peak()
    total = 0
    async for part in store.read(ref, 0, ref.size):
        total += len(part)
    print(peak() - before, total)

SIZE = 512 << 20
asyncio.run(read(*sys.argv[2:]) if sys.argv[2:] else main())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_half_a_gigabyte_goes_out_and_comes_back_without_a_copy_in_memory(s3_settings):
    import msgspec

    def run(*arguments):
        command = [sys.executable, "-c", STREAMS, msgspec.json.encode(s3_settings).decode()]
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env=os.environ | {"MALLOC_ARENA_MAX": "2"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.split()

    put, digest, size = run()
    read, total = run(digest, size)

    assert int(put) < 160 * MIB, "beyond the bytes themselves"
    assert int(read) < 64 * MIB
    assert int(total) == 512 * MIB
