"""Runs that trainers carried out on a real broker are done again from their logs, bit for bit."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import pytest
from tests.integration.contexts import context_of
from tests.integration.steps import X, Y, new_model, step
from tests.integration.trainer.test_ownership import BASE, STEP, Client, forward_backward, train

from tinsmith import ids
from tinsmith.bus import Bus, Encoded
from tinsmith.cli.replay import Options
from tinsmith.config import BusConfig, Config, ModelConfig
from tinsmith.logbook import open_logbook
from tinsmith.messages import ops, registry, table
from tinsmith.messages.base import encode
from tinsmith_checkpointer.service import Checkpointer
from tinsmith_trainer import base_model, replay_report
from tinsmith_trainer.compute import Compute
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.environment import describe
from tinsmith_trainer.executor import Executor
from tinsmith_trainer.replay import main, replay
from tinsmith_trainer.service import Trainer


@pytest.fixture
def config(broker, blobs, tmp_path, model_folder):
    """Of an installation with the test's broker and blobs."""
    return Config(
        data_dir=tmp_path,
        bus=BusConfig(url=broker.url),
        models=(ModelConfig(name=BASE, path=str(model_folder)),),
        origins={"bus.url": "test"},
    )


@asynccontextmanager
async def service(config, blobs, name):
    async with Bus.connect(config.bus, name=name, blobs=blobs) as bus:
        yield context_of(name, bus, blobs, config)


@asynccontextmanager
async def trainer(config, blobs, name="trainer-a", **options):
    """A trainer in this process that says in its logs what it computes with."""
    options = {"placement_timeout_s": 3, "checkpointer_patience_s": 5, **options}
    settings = TrainerConfig(**options)
    config = Config(models=config.models, bus=config.bus, sections=(settings,))
    async with service(config, blobs, name) as context:
        base = base_model.load(config.models[0].path, name=BASE)
        environment = describe(base, microbatch_tokens=64)
        engine, compute = TrainingEngine(base, microbatch_tokens=64), Compute()
        executor = Executor(engine, compute, context.bus, blobs, base_model=BASE, patience_s=5)
        running = asyncio.create_task(Trainer(context, executor, compute, environment).run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            compute.close()


@asynccontextmanager
async def checkpointer(config, blobs):
    async with service(config, blobs, "checkpointer-a") as context:
        answering = Checkpointer(context)
        await context.bus.serve(table.COMMIT_CHECKPOINT, answering.commit)
        await context.bus.serve(table.GET_CHECKPOINT, answering.get)
        yield


async def register(client):
    run = registry.Run(
        model_id=client.model, session_id=client.session, owner="o", created_ns=1,
        base_model=BASE, lora=ops.LoraShape(),
    )  # fmt: skip
    await client.bus.table(table.RUNS).put(ids.token(client.model), run)


async def replayed(client, config, **options):
    """Alone, with nothing but the log, the blobs and the base model."""
    async with open_logbook(None, config) as logbook:
        return await replay(client.model, logbook, Options(target="", **options), config)


async def test_each_of_two_interleaved_tenants_replays_alone(config, blobs, bus):
    one, other = Client(bus), Client(bus)
    async with trainer(config, blobs):
        await one.create()
        await other.create(ops.LoraShape(rank=8, seed=5))
        await asyncio.gather(train(one, 1, 12), train(other, 1, 10))

    for client, last in ((one, 12), (other, 10)):
        summary = await replayed(client, config)
        assert summary.verdict == "equal"
        assert (summary.ops_compared, summary.states_compared) == (last + 1, last // 2 + 1)
        assert summary.warnings == ()


async def test_a_run_replays_over_a_take_over_and_from_saved_states(config, blobs, bus):
    client = Client(bus)
    async with trainer(config, blobs, "trainer-a", snapshot_steps=2):
        await client.create()
        await train(client, 1, 9)
    async with trainer(config, blobs, "trainer-b", snapshot_steps=2):
        await train(client, 10, 16)
        async with asyncio.timeout(30):
            while (await bus.log.newest_state(client.model)).seq < 10:
                await asyncio.sleep(0.01)

    whole, part = await replayed(client, config), await replayed(client, config, first=15)
    pieces = await replayed(client, config, share=1.0)
    assert {whole.verdict, part.verdict, pieces.verdict} == {"equal"}
    assert part.ops_compared == 2
    assert part.ops_led_up < 12
    assert pieces.segments > 1
    assert pieces.ops_compared == 17


async def test_saves_loads_and_failures_are_no_divergence(config, blobs, bus):
    client = Client(bus)
    await register(client)
    bad = ops.ForwardBackward(data=(), loss_fn="cross_entropy")
    path = f"tinker://{client.model}/weights/x"
    async with checkpointer(config, blobs), trainer(config, blobs):
        await client.create()
        await train(client, 1, 4)
        bodies = [ops.SaveWeights(name="x"), forward_backward(), STEP, bad]
        bodies += [
            ops.LoadWeights(path=path, with_optimizer=True),
            ops.LoadWeights(path=path + "y"),
        ]
        for seq, body in enumerate([*bodies, forward_backward(), STEP], start=5):
            await client.send(seq, body)
        await client.result(12)

    summary = await replayed(client, config)
    assert summary.verdict == "equal"
    assert summary.ops_compared == 12
    assert summary.ops_not_repeated == {"failures outside of the engine": 1}


async def test_a_client_that_left_a_gap_replays(config, blobs, bus):
    """What waited for the missing op failed without having been carried out."""
    client = Client(bus)
    async with trainer(config, blobs):
        await client.create()
        await train(client, 1, 2)
        await client.send(4, STEP)
        await client.session_is("expired")
        await client.result(4)

    summary = await replayed(client, config)
    assert summary.verdict == "equal"
    assert (summary.ops_compared, sum(summary.ops_not_repeated.values())) == (3, 1)


@pytest.fixture
def repeated(monkeypatch):
    """Grows by one with every op that a replay is through with."""
    ops_done = []

    @contextmanager
    def progress(total):
        yield lambda: ops_done.append(total)

    monkeypatch.setattr(replay_report, "progress", progress)
    return ops_done


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_live_run_is_followed_until_a_signal(config, blobs, bus, repeated):
    client = Client(bus)
    async with trainer(config, blobs):
        await client.create()
        await train(client, 1, 2)
        following = asyncio.create_task(replayed(client, config, is_following=True))
        await until(lambda: len(repeated) == 3)
        await train(client, 3, 6)
        await until(lambda: len(repeated) == 7)
        signal.raise_signal(signal.SIGINT)
        summary = await following

    assert summary.verdict == "equal"
    assert (summary.ops_compared, summary.last_op) == (7, 6)


async def forge(client, seq, result):
    """Another owner writes what was never computed."""
    forger = await client.bus.log.take(client.model, "forger")
    op = Encoded(encode(ops.Op(model_id=client.model, seq=seq, body=STEP)))
    await forger.commit(seq, op, result, state_blake3="0" * 64)


async def test_following_ends_at_the_first_difference(config, blobs, bus, repeated):
    client = Client(bus)
    async with trainer(config, blobs):
        await client.create()
        done = await train(client, 1, 2)
        following = asyncio.create_task(replayed(client, config, is_following=True))
        await until(lambda: len(repeated) == 3)
        await forge(client, 3, done)
        summary = await asyncio.wait_for(following, 60)

    assert summary.verdict == "diverged"
    assert (summary.divergence.seq, summary.divergence.op) == (3, "optim_step")


async def test_a_difference_is_exit_code_1(config, blobs, bus, capsys):
    client = Client(bus)
    async with trainer(config, blobs):
        await client.create()
        await forge(client, 1, await client.result(0))

    options = Options(target=client.model[:12], is_json=True)
    code = await asyncio.to_thread(main, options, config)

    assert code == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["divergence"]["seq"] == 1


def tinsmith_replay(server, *arguments):
    config, data = server.folder / "tinsmith.toml", server.folder / "data"
    command = [sys.executable, "-m", "tinsmith", "replay", *arguments]
    command += ["--config", str(config), "--data-dir", str(data)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_replays_a_run_of_the_unmodified_client(server, client):
    model, neighbour = (new_model(client, seed) for seed in (1, 2))
    for data in ([X], [Y], [X, Y]):
        step(model, data)
        step(neighbour, data)
    path = model.save_state("kept").result().path
    loaded = client.create_training_client_from_state_with_optimizer(path).result()
    step(loaded)

    for run, states in ((model, 4), (loaded, 2)):
        ran = tinsmith_replay(server, run.model_id, "--json")
        assert ran.returncode == 0, ran.stderr
        told = json.loads(ran.stdout)
        assert told["verdict"] == "equal"
        assert told["run"] == run.model_id
        assert told["states_compared"] == states


def test_the_command_says_why_it_cannot_replay(server, client):
    new_model(client)
    ran = tinsmith_replay(server, "nosuchrun")

    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "no run begins with 'nosuchrun'" in ran.stderr
