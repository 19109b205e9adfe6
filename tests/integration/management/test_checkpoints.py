"""Checkpoints after they were saved, through the client's own methods."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.integration.management.conftest import until
from tests.integration.steps import new_model, probe, step

from tinsmith.messages.checkpoints import ChangeCheckpoint
from tinsmith.messages.table import CHANGE_CHECKPOINT

pytestmark = pytest.mark.slow

SEEDS = itertools.count(100)


@pytest.fixture
def model(alice):
    trained = new_model(alice[0], seed=next(SEEDS))  # equal runs would have equal bytes
    step(trained)
    return trained


@pytest.fixture
def path(model):
    return model.save_state("one").result().path


def blobs(server):
    folder = server.folder / "data" / "blobs"
    return {p.name for p in folder.glob("??/*")}


def parts_of(on_bus, path):
    from tinsmith import ids
    from tinsmith.messages.table import CHECKPOINTS

    async def read(bus):
        entry = await bus.table(CHECKPOINTS).get(ids.checkpoint_key(ids.parse_path(path)))
        return {ref.blake3[2:] for ref in entry.parts.values()}

    return on_bus(read)


def expire(on_bus, path):
    """As if its time to live were over; clients cannot ask for less than an hour."""
    change = ChangeCheckpoint(path=path, sets_ttl=True, ttl_s=0)
    on_bus(lambda bus: bus.call(CHANGE_CHECKPOINT, change))


def paths(rest, model):
    return [c.tinker_path for c in rest.list_checkpoints(model.model_id).result().checkpoints]


def test_a_deleted_checkpoint_is_gone_and_so_are_its_bytes(managed, alice, model, path, on_bus):
    parts = parts_of(on_bus, path)
    assert parts <= blobs(managed)

    alice[1].delete_checkpoint_from_tinker_path(path).result()

    assert paths(alice[1], model) == []
    # adapter_config.json is the same in every checkpoint of one shape, and may be needed elsewhere.
    until(lambda: len(parts & blobs(managed)) <= 1)


def test_bytes_that_a_copy_has_too_outlive_their_source(managed, alice, model, path, on_bus):
    rest = alice[1]
    copied = rest.copy_weights(path, "archive").result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    until(lambda: not on_bus(_discarded))

    restored = alice[0].create_training_client_from_state(copied).result()

    np.testing.assert_array_equal(probe(restored), probe(model))


def test_bytes_that_a_log_has_loaded_outlive_their_checkpoint(managed, alice, path, on_bus):
    """A trainer that takes the model over loads them again."""
    parts = parts_of(on_bus, path)
    restored = alice[0].create_training_client_from_state_with_optimizer(path).result()
    before = probe(restored)
    alice[1].delete_checkpoint_from_tinker_path(path).result()
    until(lambda: not on_bus(_discarded))

    assert parts <= blobs(managed)
    managed.kill("trainer")
    np.testing.assert_array_equal(probe(restored), before)


def test_an_expired_checkpoint_says_so_and_its_bytes_are_freed(
    managed, alice, model, path, on_bus, tinker
):
    parts = parts_of(on_bus, path)
    expire(on_bus, path)

    with pytest.raises(tinker.APIStatusError, match="expired on 20") as refused:
        alice[1].get_weights_info_by_tinker_path(path).result()
    until(lambda: len(parts & blobs(managed)) <= 1)

    assert refused.value.status_code == 410
    assert paths(alice[1], model) == []
    assert model.save_state("one").result().path == path  # the name is free again


def test_a_time_to_live_is_set_and_removed(alice, model, path):
    rest, told = alice[1], []
    for ttl_s in (3600, 86400, None):
        rest.set_checkpoint_ttl_from_tinker_path(path, ttl_s).result()
        told.append(rest.list_checkpoints(model.model_id).result().checkpoints[0].expires_at)

    assert told[0] < told[1]
    assert told[2] is None


def test_a_published_checkpoint_is_loaded_by_somebody_else(alice, bob, model, path, tinker):
    with pytest.raises(tinker.NotFoundError):
        bob[1].get_weights_info_by_tinker_path(path).result()
    alice[1].publish_checkpoint_from_tinker_path(path).result()

    theirs = bob[0].create_training_client_from_state(path).result()

    np.testing.assert_array_equal(probe(theirs), probe(model))
    alice[1].unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        bob[1].get_weights_info_by_tinker_path(path).result()


def test_an_owner_s_key_is_a_token_for_what_is_not_published(alice, bob, model, path):
    theirs = bob[0].create_training_client_from_state(path, weights_access_token="tml-alice")
    copied = bob[1].copy_weights(path, "mine", weights_access_token="tml-alice").result()

    np.testing.assert_array_equal(probe(theirs.result()), probe(model))
    listed = bob[1].list_training_runs(project_id="mine").result().training_runs
    assert copied.split("/")[2] in [run.training_run_id for run in listed]


def test_nobody_else_changes_or_deletes_a_checkpoint(alice, bob, model, path, tinker):
    alice[1].publish_checkpoint_from_tinker_path(path).result()
    for attempt in (
        lambda: bob[1].delete_checkpoint_from_tinker_path(path),
        lambda: bob[1].unpublish_checkpoint_from_tinker_path(path),
        lambda: bob[1].set_checkpoint_ttl_from_tinker_path(path, None),
    ):
        with pytest.raises(tinker.NotFoundError):
            attempt().result()

    assert paths(alice[1], model) == [path]


def test_what_was_done_to_checkpoints_is_in_the_audit_log(managed, alice, path, tinker):
    alice[1].publish_checkpoint_from_tinker_path(path).result()
    admin = tinker.AdminClient(base_url=managed.base_url, api_key=managed.api_key)

    entries = admin.get_audit_log(event_type="checkpoints").result().entries

    assert (entries[-1].event, entries[-1].tinker_path) == ("checkpoint_published", path)


async def _discarded(bus):
    """What is still to be looked at, read anew."""
    from tinsmith.bus.views import View
    from tinsmith.messages.table import DISCARDED

    view = View(bus.table(DISCARDED), lambda _: "")
    watch = await view.watch()
    await watch.close()
    return list(view)
