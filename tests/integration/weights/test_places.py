"""A whole state is one object in either place of its chunks, and what is damaged is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tinsmith import ids
from tinsmith.errors import BlobMissing, ServerError, StorageFull
from tinsmith.messages.table import CHUNK_STREAM, CHUNK_TEMPLATE
from tinsmith.weights import DamagedStream
from tinsmith.weights.body import decode_manifest
from tinsmith.weights.change import dense, raw
from tinsmith.weights.places import BlobChunks, StreamChunks
from tinsmith.weights.sending import send
from tinsmith.weights.specs import TensorSpec
from tinsmith.weights.state import WeightState, WrongBits
from tinsmith.weights.wholes import fetch

pytestmark = pytest.mark.integration

CHUNK_BYTES = 4000
LINEAGE = ids.model_id(ids.new_session_id(), 0)
SPECS = {
    "embed": TensorSpec("float32", (70, 32)),
    "norm": TensorSpec("bfloat16", (32,)),
    "exp_avg.embed": TensorSpec("float32", (70, 32)),
    "empty": TensorSpec("float32", (0, 32)),
}


class Stream:
    """Chunks in the broker."""

    def __init__(self, bus):
        self.chunks = StreamChunks(bus.lineages.chunks, LINEAGE)
        self._js = bus._connection[1]

    def _subject(self, ref):
        return CHUNK_TEMPLATE.subject(lineage=ids.token(LINEAGE), digest=ref.blake3)

    async def replace(self, ref, data):
        await self._js.publish(self._subject(ref), data)

    async def remove(self, ref):
        await self._js.purge_stream(CHUNK_STREAM, subject=self._subject(ref))


class Blobs:
    """Chunks in the blob store."""

    def __init__(self, blobs):
        self.chunks = BlobChunks(blobs)
        self._folder = blobs._place._folder

    def _path(self, ref):
        return self._folder / ref.blake3[:2] / ref.blake3[2:]

    async def replace(self, ref, data):
        self._path(ref).write_bytes(data)

    async def remove(self, ref):
        self._path(ref).unlink()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("tinsmith.bus.chunks.CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr("tinsmith.weights.places.BLOB_BYTES", CHUNK_BYTES)


@pytest.fixture(params=["stream", "blobs"])
def place(request, bus, blobs):
    return Stream(bus) if request.param == "stream" else Blobs(blobs)


def test_large_states_have_larger_blobs_and_not_more_of_them(blobs):
    assert BlobChunks(blobs, 10**6).limit == CHUNK_BYTES
    assert 10**12 / BlobChunks(blobs, 10**12).limit < 1100


@pytest.fixture(params=[dense, raw], ids=["dense", "raw"])
def code(request):
    return request.param


def state():
    rng = np.random.default_rng(0)
    return WeightState(
        SPECS,
        {
            name: rng.integers(0, 1 << 16, spec.size).astype(
                np.uint16 if spec.dtype == "bfloat16" else np.uint32
            )
            for name, spec in SPECS.items()
        },
    )


async def test_a_whole_state_comes_back_from_either_place(place, code):
    sent = await send(place.chunks, state().full(code), SPECS)
    found = await fetch(place.chunks, sent.manifest, state().root)

    assert len(sent.chunks) > 2
    assert found.specs == SPECS
    for name in SPECS:
        assert np.array_equal(found[name], state()[name])


async def test_both_places_hold_the_very_same(bus, blobs, code):
    one, other = [
        await send(place.chunks, state().full(code), SPECS) for place in (Stream(bus), Blobs(blobs))
    ]

    assert one == other


DAMAGES = {
    "truncated": lambda data: data[:-1],
    "emptied": lambda data: b"",
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("which", ["chunks", "manifest"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_chunk_that_is_not_its_digest_is_refused(place, which, damage):
    sent = await send(place.chunks, state().full(raw), SPECS)
    ref = getattr(sent, which)[0]
    await place.replace(ref, DAMAGES[damage](await place.chunks.get(ref)))

    with pytest.raises(BlobMissing, match=f"{ref.blake3} .*is damaged"):
        await fetch(place.chunks, sent.manifest, state().root)


@pytest.mark.parametrize("which", ["chunks", "manifest"])
async def test_a_chunk_that_is_gone_is_named(place, which):
    sent = await send(place.chunks, state().full(raw), SPECS)
    ref = getattr(sent, which)[-1]
    await place.remove(ref)

    with pytest.raises(BlobMissing, match=ref.blake3):
        await fetch(place.chunks, sent.manifest, state().root)


ORDERS = {
    "reordered": lambda refs: (refs[1], refs[0], *refs[2:]),
    "one too few": lambda refs: refs[:-1],
    "the first is left out": lambda refs: refs[1:],
    "one too many": lambda refs: (*refs, refs[0]),
    "one twice": lambda refs: (refs[0], refs[0], *refs[2:]),
    "none": lambda refs: (),
}


@pytest.mark.parametrize("order", ORDERS)
async def test_chunks_that_are_listed_otherwise_than_they_were_cut_are_refused(place, order):
    sent = await send(place.chunks, state().full(raw), SPECS)
    manifest = decode_manifest([await place.chunks.get(ref) for ref in sent.manifest])
    forged = msgspec.structs.replace(manifest, chunks=ORDERS[order](manifest.chunks))
    ref = await place.chunks.put(msgspec.msgpack.encode(forged))

    with pytest.raises((WrongBits, DamagedStream)):
        await fetch(place.chunks, [ref], state().root)


async def test_another_state_than_the_root_names_is_refused(place, code):
    other = state()
    other["norm"][0] ^= 1
    other = WeightState(SPECS, {name: other[name] for name in SPECS})
    sent = await send(place.chunks, other.full(code), SPECS)

    with pytest.raises(WrongBits, match=f"not {state().root}"):
        await fetch(place.chunks, sent.manifest, state().root)


async def test_a_tensor_under_another_name_is_refused(place):
    """Its digest is salted with the name."""
    sent = await send(place.chunks, state().full(raw), SPECS)
    manifest = decode_manifest([await place.chunks.get(ref) for ref in sent.manifest])
    names = {"embed": "exp_avg.embed", "exp_avg.embed": "embed"}
    tensors = [
        msgspec.structs.replace(one, name=names.get(one.name, one.name)) for one in manifest.tensors
    ]
    forged = msgspec.structs.replace(manifest, tensors=tuple(tensors))
    ref = await place.chunks.put(msgspec.msgpack.encode(forged))

    with pytest.raises(WrongBits, match="not as its state says"):
        await fetch(place.chunks, [ref], state().root)


async def test_a_place_that_is_full_stops_the_rest(place, monkeypatch):
    taken = []
    put = place.chunks.put

    async def full(data):
        if len(taken) == 2:
            raise StorageFull("no room")
        taken.append(data)
        return await put(data)

    monkeypatch.setattr(place.chunks, "put", full)
    with pytest.raises(ServerError, match="no room"):
        await send(place.chunks, state().full(raw), SPECS)

    assert len(taken) == 2
