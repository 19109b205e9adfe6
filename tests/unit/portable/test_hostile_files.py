"""Files and manifests that somebody made up: refused with a reason, and nothing else happens."""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
import struct
import tarfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.unit.trainer.examples import cross_entropy, random_datum

from tinsmith import model_files
from tinsmith.adapters import adapter_ref
from tinsmith.errors import BlobMissing, InvalidRequest
from tinsmith.messages import ops
from tinsmith.messages.base import BlobRef, decoder, encode
from tinsmith.messages.checkpoints import Checkpoint, CommitCheckpoint
from tinsmith.messages.ops import WHOLE, LoraShape, OptimStep
from tinsmith.parts import MAX_NAME, check_manifest, check_parts
from tinsmith.portable.adapter_folder import read_adapter
from tinsmith.portable.unembedding import without_unembedding
from tinsmith.testing import tiny_model
from tinsmith_gateway.archive import archive
from tinsmith_trainer import base_model, checkpoint_files
from tinsmith_trainer.checkpoint_files import CONFIG, OPTIMIZER, STATE, WEIGHTS, to_files
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.skeleton import targets_of
from tinsmith_trainer.state import StateView, digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinsmith.blobs import BlobStore
    from tinsmith_trainer.targets import Targets
    from tinsmith_trainer.trainable import Snapshot

Files = dict[str, bytes]
WHOLE_WEIGHTS = "model.safetensors"

often = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Saved(NamedTuple):
    """A good training checkpoint of each form, and what reads one."""

    adapter: Files
    whole: Files
    targets: Targets
    engine: TrainingEngine  # of the whole form

    def read_adapter(self, files: Files) -> Snapshot:
        snapshot = checkpoint_files.from_files(
            files, base_model="tiny", targets=self.targets, with_optimizer=True
        )
        # What is let in can be digested, written and read again.
        digest(StateView(snapshot.lora, snapshot.weights, snapshot.optimizer))
        to_files(snapshot, with_optimizer=True)
        return snapshot

    def read_whole(self, files: Files) -> None:
        self.engine.restore("m", files, with_optimizer=True)
        digest(self.engine.state("m"))
        self.engine.drop("m")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tiny_model.build(tmp_path_factory.mktemp("base") / "llama")
    made, engines = [], []
    for name, shape in (("tiny", LoraShape(rank=2)), ("tiny:full", WHOLE)):
        engine = TrainingEngine(base_model.load(str(folder), name=name))
        engine.create("m", shape)
        engine.forward_backward("m", cross_entropy(random_datum(9)))
        engine.optim_step("m", OptimStep(learning_rate=1e-3))
        made.append(dict(to_files(engine.snapshot("m"), with_optimizer=True)))
        engine.drop("m")
        engines.append(engine)
    return Saved(*made, targets_of(model_files.find(str(folder))), engines[1])


def refused(read: Callable[[Files], object], files: Files) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(files)
    assert ": " in str(error.value)


def test_the_good_ones_are_read(saved: Saved):
    saved.read_adapter(saved.adapter)
    saved.read_whole(saved.whole)


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def packed(header: bytes, body: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + body


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.sampled_from([-1, 0, 2**31, 2**63 - 1, 2**63, 2**64])
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "data_offsets": st.lists(NUMBERS, max_size=3),
    "shape": st.lists(NUMBERS, max_size=4),
    "dtype": st.sampled_from(
        [
            "F64",
            "F16",
            "F8_E4M3",
            "F8_E5M2",
            "F4",
            "F6_E2M3",
            "E8M0",
            "I64",
            "U8",
            "BOOL",
            "C64",
            "x",
        ]
    ),
}
DAMAGES = st.sampled_from(list(VALUES)).flatmap(
    lambda field: st.tuples(st.just(field), VALUES[field] | st.none() | st.text(max_size=5))
)


@often
@given(damage=DAMAGES, which=st.integers(0, 5), name=st.sampled_from([WEIGHTS, OPTIMIZER]))
@example(("dtype", "F4"), 0, WEIGHTS)
@example(("dtype", "F6_E2M3"), 0, WEIGHTS)
@example(("dtype", "C64"), 0, WEIGHTS)
@example(("shape", [2**40, 2**40]), 0, WEIGHTS)
@example(("data_offsets", [0, 2**63]), 0, WEIGHTS)
@example(("data_offsets", [-8, 8]), 0, OPTIMIZER)
def test_a_tensor_that_the_header_makes_up(
    saved: Saved, damage: tuple[str, Any], which: int, name: str
):
    header, body = header_of(saved.adapter[name])
    entry = header[[one for one in header if one != "__metadata__"][which]]
    field, value = damage
    if entry[field] == value:
        return
    entry[field] = value

    refused(
        saved.read_adapter,
        {**saved.adapter, name: packed(json.dumps(header).encode(), body)},
    )


def overlapping(header: dict[str, Any]) -> bytes:
    first, second = [one for one in header.values() if len(one.get("shape", ())) == 2][:2]
    second["data_offsets"] = first["data_offsets"]
    return json.dumps(header).encode()


HEADERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "no JSON": lambda _: b"{",
    "a list": lambda _: b"[]",
    "not UTF-8": lambda h: json.dumps(h).encode().replace(b"weight", b"weig\xff\xfe", 1),
    "nested": lambda _: b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "empty": lambda _: b"{}",
    "a name twice, of other bytes": lambda h: (
        json.dumps(h)[:-1] + ', "' + next(n for n in h if n != "__metadata__") + '": '
        '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    ).encode(),
    "metadata that is no text": lambda h: json.dumps({**h, "__metadata__": {"a": [1]}}).encode(),
    "overlapping": overlapping,
    "a gap": lambda h: json.dumps(dict(list(h.items())[:-1])).encode(),
}


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, WHOLE_WEIGHTS])
@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_is_none(saved: Saved, case: str, name: str):
    good, read = (
        (saved.whole, saved.read_whole)
        if name == WHOLE_WEIGHTS
        else (saved.adapter, saved.read_adapter)
    )
    header, body = header_of(good[name])

    refused(read, {**good, name: packed(HEADERS[case](header), body)})


@pytest.mark.parametrize("length", [0, 2**27, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_a_length_that_the_file_does_not_have(saved: Saved, length: int):
    header, body = header_of(saved.adapter[WEIGHTS])
    data = packed(json.dumps(header).encode(), body, length)

    refused(saved.read_adapter, {**saved.adapter, WEIGHTS: data})


@often
@given(
    field=st.sampled_from(["steps", "rank", "seed", "alpha", "format", "optimizer", "train_mlp"]),
    value=NUMBERS | st.floats() | st.text(max_size=5) | st.none() | st.lists(st.none(), max_size=1),
)
@example("steps", -1)
@example("steps", 2**64)
@example("seed", 2**64)
@example("seed", -(2**63) - 1)
def test_a_state_that_is_made_up(saved: Saved, field: str, value: object):
    state = json.loads(saved.adapter[STATE])
    text = json.dumps({**state, field: value}).encode()

    with suppress(InvalidRequest):
        snapshot = saved.read_adapter({**saved.adapter, STATE: text})
        # Another count of steps or seed is a state too.
        assert field in {"steps", "seed"} or state[field] == value
        assert snapshot.step >= 0


@pytest.mark.parametrize("name", [CONFIG, STATE])
@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe{}", b'{"r": "\xff"}', b"[" * 100_000, b'{"a":' * 50_000, b"null", b"[]"],
    ids=["empty", "utf-16", "latin", "lists", "objects", "null", "list"],
)
def test_json_that_is_none(saved: Saved, name: str, data: bytes):
    refused(saved.read_adapter, {**saved.adapter, name: data})


class Touch:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def pickles(marker: Path) -> list[bytes]:
    import torch

    zipped = io.BytesIO()
    torch.save(Touch(marker), zipped)
    return [*(pickle.dumps(Touch(marker), protocol) for protocol in range(6)), zipped.getvalue()]


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, OPTIMIZER, STATE])
def test_a_pickle_in_the_place_of_any_file_is_not_run(saved: Saved, tmp_path: Path, name: str):
    for data in pickles(tmp_path / "marker"):
        refused(saved.read_adapter, {**saved.adapter, name: data})
        if name in saved.whole:
            refused(saved.read_whole, {**saved.whole, name: data})

    assert not (tmp_path / "marker").exists()
    pickle.loads(pickles(tmp_path / "marker")[0])
    assert (tmp_path / "marker").exists()  # it would have been


def a_link(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def a_link_to_nothing(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "nothing")


def a_folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def a_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def a_device(folder: Path, name: str) -> None:
    (folder / name).unlink()
    try:
        os.mknod(folder / name, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero, without an end
    except PermissionError:
        pytest.skip("needs the right to make a device")


def a_socket(folder: Path, name: str) -> None:
    (folder / name).unlink()
    here = os.open(".", os.O_RDONLY)
    os.chdir(folder)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(name)
    os.chdir(here)
    os.close(here)


def far_too_large(folder: Path, name: str) -> None:
    os.truncate(folder / name, 9 << 30)  # of holes


def larger_than_its_header_says(folder: Path, name: str) -> None:
    """Nothing of which is read: 7 GiB."""
    if name == WEIGHTS:
        os.truncate(folder / name, 7 << 30)
    else:
        os.truncate(folder / name, 2 << 20)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
@pytest.mark.parametrize(
    "change",
    [
        a_link,
        a_link_to_nothing,
        a_folder,
        a_pipe,
        a_device,
        a_socket,
        far_too_large,
        larger_than_its_header_says,
    ],
)
def test_a_file_to_import_that_is_no_file(
    saved: Saved, tmp_path: Path, change: Callable[[Path, str], None], name: str
):
    folder = tmp_path / "adapter"
    folder.mkdir()
    for one in (WEIGHTS, CONFIG):
        (folder / one).write_bytes(saved.adapter[one])
    assert read_adapter(folder).keys() == {WEIGHTS, CONFIG}
    change(folder, name)

    with pytest.raises(InvalidRequest, match=name):
        read_adapter(folder)


NAMES = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [
        "..",
        ".",
        "/etc/passwd",
        "../x",
        "a/b",
        "a\\b",
        "model/../../x.safetensors",
        "a\n",
        "\0",
        "-x",
    ]
)


@often
@given(NAMES)
def test_a_part_has_a_name_that_stays_where_it_is(name: str):
    with suppress(InvalidRequest):
        check_parts({name: BlobRef("0" * 64, 1)})
        assert name.isascii()
        assert not {"/", "\\", "\0", "\n"} & set(name)
        assert name not in {".", ".."}
        assert os.path.normpath(os.path.join("/a", name)) == f"/a/{name}"


@pytest.mark.parametrize(
    "ref",
    [
        BlobRef("../" * 20 + "etc/passwd", 1),
        BlobRef("A" * 64, 1),
        BlobRef("0" * 63, 1),
        BlobRef("0" * 64, -1),
        BlobRef("0" * 64 + "\n", 1),
    ],
)
def test_a_part_refers_to_a_blob(ref: BlobRef):
    with pytest.raises(InvalidRequest, match="is no blob"):
        check_parts({"model.safetensors": ref})


ALPHABET = st.sampled_from("abcXYZ019_.-")


@often
@given(
    st.dictionaries(
        st.text(ALPHABET, min_size=1, max_size=MAX_NAME).filter(lambda n: n[0] not in ".-"),
        st.binary(max_size=1200),
        min_size=1,
        max_size=4,
    )
)
@example({"a" * MAX_NAME: b"x", "b" * 99: b"", "c" * 100: bytes(512), "d" * 101: bytes(513)})
def test_an_archive_holds_its_files_and_nothing_else(blobs: BlobStore, files: Files):
    import asyncio

    async def made() -> bytes:
        parts = {name: await blobs.put(data) for name, data in files.items()}
        check_parts(parts)
        content = archive(parts, created_s=1)
        data = b"".join([piece async for piece in content.read(blobs, 0, content.size)])
        assert len(data) == content.size
        return data

    with tarfile.open(fileobj=io.BytesIO(asyncio.run(made()))) as opened:
        members = opened.getmembers()
        assert [(m.isreg(), m.mode & 0o7000) for m in members] == [(True, 0)] * len(files)
        assert {m.name: opened.extractfile(m).read() for m in members} == files


@pytest.mark.parametrize("damage", ["longer", "shorter", "other", "gone"])
async def test_a_part_whose_bytes_are_not_those_it_was_made_of(
    blobs: BlobStore, tmp_path: Path, damage: str
):
    good = await blobs.put(b"weights" * 1000)
    other = await blobs.put(b"another" * 1000)
    ref = {
        "longer": BlobRef(good.blake3, good.size - 1),
        "shorter": BlobRef(good.blake3, good.size + 1),
        "other": BlobRef(good.blake3, good.size),
        "gone": BlobRef("f" * 64, good.size),
    }[damage]
    if damage == "other":
        stored = {file.name: file for file in (tmp_path / "blobs").rglob("*")}
        stored[other.blake3[2:]].replace(stored[good.blake3[2:]])

    with pytest.raises(BlobMissing, match=ref.blake3):
        await blobs.get(ref)


def test_an_output_layer_is_taken_out_of_files_that_are_checked(saved: Saved):
    found = without_unembedding({n: saved.adapter[n] for n in (WEIGHTS, CONFIG)})

    assert "lm_head" not in found[CONFIG].decode()
    assert b"lm_head" not in found[WEIGHTS]


MANIFEST = Checkpoint(
    path="tinker://x:train:0/weights/a",
    model_id="x:train:0",
    kind="weights",
    name="a",
    op_seq=3,
    base_model="tiny",
    lora=LoraShape(),
    step=1,
    parts={WEIGHTS: BlobRef("0" * 64, 5), STATE: BlobRef("1" * 64, 7)},
    size_bytes=12,
    created_ns=1,
)


@settings(often, max_examples=400)
@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6),
    st.integers(0, 10_000),
)
def test_a_manifest_of_changed_bytes_is_one_or_is_refused(
    changes: list[tuple[int, int]], length: int
):
    data = bytearray(encode(MANIFEST))
    for place, byte in changes:
        data[place % len(data)] = byte
    try:
        found = decoder(Checkpoint).decode(bytes(data[:length]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    with suppress(InvalidRequest):
        check_manifest(found)
        assert found.format <= 1
        assert all(ref.size >= 0 and len(ref.blake3) == 64 for ref in found.parts.values())


def test_a_manifest_of_a_later_format_is_refused():
    check_manifest(MANIFEST)
    with pytest.raises(InvalidRequest, match="is of format 2, and this version reads up to 1"):
        check_manifest(msgspec.structs.replace(MANIFEST, format=2))
    with pytest.raises(InvalidRequest, match="is of format 2"):
        adapter_ref(msgspec.structs.replace(MANIFEST, format=2))


@pytest.mark.parametrize("struct", [Checkpoint, CommitCheckpoint, ops.Op, ops.StateSaved])
def test_a_pickle_on_the_bus_is_not_run(tmp_path: Path, struct: type):
    for data in pickles(tmp_path / "marker"):
        with pytest.raises(msgspec.DecodeError):
            decoder(struct).decode(data)

    assert not (tmp_path / "marker").exists()
