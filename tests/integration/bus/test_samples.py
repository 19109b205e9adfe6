"""The log of samples on a real broker: one record for each request, and the oldest first out."""

from __future__ import annotations

import pytest
from nats.js.errors import APIError
from tests.unit.sampler.examples import prompt, sample

from tinsmith import ids
from tinsmith.bus import Bus
from tinsmith.bus.claims import INLINE_BYTES
from tinsmith.bus.samples import SampleAddress
from tinsmith.config import BusConfig
from tinsmith.errors import BrokerUnavailable, Forgotten
from tinsmith.logbook.entry import LogDamaged
from tinsmith.logbook.samples import BrokerSamples
from tinsmith.messages.base import encode
from tinsmith.messages.sampling import SampleDone, Sequence
from tinsmith.messages.table import SAMPLE_LOG_STREAM
from tinsmith.sealing import PLAIN, ClosedSeal
from tinsmith_sampler.recording import UNLOGGED, Recorder, record

pytestmark = pytest.mark.integration

SESSION = ids.new_session_id()
SAMPLER = ids.sampler_id(SESSION, 0)
OTHER = ids.sampler_id(SESSION, 1)


def request(seq=0):
    return sample(request_id=f"{SAMPLER}:{seq}", sampler_id=SAMPLER, seq=seq, prompt=prompt(4))


def done(tokens=b"\1\0\0\0", digest="d"):
    sequence = Sequence(tokens=tokens, logprobs=bytes(len(tokens)), stop_reason="stop")
    return SampleDone(request_id="r", sequences=(sequence,), request_blake3=digest)


def address(seq=0, sampler=SAMPLER):
    return SampleAddress(SESSION, sampler, seq)


async def stored(bus):
    return [data async for _, data in bus.samples.stored(SESSION)]


@pytest.fixture
def recorder(bus):
    """Writes in full, unsealed."""

    async def seal_of(run):
        return PLAIN

    return Recorder(bus.samples, seal_of, "full", {})


async def test_the_first_record_of_a_request_stays(bus):
    assert await bus.samples.append(address(), b"first")
    assert not await bus.samples.append(address(), b"second")

    assert await stored(bus) == [b"first"]


async def test_records_are_read_in_order_and_by_run(bus):
    for seq in (3, 1, 2):
        await bus.samples.append(address(seq), b"%d" % seq)
    await bus.samples.append(address(1, OTHER), b"other sampler")
    await bus.samples.append(SampleAddress(ids.new_session_id(), SAMPLER, 9), b"other run")

    assert await stored(bus) == [b"3", b"1", b"2", b"other sampler"]
    assert await bus.samples.count(SESSION) == 4


async def test_a_large_record_travels_through_the_blob_store(bus):
    await bus.samples.append(address(), bytes(2 * INLINE_BYTES))

    assert await stored(bus) == [bytes(2 * INLINE_BYTES)]


async def test_a_record_cannot_be_deleted(bus):
    await bus.samples.append(address(), b"first")

    with pytest.raises(APIError, match="message delete not permitted"):
        await bus._connection[1].delete_msg(SAMPLE_LOG_STREAM, 1)


async def test_a_record_cannot_be_replaced_without_that_showing(bus, blobs):
    """Somebody who writes to the stream past us puts a second record beside the first."""
    forged = encode(record(request(), done(b"\2\0\0\0"), PLAIN, has_content=True))
    await bus.samples.append(address(), encode(record(request(), done(), PLAIN, has_content=True)))
    (subject,) = [subject async for subject, _ in bus.samples.stored(SESSION)]
    await bus._connection[1].publish(subject, forged)

    with pytest.raises(LogDamaged, match=f"{SAMPLER}:0: subject: logged before"):
        async for _ in BrokerSamples(bus.samples, blobs, None).stored(SESSION):
            pass


async def test_beyond_its_size_the_oldest_go_first(broker, blobs):
    config = BusConfig(url=broker.url, sample_log_bytes=1 << 20)
    async with Bus.connect(config, name="test", blobs=blobs) as bus:
        await bus.ensure()
        for seq in range(5):
            await bus.samples.append(address(seq), bytes([seq]) * (400 << 10))

        assert [data[0] for data in await stored(bus)] == [3, 4]


async def test_limits_of_a_stream_that_exists_can_be_changed(bus, broker, blobs):
    config = BusConfig(url=broker.url, sample_log_bytes=1 << 20, sample_log_days=2)
    async with Bus.connect(config, name="test", blobs=blobs) as other:
        await other.ensure()
    info = await bus._connection[1].stream_info(SAMPLE_LOG_STREAM)

    assert (info.config.max_bytes, info.config.max_age) == (1 << 20, 2 * 86400)


async def test_a_request_that_comes_again_is_logged_once(bus, recorder):
    for _ in range(3):
        await recorder.write(request(), "d", done())

    assert await bus.samples.count(SESSION) == 1


async def test_an_answer_to_another_request_of_the_same_id_is_not_logged(bus, recorder):
    await recorder.write(request(), "another", done())

    assert await bus.samples.count(SESSION) == 0


async def test_a_log_that_takes_nothing_is_counted_and_no_error(bus, recorder):
    js = bus._connection[1]
    config = (await js.stream_info(SAMPLE_LOG_STREAM)).config
    await js.update_stream(config.evolve(max_msg_size=10))
    for seq in range(2):
        await recorder.write(request(seq), "d", done())
    await js.update_stream(config)
    await recorder.write(request(2), "d", done())

    assert recorder._load == {UNLOGGED: 2}
    assert await bus.samples.count(SESSION) == 1


async def test_a_forgotten_run_is_not_logged_and_no_error(bus):
    async def seal_of(run):
        return ClosedSeal(Forgotten("forgotten"))

    recorder = Recorder(bus.samples, seal_of, "digest", {})
    await recorder.write(request(), "d", done())

    assert recorder._load == {UNLOGGED: 1}


async def test_while_the_broker_is_away_the_request_is_kept(broker, bus, recorder, monkeypatch):
    monkeypatch.setattr("tinsmith.bus.wire.PUBLISH_TRY_S", 0.2)
    monkeypatch.setattr("tinsmith.bus.wire.PUBLISH_PATIENCE_S", 0.5)
    broker.kill()

    with pytest.raises(BrokerUnavailable):
        await recorder.write(request(), "d", done())
