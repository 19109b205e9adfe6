"""States saved for the next owner: every bit comes back, and what is damaged is not used."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from tests.unit.trainer.examples import cross_entropy, random_datum
from tests.unit.trainer.ranked import Task, on_ranks
from tests.unit.trainer.saved import saved

from tinsmith.errors import InvalidRequest, NoRoom
from tinsmith.messages.ops import WHOLE, LoraShape, OptimStep
from tinsmith.weights import places
from tinsmith.weights.body import decode_manifest
from tinsmith.weights.specs import TensorSpec
from tinsmith_trainer import base_model, whole_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.state import digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Files = dict[str, bytes]

DATA = (random_datum(20, seed=1), random_datum(33, seed=2))
LORA = LoraShape(rank=4, alpha=8.0, seed=5, train_mlp=False)
CHUNK_BYTES = 5000  # so that tensors span chunks, and chunks hold several


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "BLOB_BYTES", CHUNK_BYTES)


def loaded(folder: Path, name: str = "tiny", **options: object) -> TrainingEngine:
    return TrainingEngine(base_model.load(str(folder), name=name, **options), microbatch_tokens=64)


def train(engine: TrainingEngine, optimizer: str = "adamw", steps: int = 2) -> None:
    for _ in range(steps):
        engine.forward_backward("m", cross_entropy(*DATA))
        engine.optim_step("m", OptimStep(learning_rate=1e-2, optimizer=optimizer))


def state(engine: TrainingEngine, model_id: str = "m") -> str:
    return digest(engine.state(model_id))


def files_of(engine: TrainingEngine) -> Files:
    return saved(engine, engine.snapshot("m"))


@pytest.fixture
def engine(tiny_llama: Path) -> TrainingEngine:
    """Model "m" after two steps."""
    engine = loaded(tiny_llama)
    engine.create("m", LORA)
    train(engine)
    return engine


@pytest.mark.parametrize(
    ("name", "dtype", "optimizer"),
    [
        ("tiny", "float32", "adamw"),
        ("tiny", "float32", "dimuon"),
        ("tiny:full", "float32", "adamw"),
        ("tiny:full", "float32", "dimuon"),
        ("tiny:full", "bfloat16", "adamw"),
    ],
)
def test_another_engine_goes_on_from_the_same_bits(
    any_folder: Path, name: str, dtype: str, optimizer: str
):
    live, resumed = (loaded(any_folder, name, dtype=dtype) for _ in range(2))
    live.create("m", WHOLE if name.endswith("full") else LORA, optimizer)
    train(live, optimizer)
    moments = live.state("m").optimizer
    moments.exp_avg[:2] = torch.tensor([-0.0, 1e-42])  # a sign, and a subnormal number
    moments.exp_avg_sq[-2:] = torch.tensor([-0.0, 1e-42])
    done = resumed.restore("m", files_of(live), with_optimizer=True)

    assert done.lora == live.state("m").lora
    assert state(resumed) == state(live)
    assert resumed.snapshot("m").step == 2
    before = live.snapshot("m"), resumed.snapshot("m")
    assert to_files(before[0], with_optimizer=True) == to_files(before[1], with_optimizer=True)
    for each in (live, resumed):
        train(each, optimizer)
    assert state(resumed) == state(live)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sharding"), [("tiny", "none"), ("tiny:full", "none"), ("tiny:full", "weights")]
)
def test_several_ranks_go_on_from_the_same_bits(
    tiny_llama: Path, tmp_path: Path, name: str, sharding: str
):
    live = loaded(tiny_llama, name)
    live.create("m", WHOLE if name.endswith("full") else LORA)
    train(live)
    task = Task(str(tiny_llama), name, sharding=sharding, files=files_of(live))
    outcome, again = on_ranks([task], tmp_path)

    assert outcome.states[0] == again.states[0] == state(live)
    assert outcome.states == again.states


def test_tensors_have_common_names_and_lie_in_chunks_as_they_are(engine: TrainingEngine):
    snapshot = engine.snapshot("m")
    files = files_of(engine)
    manifest = decode_manifest([files["manifest-00001"], files["manifest-00002"]])
    chunks = b"".join(files[name] for name in sorted(files) if name.startswith("chunk-"))
    names = [part.name for part in snapshot.layout.parts]

    moments = [f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in names]
    assert list(manifest.specs) == [one.name for one in manifest.tensors] == names + moments
    assert {one.change.kind for one in manifest.tensors} == {"raw"}
    arrays = (snapshot.weights, snapshot.optimizer.exp_avg, snapshot.optimizer.exp_avg_sq)
    assert chunks == b"".join(array.numpy().tobytes() for array in arrays)


def test_equal_states_give_equal_bytes(engine: TrainingEngine, tiny_llama: Path):
    other = loaded(tiny_llama)
    other.restore("m", files_of(engine), with_optimizer=True)

    assert files_of(other) == files_of(engine)


def test_chunks_are_let_go_of_as_they_are_read(engine: TrainingEngine):
    files = files_of(engine)
    engine.restore("m", files, with_optimizer=True)

    assert not any(name.startswith("chunk-") for name in files)


def test_chunks_of_what_is_not_to_be_changed_are_read_as_well(engine: TrainingEngine):
    files, before = files_of(engine), state(engine)
    train(engine)
    engine.restore("m", MappingProxyType(files), with_optimizer=True)

    assert state(engine) == before


def test_a_checkpoint_that_earlier_versions_saved_instead_is_still_read(
    engine: TrainingEngine, tiny_llama: Path
):
    other = loaded(tiny_llama)
    files = dict(to_files(engine.snapshot("m"), with_optimizer=True))
    other.restore("m", files, with_optimizer=True)

    assert state(other) == state(engine)


def test_there_must_be_memory_for_a_whole_model(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    engine = loaded(tiny_llama, "tiny:full")
    engine.create("m", WHOLE)
    files = files_of(engine)
    monkeypatch.setattr(whole_model.memory, "available_bytes", lambda: 1 << 20)

    with pytest.raises(NoRoom, match="reading all weights"):
        engine.restore("m", files, with_optimizer=True)


def without(name: str) -> Callable[[Files], Files]:
    return lambda files: {key: data for key, data in files.items() if key != name}


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Files], Files]:
    return lambda files: {**files, name: change(files[name])}


def told(**fields: object) -> Callable[[Files], Files]:
    return changed(
        "trainer_state.json", lambda data: json.dumps({**json.loads(data), **fields}).encode()
    )


def listed(**fields: object) -> Callable[[Files], Files]:
    """With a manifest of one piece that says something else."""

    def change(files: Files) -> Files:
        pieces = [name for name in sorted(files) if name.startswith("manifest-")]
        manifest = decode_manifest([files[name] for name in pieces])
        new = {name: value(manifest) for name, value in fields.items()}
        data = msgspec.msgpack.encode(msgspec.structs.replace(manifest, **new))
        rest = {name: files[name] for name in files if name not in pieces}
        return {**rest, "manifest-00001": data}

    return change


def swapped(files: Files) -> Files:
    return {**files, "chunk-00002": files["chunk-00003"], "chunk-00003": files["chunk-00002"]}


def flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


DAMAGE: dict[str, tuple[Callable[[Files], Files], str]] = {
    "a chunk is missing": (without("chunk-00002"), "chunk-00002: .*is not whole"),
    "a chunk is short": (changed("chunk-00002", lambda data: data[:-4]), "not as its state says"),
    "the last is short": (
        lambda files: {**files, max(files, key=_chunk): files[max(files, key=_chunk)][:-4]},
        "1 changes missing",
    ),
    "a chunk is longer": (changed("chunk-00002", lambda data: data + b"\0" * 4), "as its state"),
    "a chunk is empty": (changed("chunk-00002", lambda data: b""), "not as its state says"),
    "a bit is flipped": (changed("chunk-00002", flipped), "not as its state says"),
    "chunks are swapped": (swapped, "not as its state says"),
    "a chunk comes twice": (
        lambda files: {**files, "chunk-00003": files["chunk-00002"]},
        "not as its state says",
    ),
    "no manifest": (without("manifest-00001"), "the checkpoint does not have it"),
    "half a manifest": (without("manifest-00002"), "a table of changes cannot be read"),
    "the manifest is none": (changed("manifest-00001", lambda data: b"\xff"), "cannot be read"),
    "no state": (without("trainer_state.json"), "trainer_state.json: "),
    "another root": (told(root="0" * 64), "not 00000"),
    "no root": (told(root=""), "the state is "),
    "another base": (told(base_model="other"), "was trained on other"),
    "another rank": (told(rank=8), "or another tensor than"),
    "another optimizer": (told(optimizer="dimuon", format=2), "or another tensor than"),
    "an impossible rank": (told(rank=3), "rank"),
    "a tensor is missing": (
        listed(tensors=lambda manifest: manifest.tensors[:-1]),
        "bytes over",
    ),
    "another shape": (
        listed(
            specs=lambda manifest: {
                **manifest.specs,
                min(manifest.specs): TensorSpec("float32", (1 << 40,)),
            }
        ),
        "or another tensor than",
    ),
}


def _chunk(name: str) -> str:
    return name if name.startswith("chunk-") else ""


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_refused_and_changes_nothing(engine: TrainingEngine, case: str):
    damage, message = DAMAGE[case]
    files = damage(files_of(engine))
    train(engine)
    before = state(engine)
    with pytest.raises(InvalidRequest, match=message):
        engine.restore("m", files, with_optimizer=True)

    assert state(engine) == before


def test_numbers_that_are_not_finite_are_refused(engine: TrainingEngine):
    engine.state("m").weights[0] = torch.nan

    with pytest.raises(InvalidRequest, match="holds numbers that are not finite"):
        engine.restore("m", files_of(engine), with_optimizer=True)
