"""Sealed logs on the move between installations: with their key, without, and forgotten."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tinsmith import ids
from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus, Encoded
from tinsmith.config import BusConfig, Config
from tinsmith.errors import Forgotten, InvalidRequest, SealBroken
from tinsmith.logbook import op_of, transfer
from tinsmith.logbook.broker import BrokerLogbook
from tinsmith.logbook.file import FileLogbook
from tinsmith.logbook.verify import Verification
from tinsmith.messages import ops
from tinsmith.messages.base import encode
from tinsmith.paths import DataDir
from tinsmith.sealing import Seals

RUN = ids.model_id("a" * 26, 0)
OP = ops.Op(model_id=RUN, seq=0, body=ops.Refused(reason=ops.Failed(category="user", message="x")))
FAILED = ops.Failed(category="user", message="x")


class Place(NamedTuple):
    """An installation."""

    bus: Bus
    blobs: BlobStore
    seals: Seals

    @property
    def book(self):
        return BrokerLogbook(self.bus, self.blobs, self.seals)


@pytest.fixture
async def home(bus, blobs, tmp_path):
    """With one sealed run."""
    seals = Seals(bus, Config(data_dir=tmp_path / "data"))
    seal = await seals.make(RUN)
    writer = await bus.log.take(RUN, "trainer-a", seal=seal)
    await writer.commit(0, Encoded(encode(OP)), FAILED)
    return Place(bus, blobs, seals)


@pytest.fixture
async def abroad(tmp_path):
    """Without any, and with another master key."""
    data = DataDir(tmp_path / "other")
    data.prepare()
    broker = Broker(data.nats, data.run)
    broker.start()
    blobs = BlobStore.open("", default=data.blobs)
    async with Bus.connect(BusConfig(url=broker.url), name="other", blobs=blobs) as bus:
        await bus.ensure()
        yield Place(bus, blobs, Seals(bus, Config(data_dir=data.root)))
    broker.kill()


async def carry(home, abroad, path, *, resume=False, **options):
    await transfer.export(home.book, RUN, path, overwrite=True, on_entry=lambda: None, **options)
    importing = transfer.Import(abroad.bus.log, abroad.blobs, abroad.seals, on_entry=lambda: None)
    with FileLogbook.open(path) as file:
        await importing.run(file, RUN, resume=resume)


async def read(place):
    return await op_of(place.book, await place.bus.log.get(RUN, 0))


async def why_closed(place):
    verification = Verification(place.book, RUN)
    async for _ in verification.entries():
        pass
    return verification.why_closed


async def test_a_log_that_came_with_its_key_is_read_and_forgotten_there(home, abroad, tmp_path):
    await carry(home, abroad, tmp_path / "a.tslog")
    assert await read(abroad) == OP
    assert await why_closed(abroad) is None

    await abroad.seals.forget(RUN, "asked to")

    assert await read(home) == OP
    with pytest.raises(Forgotten):
        await read(abroad)


async def test_a_log_that_came_without_its_key_is_verified_only(home, abroad, tmp_path):
    await carry(home, abroad, tmp_path / "a.tslog", has_key=False)

    assert "key is not here" in str(await why_closed(abroad))
    with pytest.raises(SealBroken):
        await read(abroad)


async def test_a_forgotten_log_is_forgotten_where_it_arrives(home, abroad, tmp_path):
    gone = await home.seals.forget(RUN, "asked to")
    await carry(home, abroad, tmp_path / "a.tslog")

    assert await abroad.seals.forgotten(RUN) == gone
    assert isinstance(await why_closed(abroad), Forgotten)


async def test_an_import_does_not_bring_back_what_was_forgotten(home, abroad, tmp_path):
    await carry(home, abroad, tmp_path / "a.tslog")
    await abroad.seals.forget(RUN, "asked to")

    with pytest.raises(InvalidRequest, match="was forgotten here on"):
        await carry(home, abroad, tmp_path / "a.tslog", resume=True)

    assert not await abroad.seals.has_key(RUN)
