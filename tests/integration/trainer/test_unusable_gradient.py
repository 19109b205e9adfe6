"""A step whose gradient cannot be used: what it leaves behind, now and after a take-over."""

from __future__ import annotations

import torch
from tests.integration.trainer.test_ownership import (  # noqa: F401 - base is a fixture
    STEP,
    Client,
    base,
    forward_backward,
    train,
    trainer,
    weights,
)

from tinsmith.messages import ops
from tinsmith.messages.base import Failed, Tensor

GOOD = forward_backward()
HUGE = Tensor("float32", (12,), torch.full((12,), 1e20).numpy().tobytes())
POISON = ops.ForwardBackward(
    data=(ops.Datum(tokens=GOOD.data[0].tokens, inputs={**GOOD.data[0].inputs, "weights": HUGE}),),
    loss_fn="cross_entropy",
)


async def end(client, first, *bodies):
    """Send them from seq ``first`` on; the result of the last."""
    for seq, body in enumerate(bodies, start=first):
        await client.send(seq, body)
    return await client.result(first + len(bodies) - 1)


async def expected(bus, broker, blobs, base):  # noqa: F811
    """The weights after three good steps and nothing else."""
    client = Client(bus)
    async with trainer(broker, blobs, base) as running:
        await client.create()
        await train(client, 1, 4)
        await end(client, 5, GOOD, STEP)
        return weights(running, client)


async def test_the_step_fails_changes_nothing_and_training_goes_on(broker, bus, blobs, base):  # noqa: F811
    client = Client(bus)
    async with trainer(broker, blobs, base) as running:
        await client.create()
        await train(client, 1, 4)
        failed = await end(client, 5, GOOD, POISON, STEP)
        poisoned = await client.result(6)
        await end(client, 8, GOOD, STEP)
        found = weights(running, client)

    assert isinstance(poisoned, ops.ForwardBackwardDone)
    assert isinstance(failed, Failed)
    assert (failed.category, failed.code) == ("user", "UnusableGradient")
    assert "gradient: its norm is" in failed.message
    assert torch.equal(found, await expected(bus, broker, blobs, base))


async def test_the_next_owner_has_dropped_the_gradient_too(broker, bus, blobs, base):  # noqa: F811
    client = Client(bus)
    async with trainer(broker, blobs, base):
        await client.create()
        await train(client, 1, 4)
        await end(client, 5, POISON, STEP)
    async with trainer(broker, blobs, base, name="trainer-b") as running:
        done = await end(client, 7, GOOD, STEP)
        found = weights(running, client)

    assert done.metrics["optimizer_steps"] == 3
    assert torch.equal(found, await expected(bus, broker, blobs, base))


async def test_the_next_owner_still_has_a_gradient_that_no_step_has_met(broker, bus, blobs, base):  # noqa: F811
    client = Client(bus)
    async with trainer(broker, blobs, base):
        await client.create()
        await train(client, 1, 4)
        await end(client, 5, POISON)
    async with trainer(broker, blobs, base, name="trainer-b"):
        failed = await end(client, 6, STEP)

    assert failed.code == "UnusableGradient"
