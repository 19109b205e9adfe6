"""Tiny models and adapters on disk, their oracles, and engines on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.threads import one_thread
from tests.unit.sampler.engines import running
from tests.unit.sampler.oracles import Oracle, adapter_files, save_adapter

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tinsmith_sampler.torch_engine import TorchEngine

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tied and separate embeddings: llama and qwen3."""
    root = tmp_path_factory.mktemp("models")
    return {
        family: tiny_model.build(root / family, family=family, seed=3)
        for family in ("llama", "qwen3")
    }


@pytest.fixture(params=["llama", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def oracles(models: dict[str, Path]) -> dict[str, Oracle]:
    return {family: Oracle(folder) for family, folder in models.items()}


@pytest.fixture(scope="session")
def adapters(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the llama, of different ranks, one of them for some layers only."""
    root = tmp_path_factory.mktemp("adapters")
    some = ("q_proj", "down_proj")
    return {
        "a": save_adapter(models["llama"], root / "a", seed=1),
        "b": save_adapter(models["llama"], root / "b", seed=2, rank=8, targets=some),
    }


@pytest.fixture(scope="session")
def adapter_oracles(models: dict[str, Path], adapters: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(models["llama"], folder) for name, folder in adapters.items()}


@pytest.fixture
def start(models: dict[str, Path]):
    """Makes an engine: ``async with start("llama", max_rows=2) as engine``."""
    return lambda family="llama", **options: running(models[family], **options)


@pytest.fixture
async def engine(start) -> AsyncIterator[TorchEngine]:
    """On the llama, with nothing loaded."""
    async with start() as engine:
        yield engine


@pytest.fixture
async def adapted(engine: TorchEngine, adapters: dict[str, Path]) -> TorchEngine:
    """On the llama, with the adapters ``a`` and ``b``."""
    for name, folder in adapters.items():
        await engine.load_adapter(name, adapter_files(folder))
    return engine


@pytest.fixture
def widths(monkeypatch):
    """Notes how many rows each decoding pass of an engine has."""

    def watch(engine) -> list[int]:
        seen: list[int] = []
        decode = engine._model.decode
        monkeypatch.setattr(
            engine._model, "decode", lambda pieces: (seen.append(len(pieces)), decode(pieces))[1]
        )
        return seen

    return watch
