"""A model that is trained whole, on a real SGLang server: followed, proven, repaired."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
from tests.sglang import running
from tests.sglang.engines import EXACT, Renewed
from tests.sglang.wholes import Trained, engine, following
from tests.unit.sampler.examples import prompt, row, scoring

from tinsmith.errors import VersionUnmet
from tinsmith.weights.digest import digest
from tinsmith.weights.held import Write
from tinsmith.weights.state import WrongBits
from tinsmith_sampler.sglang.server import OwnServer

PATIENCE_S = 600.0
UPDATES = 20
QUERY, KEY, HEAD = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.embed_tokens.weight",
)


@pytest.fixture
async def trained(bus, model):
    return Trained(bus, model)


@pytest.fixture
async def reached(whole_server):
    return Renewed(whole_server)


@pytest.fixture
async def follower(bus, model, trained, reached):
    async with following(bus, trained.lineage_id, engine(model, reached), model) as follower:
        yield follower


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def check_draws(engine, trained, **asked):
    asked = row(prompt=prompt(9), **asked)
    drawn = await engine.generate(asked)
    expected = trained.logprobs(asked.prompt, drawn.tokens)
    np.testing.assert_allclose(drawn.logprobs, expected, atol=EXACT)


async def check_memory(follower, trained):
    """All of the server's memory, tensor by tensor, against the trainer's."""
    memory = follower._receiver._memory
    for name, bits in trained.bits().items():
        assert await asyncio.to_thread(memory.digest, name) == digest(name, bits), name


async def test_every_version_is_in_the_memory_and_the_last_one_draws_as_torch_does(
    follower, trained
):
    version = await trained.publish()
    for _ in range(UPDATES):
        async with follower.hold(version) as engine:
            assert engine.root == version.root
            await check_memory(follower, trained)
        version = await trained.stepped()
    async with follower.hold(version) as engine:
        assert engine.root == version.root
        await check_draws(engine, trained, max_tokens=40)
        scored = await engine.score(scoring(prompt(30)))
        expected = trained.logprobs(prompt(30)[:1], prompt(30)[1:])
        np.testing.assert_allclose(scored.logprobs[1:], expected, atol=EXACT)
    status = follower._receiver.status()
    assert (status.version, status.mismatches) == (UPDATES + 1, 0)


async def test_the_servers_own_checksums_come_back_with_the_bits(follower, trained):
    client = follower.engine._there.client
    first = trained.bits()
    async with follower.hold(await trained.publish()):
        before = await client.checksums()
    async with follower.hold(await trained.stepped()):
        assert await client.checksums() != before
    trained.restore(first)
    async with follower.hold(await trained.publish()):
        assert await client.checksums() == before


async def test_a_bit_that_flips_is_found_and_repaired(follower, trained):
    receiver = follower._receiver
    version = await trained.publish()
    async with follower.hold(version):
        pass
    await swapped(follower, [flipped(trained, KEY)])  # no version says so
    receiver._unchecked = list(receiver._memory.names())
    receiver._news.set()
    await until(lambda: receiver.status().mismatches)

    async with follower.hold(version) as engine:
        await check_memory(follower, trained)
        await check_draws(engine, trained)


def flipped(trained, name):
    at = np.array([17])
    return Write(name, trained.bits()[name][at] ^ np.uint32(1 << 20), at)


async def swapped(follower, writes):
    """Written as the receiver does it, and without the receiver."""
    memory = follower._receiver._memory
    wholes = {one.name: digest(one.name, one.values) for one in writes if one.indices is None}
    await asyncio.to_thread(memory.stage, writes, wholes)
    async with follower.engine.still():
        await asyncio.to_thread(memory.swap)


@pytest.mark.parametrize(
    ("name", "values", "at", "said"),
    [
        (QUERY, np.zeros(1, np.uint16), [0], "int32 here, torch.int16"),
        (QUERY, np.zeros(1, np.uint32), [1 << 40], "the change 1099511627776 to"),
        (QUERY, np.zeros(1, np.uint32), [-1], "the change -1 to"),
        (QUERY, np.zeros(5, np.uint32), None, "5 in the change"),
        ("model.nothing", np.zeros(1, np.uint32), [0], "there is no model.nothing"),
    ],
)
async def test_a_change_that_does_not_fit_writes_nothing(follower, trained, name, values, at, said):
    version = await trained.publish()
    async with follower.hold(version):
        pass
    wrong = Write(name, values, None if at is None else np.array(at))
    with pytest.raises(WrongBits, match=said):
        await swapped(follower, [flipped(trained, KEY), wrong])

    async with follower.hold(version) as engine:
        await check_memory(follower, trained)
        await check_draws(engine, trained)


async def test_requests_around_a_swap_have_one_version_each(follower, trained):
    first = await trained.publish()
    async with asyncio.TaskGroup() as group, follower.hold(first) as engine:
        early = [group.create_task(engine.generate(one)) for one in rows("early")]
        before = trained.bits()
        second = await trained.stepped(share=0.5)
        await until(lambda: follower._is_pausing)  # it is staged, and waits
        late = [group.create_task(drawn_under(follower, second, one)) for one in rows("late")]
        await asyncio.wait(early)
        assert not any(one.done() for one in late)
    for one, task in zip(rows("late"), late, strict=True):
        check(trained, one, task.result())
    trained.restore(before)
    for one, task in zip(rows("early"), early, strict=True):
        check(trained, one, task.result())


def rows(request_id):
    return [
        row(prompt=prompt(20 + i), request_id=f"{request_id}-{i}", max_tokens=60) for i in (0, 1, 2)
    ]


async def drawn_under(follower, version, asked):
    async with follower.hold(version) as engine:
        return await engine.generate(asked)


def check(trained, asked, drawn):
    expected = trained.logprobs(asked.prompt, drawn.tokens)
    np.testing.assert_allclose(drawn.logprobs, expected, atol=EXACT)


async def test_a_request_in_a_server_that_is_lost_is_not_answered_until_another_is_written(
    follower, trained, reached
):
    version = await trained.publish()
    async with follower.hold(version):
        pass
    starts, memory = follower.engine._starts, follower._receiver._memory
    starts.newest = await starts._inspect(reached.client)  # a start has these weights
    written = memory._count
    with pytest.raises(VersionUnmet, match="has to be written anew"):
        await drawn_while_it_is_lost(follower, version, reached)
    async with follower.hold(version) as engine:
        assert memory._count > written
        await check_memory(follower, trained)
        await check_draws(engine, trained)


async def drawn_while_it_is_lost(follower, version, reached):
    async with follower.hold(version) as engine:
        drawing = asyncio.create_task(engine.generate(row(max_tokens=1000)))
        await until(lambda: engine.load().running)
        await reached.renew()  # another start of it, for all that the engine knows
        await drawing


@pytest.mark.timeout(2400)  # a server starts twice
async def test_a_crash_in_the_middle_of_an_update_ends_with_the_right_bits(
    bus, model, trained, tmp_path, monkeypatch
):
    server = OwnServer(running.options(model, is_whole=True), tmp_path / "sglang.log")
    async with following(bus, trained.lineage_id, engine(model, server), model) as follower:
        async with follower.hold(await trained.publish()) as whole:
            await check_draws(whole, trained)
        client = follower.engine._there.client
        monkeypatch.setattr(client, "update_tensors", dying(server, client.update_tensors))
        version = await trained.stepped()
        async with follower.hold(version) as whole:
            assert follower.engine._there.client is not client
            await check_memory(follower, trained)
            await check_draws(whole, trained)
        assert follower._receiver.status().mismatches >= 1


def dying(server, update):
    async def updated(*args, **named):
        await update(*args, **named)
        os.killpg(server.pid, signal.SIGKILL)  # it has written, and neither proven nor ended

    return updated
