"""SGLang's command line, environment and stand-ins: what needs no server."""

from __future__ import annotations

import importlib
import struct
import sys
from pathlib import Path

import pytest
import torch

from tinsmith.errors import ConfigError
from tinsmith_sampler.sglang import launching
from tinsmith_sampler.sglang.boot import after_import, seeding, stand_ins

KEY = "a-secret"


def options(**own):
    return launching.SglangOptions(python=Path("/opt/sglang/bin/python"), model_path="/m", **own)


def value(arguments, name):
    """Of the last argument of that name, which is the one that counts."""
    return arguments[len(arguments) - 1 - arguments[::-1].index(name) + 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_numbers_rest_on_is_said_on_every_device(device):
    arguments = launching.arguments(options(device=device, cache_tokens=999), 31000)

    assert "--enable-deterministic-inference" in arguments
    assert value(arguments, "--max-total-tokens") == "999"
    assert value(arguments, "--host") == "127.0.0.1"
    assert "--max-loaded-loras" not in arguments
    told = launching.environment(options(device=device), KEY, Path("/tmp/x"), {})
    assert told["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"


def test_only_a_cpu_is_told_to_use_plain_torch():
    assert value(launching.arguments(options(), 1), "--lora-backend") == "torch_native"
    assert "--lora-backend" not in launching.arguments(options(device="cuda"), 1)
    told = launching.environment(options(device="cuda"), KEY, Path("/tmp/x"), {})
    assert "SGLANG_USE_CPU_ENGINE" not in told


def test_further_arguments_win():
    arguments = launching.arguments(options(extra=("--max-lora-rank", "8")), 1)

    assert value(arguments, "--max-lora-rank") == "8"


def test_the_key_is_in_the_environment_and_nowhere_else():
    given = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "/ours", "TINSMITH_GATEWAY__KEY": "x"}
    told = launching.environment(options(), KEY, Path("/tmp/x"), given)

    assert told[launching.KEY_VARIABLE] == KEY
    assert KEY not in " ".join(launching.command(options(), 1))
    assert told["HF_HUB_OFFLINE"] == "1"
    assert told.keys().isdisjoint({"PYTHONPATH", "TINSMITH_GATEWAY__KEY"})


def test_an_interpreter_without_sglang_is_refused_with_the_remedy(tmp_path):
    for python, reason in ((Path(sys.executable), "has no SGLang"), (tmp_path, "cannot be run")):
        with pytest.raises(ConfigError, match=rf"{reason}.*make sglang"):
            launching.check_python(python)


def test_another_version_is_refused():
    launching.check_version("0.5.23", "there is")
    with pytest.raises(ConfigError, match=r"there is SGLang 0\.5\.20.*0\.5\.23"):
        launching.check_version("0.5.20", "there is")


def murmur3(data, seed=0):
    """MurmurHash3 for x86, 32 bit, of whole words; over bytes, as its author wrote it."""
    state = seed
    for (word,) in struct.iter_unpack("<I", data):
        mixed = word * 0xCC9E2D51 & 0xFFFFFFFF
        mixed = (mixed << 15 | mixed >> 17) & 0xFFFFFFFF
        state ^= mixed * 0x1B873593 & 0xFFFFFFFF
        state = (state << 13 | state >> 19) & 0xFFFFFFFF
        state = (state * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_seeded_samples_are_drawn_with_murmurhash3():
    assert murmur3(b"abcd", 0x9747B28C) == 0xF0478627  # its published test vector
    seeds, positions, columns = [0, 7, 2**63 - 1, 2**64 - 5], [0, 1, 300, 4], [0, 3, 151_000]
    hashes = seeding.murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )

    assert hashes.tolist() == [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]


@pytest.fixture
def imports(monkeypatch):
    """Whatever is done to imports is undone."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_stand_in_can_be_imported_and_not_called(imports):
    stand_ins.install()
    absent = importlib.import_module("sgl_kernel.some.part")

    class Child(absent.Kernel):
        pass

    assert absent.Kind.FAST == "sgl_kernel.some.part.Kind.FAST"
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.some\.part\.kernel"):
        absent.kernel(1)


def test_a_change_is_made_once_its_module_was_imported(imports, tmp_path, monkeypatch):
    (tmp_path / "changed_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    after_import.install({"changed_later": lambda module: setattr(module, "value", 2)})

    assert importlib.import_module("changed_later").value == 2
