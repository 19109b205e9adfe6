"""Keys of runs in the registry of a real broker: made, shared, wrapped, destroyed."""

from __future__ import annotations

import asyncio
import base64
import stat
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tinsmith import ids
from tinsmith.bus import Bus, Encoded
from tinsmith.config import BusConfig, Config
from tinsmith.errors import Forgotten, SealBroken, StartupError
from tinsmith.messages import ops, table
from tinsmith.messages.base import encode
from tinsmith.paths import DataDir
from tinsmith.sealing import PLAIN, KeySeal, Seals
from tinsmith.sealing.config import SealingConfig
from tinsmith.sealing.master import KeySource

SECRET = b"what nobody may read afterwards, "
DONE = ops.SaveWeightsDone(path=(SECRET * 4).decode())


def new_run():
    return ids.model_id(ids.new_session_id(), 0)


def config_of(folder, **settings):
    return Config(data_dir=folder, sections=(SealingConfig(**settings),))


@pytest.fixture
def data(tmp_path):
    return DataDir(tmp_path / "data")


@pytest.fixture
def config(data):
    return config_of(data.root)


@asynccontextmanager
async def service(broker, blobs, config):
    """Another process's connection and seals."""
    async with (
        Bus.connect(BusConfig(url=broker.url), name="other", blobs=blobs) as bus,
        Seals.serving(bus, config) as seals,
    ):
        yield bus, seals


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def everything_in(*folders):
    """All that lies in the files of ``folders``."""
    return b"".join(
        path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()
    )


async def test_every_service_has_the_same_seal_of_a_run(bus, broker, blobs, config):
    run = new_run()
    async with Seals.serving(bus, config) as gateway, service(broker, blobs, config) as (_, other):
        made = await gateway.make(run)
        found = await other.of(run)

    assert made.seal(SECRET) == found.seal(SECRET)
    assert made.scheme == "v1"


async def test_a_run_that_is_made_twice_keeps_its_key(bus, config):
    run = new_run()
    first = (await Seals(bus, config).make(run)).key

    assert (await Seals(bus, config).make(run)).key == first


async def test_services_that_start_at_once_agree_on_one_master_key(bus, config, data):
    runs = [new_run() for _ in range(4)]
    await asyncio.gather(*(Seals(bus, config).make(run) for run in runs))

    assert all([isinstance(await Seals(bus, config).of(run), KeySeal) for run in runs])
    assert stat.S_IMODE(data.master_key.stat().st_mode) == 0o600
    assert [path.name for path in data.root.iterdir() if "master" in path.name] == ["master.key"]


async def test_a_service_that_starts_while_another_makes_the_key_takes_that(
    bus, config, monkeypatch
):
    """The other one is through with it between this one's looks at the file and the registry."""
    run, loop, find = new_run(), asyncio.get_running_loop(), KeySource.find
    others = [Seals(bus, config)]

    def found_too_early(source):
        found = find(source)
        if others:
            asyncio.run_coroutine_threadsafe(others.pop().make(run), loop).result(60)
        return found

    monkeypatch.setattr(KeySource, "find", found_too_early)
    seals = Seals(bus, config)
    made = await seals.make(run)

    assert made.key == (await Seals(bus, config).of(run)).key


async def test_the_registry_has_no_key_in_the_clear(bus, config, data):
    seal = await Seals(bus, config).make(new_run())

    assert seal.key not in everything_in(data.nats)


async def test_with_sealing_off_runs_are_plain_and_no_key_is_made(bus, data):
    run = new_run()
    async with Seals.serving(bus, config_of(data.root, enabled=False)) as seals:
        assert await seals.make(run) is PLAIN
        assert await seals.of(run) is PLAIN

    assert not data.master_key.exists()


async def test_what_was_sealed_stays_readable_when_sealing_is_switched_off(bus, config, data):
    run = new_run()
    sealed = (await Seals(bus, config).make(run)).seal(SECRET)

    off = Seals(bus, config_of(data.root, enabled=False))

    assert (await off.of(run)).open(sealed) == SECRET


async def test_a_machine_without_the_master_key_does_not_start_and_makes_none(
    bus, config, tmp_path
):
    await Seals(bus, config).make(new_run())

    with pytest.raises(StartupError, match=r"copy .*master\.key.*master_key_command"):
        async with Seals.serving(bus, config_of(tmp_path / "host2")):
            pass

    assert not DataDir(tmp_path / "host2").master_key.exists()


async def test_a_machine_with_another_master_key_does_not_start(bus, config, tmp_path):
    await Seals(bus, config).make(new_run())
    other = DataDir(tmp_path / "host2")
    other.root.mkdir()
    other.master_key.write_bytes(base64.b64encode(bytes(32)))

    with pytest.raises(StartupError, match="give every service the same key"):
        async with Seals.serving(bus, config_of(other.root)):
            pass


async def test_without_the_master_key_a_run_is_closed_and_says_what_is_missing(
    bus, config, tmp_path
):
    run = new_run()
    await Seals(bus, config).make(run)

    seal = await Seals(bus, config_of(tmp_path / "auditor")).of(run)

    assert isinstance(seal.why_closed, SealBroken)
    assert "not on this machine" in str(seal.why_closed)


async def test_the_master_key_may_come_from_a_command(bus, tmp_path):
    key = base64.b64encode(bytes(range(32))).decode()
    command = f"{sys.executable} -c \"print('{key}')\""
    run = new_run()
    made = await Seals(bus, config_of(tmp_path / "host1", master_key_command=command)).make(run)

    found = await Seals(bus, config_of(tmp_path / "host2", master_key_command=command)).of(run)

    assert found.open(made.seal(SECRET)) == SECRET
    assert not DataDir(tmp_path / "host1").master_key.exists()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("no-such-command-at-all", "cannot be run"),
        (f"{sys.executable} -c 'raise SystemExit(3)'", "exit code 3"),
        (f"{sys.executable} -c 'print(\"c2hvcnQ=\")'", "32 bytes in base64"),
        ("'unbalanced", "cannot be run"),
    ],
)
async def test_a_command_that_gives_no_key_is_a_startup_error(bus, tmp_path, command, problem):
    config = config_of(tmp_path, master_key_command=command)

    with pytest.raises(StartupError, match=problem) as error:
        async with Seals.serving(bus, config):
            pass

    assert "c2hvcnQ=" not in str(error.value).replace(command, "")


async def test_a_forgotten_run_is_closed_in_every_service(bus, broker, blobs, config):
    run = new_run()
    async with Seals.serving(bus, config) as gateway, service(broker, blobs, config) as (_, other):
        await gateway.make(run)
        held = await other.of(run)  # as a trainer holds it
        sealed = held.seal(SECRET)

        await gateway.forget(run, "asked to")
        await until(lambda: held.why_closed is not None)

        with pytest.raises(Forgotten, match="asked to"):
            held.open(sealed)
        with pytest.raises(Forgotten):
            (await other.of(run)).open(sealed)


async def test_the_wrapped_key_is_gone_from_the_brokers_disk(bus, config, data):
    run = new_run()
    seals = Seals(bus, config)
    await seals.make(run)
    wrapped = (await bus.table(table.RUN_KEYS).get(ids.token(run))).wrapped
    assert wrapped in everything_in(data.nats)

    await seals.forget(run, "asked to")

    assert wrapped not in everything_in(data.nats)
    assert not await seals.has_key(run)


async def test_a_forgotten_run_stays_so(bus, config):
    run = new_run()
    seals = Seals(bus, config)
    await seals.make(run)
    first = await seals.forget(run, "asked to")

    assert await seals.forget(run, "again") == first
    assert isinstance((await Seals(bus, config).make(run)).why_closed, Forgotten)
    assert not await seals.has_key(run)


async def test_a_key_that_was_left_by_a_crash_is_erased_the_next_time(bus, config):
    run = new_run()
    seals = Seals(bus, config)
    await seals.make(run)
    gone = await seals.forget(new_run(), "asked to")
    await bus.table(table.FORGOTTEN_RUNS).put(ids.token(run), gone)  # and then it crashed

    await seals.forget(run, "asked to")

    assert not await seals.has_key(run)


async def test_watchers_of_keys_hear_of_the_end(bus, config):
    run, seen = new_run(), {}
    seals = Seals(bus, config)
    await seals.make(run)
    watch = await bus.table(table.RUN_KEYS).watch(seen.__setitem__)
    assert seen[ids.token(run)] is not None

    await seals.forget(run, "asked to")
    await until(lambda: seen[ids.token(run)] is None)
    await watch.close()


@pytest.mark.parametrize("copies", [1, 20_000], ids=["inline", "in a blob"])
async def test_an_op_is_sealed_from_the_gateway_to_the_log(bus, blobs, config, data, copies):
    run = new_run()
    seal = await Seals(bus, config).make(run)
    tokens = {"model": ids.token(run), "seq": "1"}
    op = ops.Op(model_id=run, seq=1, body=ops.SaveWeights(name=(SECRET * copies).decode()))
    await bus.enqueue(table.OPS, op, seal, **tokens)
    await bus.enqueue(table.OPS, op, seal, **tokens)  # sent again
    work = bus.work(table.OPS, "trainer-a", window=8, ack_wait_s=30, seal=seal, **tokens)
    delivery = await anext(aiter(work.deliveries()))
    writer = await bus.log.take(run, "trainer-a", seal=seal)

    await writer.commit(1, Encoded(delivery.payload, delivery.ref, delivery.stored or None), DONE)

    record = await bus.log.get(run, 1)
    assert delivery.message == op == await bus.log.op(record, seal)
    assert await bus.log.result(record, seal) == DONE
    assert record.op_blake3 == seal.digest(encode(op))
    assert record.op == (delivery.stored or None)
    assert record.op_ref == delivery.ref
    assert SECRET not in everything_in(data.nats, Path(blobs.where))


async def test_what_was_logged_before_sealing_is_still_read(bus):
    run = new_run()
    op = encode(ops.Op(model_id=run, seq=1, body=ops.OptimStep()))
    writer = await bus.log.take(run, "trainer-a")
    await writer.commit(1, Encoded(op), DONE)

    record = await bus.log.get(run, 1)

    assert await bus.log.result(record, KeySeal(KeySeal.new_key())) == DONE


async def test_a_log_without_its_key_is_a_clear_error(bus, config):
    run = new_run()
    seal = await Seals(bus, config).make(run)
    op = encode(ops.Op(model_id=run, seq=1, body=ops.OptimStep()))
    writer = await bus.log.take(run, "trainer-a", seal=seal)
    await writer.commit(1, Encoded(op), DONE)

    with pytest.raises(SealBroken, match="key is not here"):
        await bus.log.result(await bus.log.get(run, 1))
