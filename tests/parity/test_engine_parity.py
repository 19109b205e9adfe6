"""The training engine and an independent script make the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.parity import runs
from tests.parity.independent import Script
from tests.parity.tenants import EngineTenant

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("llama", "qwen3", "qwen3_moe")
SFT_STEPS, RL_STEPS = 50, 20


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path / "model", family=request.param)


def sides(base: Path, rank: int) -> tuple[EngineTenant, Script]:
    ours = EngineTenant(base, rank=rank, learning_rate=runs.LEARNING_RATE)
    adapter = ours.export(base.parent / "adapter")
    return ours, Script(base, adapter, learning_rate=runs.LEARNING_RATE)


@pytest.mark.parametrize("rank", [8, 32])
def test_fifty_supervised_steps(base: Path, rank: int):
    runs.supervised(*sides(base, rank), steps=SFT_STEPS)


@pytest.mark.parametrize("rank", [8, 32])
def test_twenty_policy_gradient_steps(base: Path, rank: int):
    runs.reinforced(*sides(base, rank), steps=RL_STEPS)
