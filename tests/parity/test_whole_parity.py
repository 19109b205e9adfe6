"""All weights trained, and an independent script that trains them: the same runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration import conftest as servers
from tests.integration.test_whole import WHOLE, session
from tests.parity import runs
from tests.parity.independent import Script
from tests.parity.tenants import ClientTenant, EngineTenant

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    *map(pytest.mark.filterwarnings, servers.CLIENT_WARNINGS),
]
SFT_STEPS, RL_STEPS = 50, 20
RATE = 1e-4
"""A tenth of an adapter's, as is usual: at more, rounding grows with every step."""


def sides(base: Path) -> tuple[EngineTenant, Script]:
    ours = EngineTenant(base, rank=0, learning_rate=RATE)
    return ours, Script(base, None, learning_rate=RATE)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_supervised_steps(family: tiny_model.Family, tmp_path: Path):
    runs.supervised(*sides(tiny_model.build(tmp_path, family=family)), steps=SFT_STEPS)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_policy_gradient_steps(family: tiny_model.Family, tmp_path: Path):
    runs.reinforced(*sides(tiny_model.build(tmp_path, family=family)), steps=RL_STEPS)


@pytest.mark.integration
def test_a_whole_server_with_the_unmodified_client(tmp_path: Path):
    base = tiny_model.build(tmp_path / "model")
    server = servers.start(tmp_path, model_folder=base, extra="full = true\n")
    try:
        with session(server) as client:
            model = client.create_lora_training_client(WHOLE).result()
            ours = ClientTenant(model, RATE)
            runs.supervised(ours, Script(base, None, learning_rate=RATE), steps=SFT_STEPS)
    finally:
        servers.stop(server)
