"""The device that these tests are about: a GPU, and none of them runs where there is none.

``TINSMITH_TEST_DEVICE=cpu`` runs the same tests on the CPU, which shows that they are right, but
nothing about GPUs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from tests.threads import one_thread

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["one_thread"]


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    """``cuda``, unless another is asked for."""
    name = os.environ.get("TINSMITH_TEST_DEVICE", "cuda")
    if name not in {"cuda", "cpu"}:
        pytest.fail(f"TINSMITH_TEST_DEVICE: {name!r} is neither cuda nor cpu")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds no CUDA device (TINSMITH_TEST_DEVICE=cpu runs on it)")
    return name


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of every family."""
    root = tmp_path_factory.mktemp("models")
    return {one: tiny_model.build(root / one, family=one) for one in tiny_model.FAMILIES}
