"""What a checkpoint says of itself: what it was made of, and the place in a log it stands for."""

from __future__ import annotations

import pytest
from tests.integration.steps import RANK, new_model, probe, step

from tinsmith import ids
from tinsmith.messages import ops
from tinsmith.messages.table import CHECKPOINTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 901


@pytest.fixture
def model(alice):
    trained = new_model(alice[0], seed=SEED)
    step(trained)
    step(trained)
    return trained


@pytest.fixture
def manifest(on_bus):
    """By path."""

    def manifest(path):
        key = ids.checkpoint_key(ids.parse_path(path))
        return on_bus(lambda bus: bus.table(CHECKPOINTS).get(key))

    return manifest


@pytest.fixture
def log(on_bus):
    """The owner's environment, and the records by op."""

    def log(model_id):
        async def read(bus):
            owner = await bus.log.owner(model_id)
            entries = [entry async for entry in bus.log.entries(model_id)]
            return owner.environment, {e.seq: e for e in entries if isinstance(e, ops.Record)}

        return on_bus(read)

    return log


def state_at(records, op_seq):
    """The digest of the state in which the op found the model."""
    return next(
        records[seq].state_blake3
        for seq in range(op_seq - 1, -1, -1)
        if seq in records and records[seq].state_blake3
    )


def test_it_carries_what_it_was_made_of_and_the_state_that_the_log_has(
    model, manifest, log, model_folder
):
    first = model.save_state("one").result().path
    step(model)
    paths = [
        first,
        model.save_weights_for_sampler("two").result().path,
        model.save_weights_external("three").result().path,
    ]
    environment, records = log(model.model_id)

    for path, steps in zip(paths, (2, 3, 3), strict=True):
        found = manifest(path)
        assert found.base_model == environment["base_model"] == "tiny/llama"
        assert found.base_blake3 == environment["base_blake3"]
        assert found.tokenizer_id == str(model_folder)
        assert (found.lora.rank, found.lora.alpha, found.lora.seed) == (RANK, 32.0, SEED)
        assert (found.format, found.optimizer, found.step) == (1, "adamw", steps)
        assert found.op_seq in records
        assert found.state_blake3 == state_at(records, found.op_seq)
    assert manifest(paths[0]).state_blake3 != manifest(paths[1]).state_blake3


def test_a_run_that_goes_on_from_it_begins_in_that_state(alice, model, manifest, log):
    path = model.save_state("one").result().path
    resumed = alice[0].create_training_client_from_state_with_optimizer(path).result()
    fresh = alice[0].create_training_client_from_state(path).result()
    for one in (resumed, fresh):
        probe(one)

    states = [log(one.model_id)[1][0].state_blake3 for one in (resumed, fresh)]

    assert states[0] == manifest(path).state_blake3
    assert states[1] != states[0]


def test_a_copy_stands_for_a_place_in_the_log_of_its_source(alice, model, manifest):
    source = manifest(model.save_state("one").result().path)
    copy = manifest(alice[1].copy_weights(source.path, "archive").result())
    copy_of_copy = manifest(alice[1].copy_weights(copy.path, "archive").result())

    for found in (copy, copy_of_copy):
        assert found.log_model_id == source.model_id != found.model_id
        assert (found.op_seq, found.state_blake3) == (source.op_seq, source.state_blake3)
        assert (found.base_blake3, found.tokenizer_id) == (source.base_blake3, source.tokenizer_id)
        assert found.parts == source.parts
    assert source.log_model_id == ""
