"""A trainer's lineages: versions in the order of saves, taken over, fenced, and freed."""

from __future__ import annotations

import pytest
from tests.unit.trainer.test_whole import loaded, train

from tinsmith import ids
from tinsmith.errors import BlobMissing, Fenced, NoRoom, StorageFull, VersionUnmet
from tinsmith.messages.ops import WHOLE
from tinsmith.messages.weights import LineageOpened, PublishedVersion
from tinsmith.testing import tiny_model
from tinsmith_sampler.following import Follower
from tinsmith_sampler.model import TorchOptions
from tinsmith_sampler.standing import Standing
from tinsmith_trainer import canonical, publishing
from tinsmith_trainer.publishing import Publishing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


PINGED = {
    "weights_version",
    "weights_bytes",
    "weights_density",
    "weights_encode_ms",
    "weights_publish_ms",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def snapshots(folder):
    """A model after none, one and two steps."""
    engine = loaded(folder)
    engine.create("m", WHOLE)
    found = []
    for _ in range(3):
        found.append(engine.snapshot("m"))
        train(engine)
    return found


@pytest.fixture
def model_id():
    return f"{ids.new_session_id()}:train:0"


def publishing_of(bus, name="trainer-a", figures=None):
    return Publishing(bus, name, {} if figures is None else figures, patience_s=1.0)


async def test_saves_are_versions_and_a_save_that_is_done_again_is_the_same(
    bus, snapshots, model_id
):
    figures = {}
    one = publishing_of(bus, figures=figures)
    assert not await one.has_lineage(model_id)
    done = [await one.publish(model_id, snapshots[n]) for n in (0, 1, 1)]
    assert await one.has_lineage(model_id)

    roots = [canonical.root(snapshots[n]) for n in (0, 1)]
    first, second = (
        PublishedVersion(lineage_id=model_id, version=n, root=root)
        for n, root in enumerate(roots, 1)
    )
    assert done == [first, second, second]
    assert figures.keys() == PINGED
    assert figures["weights_version"] == 2


async def test_who_takes_a_model_over_fences_the_other_and_goes_on(bus, snapshots, model_id):
    old, new = publishing_of(bus, "trainer-a"), publishing_of(bus, "trainer-b")
    await old.publish(model_id, snapshots[0])
    published = await old.publish(model_id, snapshots[1])
    await new.take_over(model_id, snapshots[1])
    with pytest.raises(Fenced):
        await old.publish(model_id, snapshots[2])

    assert await new.publish(model_id, snapshots[1]) == published
    assert (await new.publish(model_id, snapshots[2])).version == published.version + 1
    entries = [one.message async for one in bus.lineages.entries(model_id)]
    opened = [one for one in entries if isinstance(one, LineageOpened)]
    assert [(one.epoch, one.publisher_id) for one in opened] == [(1, "trainer-a"), (2, "trainer-b")]


@pytest.mark.parametrize("error", [NoRoom, StorageFull])
async def test_what_has_no_room_is_told_as_unpublished(
    bus, snapshots, model_id, monkeypatch, error
):
    def full(*_):
        raise error("full")

    one = publishing_of(bus)
    with monkeypatch.context() as patched:
        patched.setattr(publishing, "check_room", full)
        assert await one.publish(model_id, snapshots[0]) is None
    assert (await one.publish(model_id, snapshots[1])).version == 1


async def test_a_lineage_that_has_ended_is_freed_and_a_late_sampler_is_told(
    bus, snapshots, folder, model_id
):
    one = publishing_of(bus)
    version = await one.publish(model_id, snapshots[0])
    stored = (await bus.lineages.newest(model_id, "full")).message
    assert await bus.lineages.chunks.get(model_id, stored.manifest[0])
    await one.end(model_id)
    with pytest.raises(BlobMissing):
        await bus.lineages.chunks.get(model_id, stored.manifest[0])

    options = TorchOptions(model_path=str(folder), kv_tokens=4096)
    follower = Follower(bus, options, model_id, replica="late", figures={}, standing=Standing({}))
    await follower.start()
    try:
        with pytest.raises(VersionUnmet, match="serves none"):
            async with follower.hold(version):
                pass
    finally:
        await follower.close()
