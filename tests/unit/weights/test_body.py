"""Changes as chunks: cut anywhere, read back as they were, and never pointing elsewhere."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.messages.base import BlobRef
from tinsmith.weights import Change, DamagedStream
from tinsmith.weights.body import (
    BodyReader,
    BodyWriter,
    Manifest,
    Whole,
    decode_manifest,
    encode_manifest,
)
from tinsmith.weights.specs import TensorSpec


def wholes_of(sizes):
    return [
        Whole(f"t{i}", Change("ulp", 2, 9, 1, bytes([i % 256]) * n), i) for i, n in enumerate(sizes)
    ]


def written(wholes, limit):
    body = BodyWriter(limit)
    chunks = [chunk for whole in wholes for chunk in body.add(whole)]
    return tuple(body.tensors), [*chunks, *body.finish()]


def read(tensors, chunks):
    body = BodyReader(tensors)
    return [whole for chunk in chunks for whole in body.feed(chunk)] + list(body.finish())


@given(sizes=st.lists(st.integers(0, 40)), limit=st.integers(1, 50))
def test_changes_come_back_from_chunks_of_any_size(sizes, limit):
    wholes = wholes_of(sizes)
    tensors, chunks = written(wholes, limit)

    assert read(tensors, chunks) == wholes
    assert [len(chunk) for chunk in chunks[:-1]] == [limit] * (len(chunks) - 1)
    assert sum(map(len, chunks)) == sum(sizes)


def test_a_change_is_there_as_soon_as_its_chunk_is():
    tensors, chunks = written(wholes_of([10, 10]), 10)
    body = BodyReader(tensors)

    assert [whole.name for whole in body.feed(chunks[0])] == ["t0"]


@pytest.mark.parametrize("cut", [slice(1, None), slice(None, -1), slice(0, 0)])
def test_a_lost_chunk_is_seen(cut):
    tensors, chunks = written(wholes_of([10, 7, 12]), 5)

    with pytest.raises(DamagedStream, match="missing"):
        read(tensors, chunks[cut])


def test_a_chunk_that_comes_twice_is_seen():
    tensors, chunks = written(wholes_of([10, 7, 12]), 5)

    with pytest.raises(DamagedStream, match="over"):
        read(tensors, [*chunks, chunks[-1]])


@pytest.mark.parametrize("wrong", [{"length": -1}, {"name": "t1"}])
def test_a_table_that_cannot_be_is_refused(wrong):
    tensors, _ = written(wholes_of([3, 4]), 5)

    with pytest.raises(DamagedStream, match="twice, or a negative"):
        BodyReader((msgspec.structs.replace(tensors[0], **wrong), tensors[1]))


def test_a_manifest_comes_back_from_pieces():
    tensors, _ = written(wholes_of([3, 4]), 5)
    specs = {"t0": TensorSpec("bfloat16", (3, 3))}
    manifest = Manifest(specs=specs, tensors=tensors, chunks=(BlobRef("00", 7),))
    pieces = encode_manifest(manifest, 20)

    assert len(pieces) > 1
    assert decode_manifest(pieces) == manifest


def test_manifests_have_the_bytes_they_always_had():
    tensors, _ = written(wholes_of([3]), 5)
    (piece,) = encode_manifest(
        Manifest(specs={"t0": TensorSpec("bfloat16", (3, 3))}, tensors=tensors, chunks=()), 1000
    )

    assert piece.hex() == (
        "84a6666f726d6174b274696e736d6974682d776569676874732d31a5737065637381a2743092a862"
        "666c6f61743136920303a774656e736f72739194a2743095a3756c70020901c4000300a66368756e"
        "6b7390"
    )


@pytest.mark.parametrize("data", [b"", b"\xff", msgspec.msgpack.encode({"format": "other"})])
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(DamagedStream, match="cannot be read"):
        decode_manifest([data])
