"""Tiny models on disk, engines on them, and ops made of plain lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.threads import one_thread

from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "llama", family="llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "qwen3", family="qwen3")


@pytest.fixture(params=["llama", "qwen3"])
def any_folder(request: pytest.FixtureRequest) -> Path:
    """Both families in turn: tied and separate embeddings."""
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture
def engine(tiny_llama: Path) -> TrainingEngine:
    return TrainingEngine(base_model.load(str(tiny_llama), name="tiny"), microbatch_tokens=64)
