"""What a model's files tell before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from transformers import AutoModelForCausalLM

from tinsmith import model_files
from tinsmith.errors import StartupError
from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module", params=tiny_model.FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp(request.param), family=request.param)


def damaged(folder: Path, **config: object) -> Path:
    """A folder with a configuration, and weights that nobody should get to."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    return folder


def test_the_size_of_the_weights_is_what_they_take_when_loaded(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    size = sum(parameter.nbytes for parameter in model.parameters())
    files = model_files.find(str(folder))

    assert files.weight_bytes("float32") == size
    assert files.weight_bytes("bfloat16") == size // 2


def test_four_bits_take_a_little_more_than_an_eighth_of_float32(tmp_path: Path):
    files = model_files.find(str(tiny_model.build(tmp_path)))
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)  # weights of two layers
    rest = files.weight_bytes("float32") - 4 * linear

    assert files.weight_bytes("float32", "nf4") == pytest.approx(rest + linear * 0.516, abs=100)
    assert files.weight_bytes("float32", "int8") == pytest.approx(rest + linear * 1.01, abs=100)


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path):
    with pytest.raises(StartupError) as refusal:
        model_files.find(str(damaged(tmp_path, model_type="mamba")))

    assert str(refusal.value) == (
        f"model: {tmp_path} is of an unknown architecture, 'mamba'; Tinsmith serves gemma, "
        "gemma2, gemma3_text, gpt_oss, llama, mistral, qwen2, qwen3, qwen3_moe"
    )


def test_a_configuration_without_a_type_is_refused(tmp_path: Path):
    with pytest.raises(StartupError, match="names no model_type"):
        model_files.find(str(damaged(tmp_path)))


def test_weights_that_are_none_are_refused(tmp_path: Path):
    with pytest.raises(StartupError, match=r"cannot be loaded, as it is no safetensors file"):
        model_files.find(str(damaged(tmp_path, model_type="llama")))


def test_all_shards_are_read(tmp_path: Path):
    folder = tiny_model.build(tmp_path)
    whole = model_files.find(str(folder)).weight_bytes("float32")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")

    assert len(list(folder.glob("*.safetensors"))) > 2
    assert model_files.find(str(folder)).weight_bytes("float32") == whole


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commit = "0" * 40
    cached = tmp_path / "models--org--tiny"
    tiny_model.build(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))

    assert model_files.find("org/tiny").folder == cached / "snapshots" / commit


def test_no_torch_is_imported(tmp_path: Path):
    folder = tiny_model.build(tmp_path)
    code = (
        "import sys\nfrom tinsmith import model_files\n"
        f"print(model_files.find({str(folder)!r}).family, 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert process.stdout.split() == [b"llama", b"False"]
