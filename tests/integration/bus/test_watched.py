"""What a bus tells of itself: how much lies on its queues, and what goes wrong."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from tests.integration.bus.test_queue import MODEL, put, take

from tinsmith import ids
from tinsmith.bus.backlog import Depth
from tinsmith.errors import BrokerUnavailable
from tinsmith.messages import table
from tinsmith.messages.sampling import Sample, SamplingParams
from tinsmith.metrics import names as metrics
from tinsmith.tracing import HEADER, spans

pytestmark = pytest.mark.integration

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
POOL = {
    "pool": "p",
    "share": "0",
    "sampler": ids.token(f"{MODEL.partition(':')[0]}:sample:0"),
    "seq": "1",
}


def value(metric, **labels):
    found = (s for family in metric.collect() for s in family.samples)
    return sum(
        s.value for s in found if s.labels == labels and not s.name.endswith(("_bucket", "_sum"))
    )


class Carrying:
    """In place of spans: everything belongs to one trace."""

    def carried(self):
        return {HEADER: TRACE}


@pytest.fixture
def traced(monkeypatch):
    monkeypatch.setattr(spans._Tracing, "spans", Carrying())


async def test_an_empty_queue_has_no_oldest_message(bus):
    assert await bus.depth(table.OPS) == Depth(0, 0, 0.0)


async def test_what_lies_on_a_queue_is_counted_by_the_brokers_clock(bus):
    for seq in (1, 2):
        await put(bus, seq)

    depth = await bus.depth(table.OPS)

    assert depth.messages == 2
    assert depth.size > 0
    assert depth.oldest_s >= 0


async def test_without_a_broker_no_depth_is_known(bus, broker, monkeypatch):
    monkeypatch.setattr("tinsmith.bus.backlog.PATIENCE_S", 0.2)
    broker.pause()

    with pytest.raises(BrokerUnavailable, match="TS_OPS"):
        await bus.depth(table.OPS)

    broker.resume()


async def test_what_comes_again_and_what_is_published_is_counted(bus):
    again = value(metrics.BUS_REDELIVERED, stream="TS_OPS")
    published = value(metrics.BUS_PUBLISH_SECONDS, kind="op")
    await put(bus, 1)
    (first,) = await take(bus, 1)
    await first.give_back()
    (second,) = await take(bus, 1)

    assert second.attempts == 2
    assert value(metrics.BUS_REDELIVERED, stream="TS_OPS") == again + 1
    assert value(metrics.BUS_PUBLISH_SECONDS, kind="op") == published + 1


async def test_work_carries_the_trace_in_which_it_was_put(bus, traced):
    await put(bus, 1)
    (delivery,) = await take(bus, 1)

    assert delivery.traceparent == TRACE


async def test_outside_of_a_trace_there_is_none(bus):
    await put(bus, 1)
    (delivery,) = await take(bus, 1)

    assert delivery.traceparent == ""


async def test_a_sample_that_was_held_keeps_its_trace(bus, traced):
    sample = Sample(
        request_id="r",
        sampler_id="s",
        seq=1,
        base_model="m",
        prompt=b"\0\0\0\0",
        num_samples=1,
        params=SamplingParams(),
    )
    await bus.enqueue(table.HELD, sample, owner="o", **POOL)
    spans._Tracing.spans = None
    anything = dict.fromkeys(POOL, "*")

    await bus.move_first(table.HELD, table.SAMPLES, owner="o", **anything)

    work = bus.work(table.SAMPLES, "pool-p", window=4, ack_wait_s=30.0, **anything)
    async with aclosing(work.deliveries()) as deliveries:
        delivery = await anext(deliveries)

    assert delivery.traceparent == TRACE
