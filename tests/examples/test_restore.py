"""A backup as docs/operations.md says: a copy of the data folder of a server that is stopped."""

from __future__ import annotations

import contextlib
import shutil

import numpy as np
import pytest
from tests.integration.conftest import CLIENT_WARNINGS, connect, start, stop
from tests.integration.steps import new_model, probe, step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(600),
    *(pytest.mark.filterwarnings(entry) for entry in CLIENT_WARNINGS),
]

connected = contextlib.contextmanager(connect)


@contextlib.contextmanager
def running(folder, model_folder):
    folder.mkdir(exist_ok=True)
    server = start(folder, model_folder=model_folder)
    try:
        with connected(server) as client:
            yield server, client
    finally:
        stop(server)


def test_a_copied_folder_is_the_whole_installation(tmp_path, model_folder):
    """Keys, checkpoints and logs; the original is gone when the copy is started."""
    first, second = tmp_path / "first", tmp_path / "second"
    with running(first, model_folder) as (before, client):
        model = new_model(client)
        step(model)
        saved = model.save_state("kept").result().path
        kept = probe(model)
        step(model)
    shutil.copytree(first / "data", second / "data")
    shutil.rmtree(first / "data")

    with running(second, model_folder) as (after, client):
        resumed = client.create_training_client_from_state_with_optimizer(saved).result()
        assert after.api_key == before.api_key
        np.testing.assert_array_equal(probe(resumed), kept)
        step(resumed)
