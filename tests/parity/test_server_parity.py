"""A whole server with the unmodified client and an independent script make the same run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
from safetensors import SafetensorError
from tests.integration import conftest as servers
from tests.parity import runs
from tests.parity.independent import Script
from tests.parity.tenants import SEED, ClientTenant

from tinsmith.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    *map(pytest.mark.filterwarnings, servers.CLIENT_WARNINGS),
]
SFT_STEPS, RL_STEPS = 50, 20


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_moe"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Server]:
    folder = tmp_path_factory.mktemp(request.param)
    base = tiny_model.build(folder / "model", family=request.param)
    running = servers.start(folder, model_folder=base)
    yield running
    servers.stop(running)


@pytest.fixture(params=[8, 32])
def sides(
    request: pytest.FixtureRequest, server: servers.Server, tmp_path: Path
) -> Iterator[tuple[ClientTenant, Script]]:
    """A fresh model, and a script on the adapter that the server saved of it."""
    clients = servers.connect(server)
    model = (
        next(clients)
        .create_lora_training_client(servers.MODEL, rank=request.param, seed=SEED)
        .result()
    )
    model.save_state("initial").result()
    adapter = exported(server, request.param, tmp_path)
    yield (
        ClientTenant(model, runs.LEARNING_RATE),
        Script(server.folder / "model", adapter, learning_rate=runs.LEARNING_RATE),
    )
    next(clients, None)


def exported(server: servers.Server, rank: int, folder: Path) -> Path:
    """The fresh adapter of this rank that lies in the server's blob store."""
    for file in (server.folder / "data" / "blobs").glob("??/*"):
        content = file.read_bytes()
        if content.startswith(b"{") and json.loads(content).get("r") == rank:
            (folder / "adapter_config.json").write_bytes(content)
        elif _rank_of(content) == rank:
            (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def _rank_of(content: bytes) -> int | None:
    """Of an adapter's weights, of which B is still zero; moments have names of another form."""
    try:
        tensors = safetensors.torch.load(content)
    except SafetensorError:
        return None
    name = "base_model.model.lm_head.lora_A.weight"
    is_fresh = not any(one.any() for key, one in tensors.items() if "lora_B" in key)
    return len(tensors[name]) if is_fresh and name in tensors else None


def test_fifty_supervised_steps(sides: tuple[ClientTenant, Script]):
    runs.supervised(*sides, steps=SFT_STEPS)


def test_twenty_policy_gradient_steps(sides: tuple[ClientTenant, Script]):
    runs.reinforced(*sides, steps=RL_STEPS)
