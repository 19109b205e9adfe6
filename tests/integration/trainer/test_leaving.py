"""A trainer that is told to stop: what it has begun is written, and another goes on at once.

Leases are longer than anything here waits: whoever had to wait for one would fail.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.trainer.test_ownership import (  # noqa: F401 - base is a fixture
    STEP,
    Client,
    base,
    train,
    trainer,
    weights,
)

from tinsmith_trainer.executor import Executor

LEASE = {"placement_timeout_s": 120}
PATIENCE_S = 90


class Gate:
    """Holds up one op wherever it is carried out, until it is opened."""

    def __init__(self, monkeypatch, seq):
        self.begun, self.opened = asyncio.Event(), asyncio.Event()
        self.repeated = []
        execute = Executor.execute

        async def held(executor, op, *rest):
            self.repeated.append(op.seq)
            if op.seq == seq:
                self.begun.set()
                await self.opened.wait()
            return await execute(executor, op, *rest)

        monkeypatch.setattr(Executor, "execute", held)

    async def reached(self):
        async with asyncio.timeout(PATIENCE_S):
            await self.begun.wait()


async def leave(running):
    await running.service.leave()
    async with asyncio.timeout(PATIENCE_S):
        await running


async def seqs(client):
    return [record.seq for record in await client.records()]


@pytest.fixture
def on(broker, blobs, base):  # noqa: F811 - a fixture
    return broker, blobs, base


@pytest.fixture
def gate(monkeypatch):
    return lambda seq: Gate(monkeypatch, seq)


async def test_the_next_owner_repeats_only_the_passes_since_the_last_step(on, bus, gate):
    moved, stayed = Client(bus), Client(bus)
    async with trainer(*on, "trainer-a", **LEASE) as running:
        await moved.create()
        await train(moved, 1, 9)  # the last one is half of a step
        await leave(running)
    saved = await bus.log.newest_state(moved.model)
    executed = gate(None).repeated
    async with trainer(*on, "trainer-b", **LEASE) as running:
        await train(moved, 10, 10)
        assert executed == [9, 10]
        await stayed.create()
        await train(stayed, 1, 10)
        assert (weights(running, moved) == weights(running, stayed)).all()

    assert saved.seq == 8


async def test_an_op_that_was_begun_is_finished_and_the_next_one_is_left(on, bus, gate):
    client, held = Client(bus), gate(3)
    async with trainer(*on, "trainer-a", **LEASE) as running:
        await client.create()
        await train(client, 1, 2)
        await client.send(3, STEP)
        await client.send(4, STEP)
        await held.reached()
        await running.service.leave()
        held.opened.set()
        async with asyncio.timeout(PATIENCE_S):
            await running
        left = await seqs(client)
    async with trainer(*on, "trainer-b", **LEASE):
        await client.result(4)

    assert left == [0, 1, 2, 3]
    assert await seqs(client) == [0, 1, 2, 3, 4]


async def test_one_that_has_no_time_to_finish_gives_its_models_up_as_they_are(on, bus, gate):
    client, held = Client(bus), gate(3)
    async with trainer(*on, "trainer-a", **LEASE) as running:
        await client.create()
        await train(client, 1, 2)
        await client.send(3, STEP)
        await held.reached()
        await running.service.leave()
    left = await seqs(client)
    held.opened.set()
    async with trainer(*on, "trainer-b", **LEASE):
        await client.result(3)

    assert left == [0, 1, 2]
    assert await seqs(client) == [0, 1, 2, 3]


async def test_one_that_was_still_rebuilding_a_model_gives_it_up_at_once(on, bus, gate):
    client = Client(bus)
    async with trainer(*on, "trainer-a", **LEASE):
        await client.create()
        await train(client, 1, 2)
    held = gate(1)
    async with trainer(*on, "trainer-b", **LEASE) as running:
        await held.reached()
        await leave(running)
    held.opened.set()
    async with trainer(*on, "trainer-c", **LEASE):
        await train(client, 3, 4)

    assert await seqs(client) == [0, 1, 2, 3, 4]


async def test_what_owners_must_repeat_does_not_grow_from_one_to_the_next(on, bus):
    """None of them makes as many steps as a saved state takes, but together they do."""
    client, rare = Client(bus), {"snapshot_steps": 3} | LEASE
    async with trainer(*on, "trainer-a", **rare):
        await client.create()
        await train(client, 1, 4)
    none = await bus.log.newest_state(client.model)
    async with trainer(*on, "trainer-b", **rare):
        await train(client, 5, 6)
        async with asyncio.timeout(PATIENCE_S):
            while (saved := await bus.log.newest_state(client.model)) is None:
                await asyncio.sleep(0.01)

    assert none is None
    assert saved.seq == 6
