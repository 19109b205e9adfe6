"""What the unmodified client makes of limits and tokens; services are played as beside this."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs
from tests.unit.gateway.test_real_client import MODEL, datum, draw, op_result, pytestmark, train

from tinsmith.keys import owner_of_key
from tinsmith.messages.table import OPS
from tinsmith_gateway.config import GatewayConfig

tinker = pytest.importorskip("tinker")
__all__ = ["pytestmark"]


@pytest.fixture
def config():
    return GatewayConfig(long_poll_s=1.0, max_unfinished=3, exchange_keys=True)


@pytest.fixture
def login(rig, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", rig.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-alice")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return tinker.ServiceClient


def is_busy(entry):
    return entry.get("kind") == "Busy"


async def test_a_run_goes_on_when_it_was_told_to_wait(login, rig):
    def loop():
        client = login()
        training = client.create_lora_training_client(MODEL, rank=8).result()
        passes = [training.forward_backward([datum(n)], "cross_entropy") for n in range(1, 7)]
        steps = [training.optim_step(tinker.AdamParams(learning_rate=0.5)) for _ in passes]
        sampler = client.create_sampling_client(base_model=MODEL).result()
        params = tinker.SamplingParams(max_tokens=2)
        prompt = tinker.ModelInput.from_ints([7, 8])
        samples = [sampler.sample(prompt, num_samples=1, sampling_params=params) for _ in range(6)]
        results = [future.result() for future in (*passes, *steps, *samples)]
        client.close("success").result()
        return results

    async def train_late(told):
        """Only the creation, until something was refused."""
        seen = set()
        while not any(map(is_busy, told)):
            if not seen and rig.bus.queued(OPS):
                await answer_one(rig, seen)
            await asyncio.sleep(0.02)
        await train(rig)

    with capture_logs() as told:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(train_late(told)), group.create_task(draw(rig))]
            results = await asyncio.to_thread(loop)
            for task in tasks:
                task.cancel()

    assert len(results) == 18
    assert [r.metrics["loss:sum"] for r in results[:6]] == [1.0] * 6
    assert any(map(is_busy, told))


async def answer_one(rig, seen):
    op = await rig.bus.take(OPS, seen)
    await rig.bus.finish_op(op, await op_result(rig, op))


async def test_the_client_exchanges_its_key_and_works_with_the_token(login, rig):
    def ask():
        # By an address of its own: connections are kept, and a later test may get the same port.
        rest = tinker.RestClient(base_url=rig.url.replace("127.0.0.1", "localhost"))
        client = login()
        client.create_sampling_client(base_model=MODEL).result()
        answers = rest.whoami().result(), rest.list_sessions().result()
        client.close("success").result()
        return answers

    with capture_logs() as told:
        who, listed = await asyncio.to_thread(ask)

    assert owner_of_key("tml-alice") in str(who)
    assert len(listed.sessions) == 1
    assert not [entry for entry in told if entry.get("kind") in {"Unauthorized", "InvalidToken"}]
