"""The checkpointer encrypts once, whoever asks how often, and keeps no part that it encrypted."""

from __future__ import annotations

import asyncio

import pyrage
import pytest
from msgspec import structs
from tests.integration.contexts import context_of

from tinsmith import ids
from tinsmith.bus.views import View
from tinsmith.errors import BlobMissing
from tinsmith.messages import table
from tinsmith.messages.base import BlobRef
from tinsmith.messages.checkpoints import CommitCheckpoint
from tinsmith.messages.ops import LoraShape
from tinsmith.messages.registry import Run
from tinsmith_checkpointer.service import Checkpointer

MODEL = f"{'a' * 26}:train:0"
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 5000}


@pytest.fixture
def identity():
    return pyrage.x25519.Identity.generate()


@pytest.fixture
async def checkpointer(bus, blobs):
    context = context_of("checkpointer-test", bus, blobs)
    run = Run(
        model_id=MODEL,
        session_id="a" * 26,
        owner="alice",
        created_ns=1,
        base_model="m",
        lora=LoraShape(),
    )
    await bus.table(table.RUNS).create(ids.token(MODEL), run)
    return Checkpointer(context)


@pytest.fixture
async def request_of(blobs, identity):
    return CommitCheckpoint(
        model_id=MODEL,
        kind="external_weights",
        name="x",
        op_seq=3,
        base_model="m",
        lora=LoraShape(),
        step=1,
        parts={name: await blobs.put(data) for name, data in FILES.items()},
        overwrite=True,
        recipients=(str(identity.to_public()),),
    )


async def stored(bus):
    path = ids.CheckpointPath(MODEL, "external_weights", "x")
    return await bus.table(table.CHECKPOINTS).get(ids.checkpoint_key(path))


async def discarded(bus):
    view = View(bus.table(table.DISCARDED), lambda _: "")
    watch = await view.watch()
    await watch.close()
    return {ref.blake3 for note in view for ref in note.parts.values()}


async def test_who_asks_twice_at_once_or_later_gets_the_same_ciphertexts(
    checkpointer, request_of, bus, blobs, identity
):
    both = await asyncio.gather(*(checkpointer.commit(request_of) for _ in range(2)))
    first = await stored(bus)
    again = await checkpointer.commit(request_of)

    assert both[0] == both[1] == again
    assert await stored(bus) == first
    assert {name.removesuffix(".age") for name in first.parts} == set(FILES)
    for name, ref in first.parts.items():
        sealed = await blobs.get(ref)
        assert pyrage.decrypt(sealed, [identity]) == FILES[name.removesuffix(".age")]
    assert again.size_bytes == sum(ref.size for ref in first.parts.values())


async def test_what_was_encrypted_is_to_be_freed(checkpointer, request_of, bus):
    await checkpointer.commit(request_of)

    assert {ref.blake3 for ref in request_of.parts.values()} <= await discarded(bus)


async def test_ciphertexts_of_an_encryption_that_dies_are_to_be_freed(
    checkpointer, request_of, bus, blobs, monkeypatch
):
    """However far it came: each one is written down before it is stored."""
    before = {blob.blake3 for blob in await blobs.stored()}
    put, stored_ones = blobs.put, []

    async def dies(data):
        if stored_ones:
            raise asyncio.CancelledError
        stored_ones.append(await put(data))
        return stored_ones[0]

    monkeypatch.setattr(blobs, "put", dies)
    with pytest.raises(asyncio.CancelledError):
        await checkpointer.commit(request_of)

    assert await stored(bus) is None
    left = {blob.blake3 for blob in await blobs.stored()} - before
    assert left == {stored_ones[0].blake3}
    assert left <= await discarded(bus)


async def test_a_later_save_replaces_it(checkpointer, request_of, bus):
    await checkpointer.commit(request_of)
    first = await stored(bus)
    await checkpointer.commit(structs.replace(request_of, op_seq=9))

    second = await stored(bus)
    assert second.op_seq == 9
    assert {ref.blake3 for ref in first.parts.values()} <= await discarded(bus)


async def test_a_part_that_is_not_there_fails_the_commit_and_the_next_one_works(
    checkpointer, request_of, bus
):
    missing = request_of.parts | {"adapter_config.json": BlobRef("0" * 64, 2)}
    with pytest.raises(BlobMissing):
        await checkpointer.commit(structs.replace(request_of, parts=missing))
    assert await stored(bus) is None

    await checkpointer.commit(request_of)

    assert await stored(bus) is not None
