"""What an op waits for, and what it does not: real engine and threads, no bus."""

from __future__ import annotations

import asyncio
import threading

import pytest
import structlog
import torch
from tests.unit.trainer.examples import cross_entropy, random_datum

from tinsmith.messages import ops
from tinsmith.messages.base import Failed
from tinsmith_trainer.compute import Compute
from tinsmith_trainer.executor import Executor
from tinsmith_trainer.optim import NORM_BLOCK
from tinsmith_trainer.parts import Past
from tinsmith_trainer.repeating import why_not_repeated

FORWARD_BACKWARD = cross_entropy(random_datum(20, seed=1))
STEP = ops.OptimStep(learning_rate=1e-3)


@pytest.fixture
async def compute():
    compute = Compute()
    serving = asyncio.create_task(compute.serve())
    yield compute
    serving.cancel()
    compute.close()


@pytest.fixture
def executor(engine, compute, blobs):
    return Executor(engine, compute, None, blobs, base_model="tiny", patience_s=0)


@pytest.fixture
async def do(executor):
    """Carries out one op after another, of any model."""
    seqs: dict[str, int] = {}

    async def do(model_id, body):
        seq = seqs[model_id] = seqs.get(model_id, -1) + 1
        op = ops.Op(model_id=model_id, seq=seq, body=body)
        outcome = await executor.execute(op, structlog.get_logger())
        assert not isinstance(await outcome.result, Failed)
        return outcome

    for model_id in ("m", "n"):
        await do(model_id, ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=4)))
    return do


async def test_a_reader_holds_up_the_next_change_and_nothing_else(do, compute):
    """However long a copy for a save takes: passes go on, and so do the neighbours' steps."""
    release = threading.Event()
    await do("m", FORWARD_BACKWARD)
    reading = compute.readings.start("m", lambda: release.wait(60))

    await do("m", FORWARD_BACKWARD)
    await do("n", FORWARD_BACKWARD)
    await do("n", STEP)
    step = asyncio.create_task(do("m", STEP))
    await do("n", FORWARD_BACKWARD)
    was_waiting = not step.done()
    release.set()
    await step

    assert was_waiting
    assert await reading


async def test_a_copy_is_of_the_moment_it_was_asked_for(do, engine, executor):
    await do("m", FORWARD_BACKWARD)
    before = engine.state("m").weights.clone()
    copying = executor.copy("m")
    await do("m", STEP)

    assert torch.equal((await copying).weights, before)
    assert not torch.equal(engine.state("m").weights, before)


async def test_a_step_without_a_gradient_keeps_the_digest_and_waits_for_nobody(do, compute):
    await do("m", FORWARD_BACKWARD)
    digest = await (await do("m", STEP)).state_blake3
    release = threading.Event()
    compute.readings.start("m", lambda: release.wait(60))

    idle = await do("m", STEP)

    assert await idle.state_blake3 == digest
    release.set()


async def test_every_change_has_a_digest_of_its_own(do):
    digests = []
    for _ in range(3):
        await do("m", FORWARD_BACKWARD)
        digests.append(await (await do("m", STEP)).state_blake3)

    assert len(set(digests)) == 3


async def test_a_refused_step_leaves_the_digest_of_the_state_it_left(do, executor):
    await do("m", FORWARD_BACKWARD)
    digest = await (await do("m", STEP)).state_blake3
    await do("m", FORWARD_BACKWARD)
    bad = ops.Op(model_id="m", seq=9, body=ops.OptimStep(learning_rate=-1))
    outcome = await executor.execute(bad, structlog.get_logger())

    assert isinstance(await outcome.result, Failed)
    assert await executor.state_blake3("m") == digest


async def test_a_step_that_is_repeated_is_made_as_it_was(do, executor):
    """By a trainer that would have made it otherwise: this one has the whole state."""
    past = ops.OptimStepDone(norm_block=NORM_BLOCK)
    await do("m", FORWARD_BACKWARD)
    op = ops.Op(model_id="m", seq=9, body=STEP)
    outcome = await executor.execute(op, structlog.get_logger(), Past.of(past))

    assert (await outcome.result).norm_block == NORM_BLOCK


def test_an_optimizer_that_a_trainer_was_not_set_up_for_is_not_asked_for_again():
    body = ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=4), optimizer="dimuon")
    refused = Failed(category="user", message="", code="NotSupported")

    assert why_not_repeated(body, refused)
    assert why_not_repeated(FORWARD_BACKWARD, refused) is None
