"""What `tinsmith status` may see where each service has a user of its own."""

from __future__ import annotations

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus
from tinsmith.messages import table
from tinsmith.messages.services import ServiceAlive
from tinsmith.overview import gather, watching


def connecting(broker, folder, user):
    blobs = BlobStore.open("", default=folder / "blobs")
    return Bus.connect(broker.bus_config(user), name=user, blobs=blobs)


async def test_the_operator_sees_everything(broker, tmp_path):
    alive = ServiceAlive(service="trainer", instance="trainer-a", version="1")
    async with (
        connecting(broker, tmp_path, "operator") as bus,
        connecting(broker, tmp_path, "trainer") as trainer,
        watching(bus) as watch,
    ):
        await trainer.emit(table.SERVICE_ALIVE, alive)
        await trainer.table(table.SESSIONS).get("none")  # what was sent before it has arrived
        await bus.books.broker()
        found = await watch.look()

    assert found.unknown == ()
    assert [service.instance for service in found.services] == ["trainer-a"]
    assert {stream.name for stream in found.broker.streams} == set(table.STREAMS)


async def test_who_may_not_ask_is_told_so_and_does_not_hang(broker, tmp_path):
    async with connecting(broker, tmp_path, "sampler") as bus:
        found = await gather(bus, 0.0)

    assert found.broker is None
    assert any("may this user ask" in sentence for sentence in found.unknown)
    assert any("user of the broker who may ask" in problem.remedy for problem in found.problems)
