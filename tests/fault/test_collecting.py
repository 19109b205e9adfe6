"""`tinsmith gc` is killed again and again, while others save: nothing that is needed is lost."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import pytest
from tests.integration.test_collecting import checkpoint, key_of

from tinsmith.messages import table

ROUNDS = 8
BLOBS = 200
GRACE_S = 60
PATIENCE_S = 90.0


@pytest.fixture
def environ(broker, tmp_path):
    """Of the command, on the fixtures' broker and blobs."""
    return os.environ | {
        "TINSMITH_NATS_URL": broker.url,
        "TINSMITH_DATA_DIR": str(tmp_path),
        "TINSMITH_CHECKPOINTER__GRACE_S": str(GRACE_S),
    }


@asynccontextmanager
async def collecting(environ):
    """The command, killed in the end; what it says is read by nobody."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tinsmith", "gc"),
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def path_of(folder, ref):
    return folder / "blobs" / ref.blake3[:2] / ref.blake3[2:]


def make_old(folder, refs):
    """As if they had been put before the grace."""
    past = time.time() - 10 * GRACE_S
    for ref in refs:
        os.utime(path_of(folder, ref), (past, past))


async def save(bus, blobs, name, data):
    """As a trainer and the checkpointer do: the bytes first, then what refers to them."""
    ref = await blobs.put(data)
    made = checkpoint(name, w=ref)
    await bus.table(table.CHECKPOINTS).put(key_of(made), made)
    return ref


async def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)


@pytest.mark.timeout(600)
async def test_a_kill_at_any_moment_of_a_collection_loses_nothing(bus, blobs, tmp_path, environ):
    rng = random.Random(7)
    data = [f"blob {number}".encode() for number in range(BLOBS)]
    needed = {await save(bus, blobs, f"kept-{n}", b"kept %d" % n) for n in range(20)}
    make_old(tmp_path, needed)
    met = 0
    for number in range(ROUNDS):
        refs = [await blobs.put(one) for one in data]
        make_old(tmp_path, refs)
        wanted = rng.randrange(BLOBS // 4, BLOBS)  # are to be left when it is killed
        async with collecting(environ) as process:

            def has_freed_enough(refs=refs, wanted=wanted, process=process):
                left = sum(path_of(tmp_path, ref).exists() for ref in refs)
                return left <= wanted or process.returncode is not None

            saving = rng.sample(range(BLOBS), 10)
            first = asyncio.create_task(until(has_freed_enough, "bytes to be freed"))
            saved = [
                await save(bus, blobs, f"saved-{number}-{one}", data[one]) for one in saving[:5]
            ]
            await first
            saved += [
                await save(bus, blobs, f"saved-{number}-{one}", data[one]) for one in saving[5:]
            ]
            met += process.returncode is None
        needed |= set(saved)
        data = [one for index, one in enumerate(data) if index not in saving]
        data += [b"more %d %d" % (number, one) for one in range(10)]
        for ref in needed:
            await blobs.get(ref)

    assert met >= ROUNDS // 3, "kills in the midst of collections"
    make_old(tmp_path, [r for r in needed if path_of(tmp_path, r).exists()])
    async with collecting(environ) as process:
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        assert process.returncode == 0
    left = {blob.blake3 for blob in await blobs.stored()}
    assert {ref.blake3 for ref in needed} <= left
