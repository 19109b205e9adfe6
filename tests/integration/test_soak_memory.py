"""The soak sees a process that grows, and is not deceived by the blocks of the broker."""

from __future__ import annotations

import nats
import pytest
from tests.fault.cluster import StrictBroker
from tests.soak import memory
from tests.soak.heap import INDEX_BYTES, Profiled, index_bytes

MIB = memory.MIB
MINUTE = 60


def life(label, sample, seconds=10 * MINUTE):
    """One that was looked at each second; ``sample(at)`` is its size and what must not grow."""
    made = memory.Life(label, 1)
    made.samples = [(at, *sample(at)) for at in range(seconds)]
    return made.judged(MINUTE)


def test_a_service_that_grows_is_noticed_and_one_that_swings_is_not():
    grows = life("trainer", lambda at: 2 * [(100 + at / 50) * MIB])
    swings = life("trainer", lambda at: 2 * [(100 + at % 3) * MIB])
    starts = life("trainer", lambda at: 2 * [(100 if at < MINUTE else 200) * MIB])

    broker = life(memory.BROKER, lambda at: (100 * MIB, 10 * MIB))
    assert len(memory.broken([grows, broker])) == 1
    assert memory.broken([swings, starts, broker]) == []


def test_a_broker_may_swing_with_its_blocks_but_not_keep_more_and_more():
    swings = life(memory.BROKER, lambda at: ((60 + at % 200) * MIB, 10 * MIB))
    leaks = life(memory.BROKER, lambda at: (100 * MIB, (10 + at / 50) * MIB))

    assert memory.broken([swings]) == []
    (said,) = memory.broken([leaks])
    assert said.startswith("broker (1) grew by ")


def test_a_broker_that_nobody_could_judge_is_no_success():
    (said,) = memory.broken([life(memory.BROKER, lambda at: (MIB, MIB), seconds=2 * MINUTE)])

    assert "long enough" in said


def test_what_ends_the_watch_fails_the_soak():
    def processes():
        raise ValueError("half a profile")

    with (
        pytest.raises(ValueError, match="half a profile"),
        memory.Watch(processes, broker=None, profiled=None) as watch,
    ):
        watch._thread.join()


@pytest.fixture
def profiled(tmp_path):
    told = Profiled()
    broker = StrictBroker(tmp_path / "store", tmp_path / "run")
    broker.limits = told.limits
    broker.start()
    yield told, broker
    broker.stop()


async def test_blocks_that_are_written_are_told_from_what_is_kept(profiled):
    told, broker = profiled
    before = told.heap()
    client = await nats.connect(broker.url)
    stream = client.jetstream()
    await stream.add_stream(name="S", subjects=["s.*"])
    for number in range(40):
        await stream.publish(f"s.{number}", bytes(100_000))
    after = told.heap()
    await client.close()

    assert after.buffers >= 4 * MIB
    assert after.live - after.buffers < before.live - before.buffers + 2 * MIB
    assert index_bytes(broker) == 40 * INDEX_BYTES


def test_a_broker_that_does_not_answer_is_not_judged(profiled):
    told, broker = profiled
    broker.stop()

    assert told.heap() is None
    assert index_bytes(broker) is None
