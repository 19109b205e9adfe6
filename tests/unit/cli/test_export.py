"""`tinsmith export` before it reaches an installation, and what it writes without torch."""

from __future__ import annotations

import json

import pytest
import safetensors.numpy

from tinsmith.cli import foreground
from tinsmith.cli.export import Options, export
from tinsmith.config import Config
from tinsmith.errors import InvalidRequest, StartupError
from tinsmith.portable.folder import new_folder
from tinsmith.portable.unembedding import without_unembedding

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def test_merging_without_torch_names_the_extra_and_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(foreground, "_is_installed", lambda package: package != "torch")
    options = Options(checkpoint="r/c", folder=tmp_path / "new", is_merged=True)

    with pytest.raises(StartupError, match=r"torch is not installed; pip install 'tinsmith\[tra"):
        export(options, Config())

    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_there_when_all_of_it_is(tmp_path):
    with new_folder(tmp_path / "deep" / "new") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "deep" / "new").exists()

    assert [file.name for file in (tmp_path / "deep" / "new").iterdir()] == ["file"]


def test_a_folder_that_fails_is_not_there(tmp_path):
    def fail():
        with new_folder(tmp_path / "new") as folder:
            (folder / "file").write_text("x")
            raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("full", "full/file", "link"):
        with pytest.raises(InvalidRequest, match="is no empty folder"), new_folder(tmp_path / name):
            pass


def adapter(modules):
    import numpy as np

    tensors = {
        f"base_model.model.{name}.lora_{side}.weight": np.full((2, 3), number, np.float32)
        for number, name in enumerate(modules)
        for side in "AB"
    }
    config = {"r": 2, "target_modules": sorted({name.rpartition(".")[2] for name in modules})}
    weights = safetensors.numpy.save(tensors, {"format": "pt"})
    return {WEIGHTS: weights, CONFIG: json.dumps(config).encode()}


def test_all_but_the_output_layer_is_left_byte_for_byte():
    modules = ["model.layers.0.q_proj", "lm_head", "model.layers.1.q_proj"]

    found = without_unembedding(adapter(modules))

    tensors = safetensors.numpy.load(found[WEIGHTS])
    whole = safetensors.numpy.load(adapter(modules)[WEIGHTS])
    assert tensors.keys() == {name for name in whole if "lm_head" not in name}
    assert all((tensors[name] == whole[name]).all() for name in tensors)
    assert json.loads(found[CONFIG])["target_modules"] == ["q_proj"]


def test_an_adapter_of_the_output_layer_alone_cannot_lose_it():
    with pytest.raises(InvalidRequest, match="adapts nothing else"):
        without_unembedding(adapter(["lm_head"]))
