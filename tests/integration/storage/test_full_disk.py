"""The disk of the blobs is full: that save fails, and deleting makes room for the next one."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest
from tests.integration.conftest import connect, start, stop
from tests.integration.steps import new_model, step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE_S = 60.0
ROOM = 150_000  # bytes: less than a training checkpoint of the tiny model
EXTRA = """
[blobs]
url = "file://{folder}"
[trainer]
snapshot_steps = 1000
[checkpointer]
upkeep_s = 0.2
grace_s = 0.5
"""


def fill(disk):
    """Leave ``ROOM``."""
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 16))
        except OSError:
            ballast.truncate(ballast.tell() - ROOM)


def test_a_save_that_finds_no_room_fails_in_words_and_deleting_helps(
    small_disk, tmp_path, model_folder
):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tinker
    blobs = small_disk / "blobs"
    folder = tmp_path / "server"
    folder.mkdir()
    server = start(folder, model_folder=model_folder, extra=EXTRA.format(folder=blobs))
    clients = connect(server)
    try:
        model = new_model(next(clients))
        rest = tinker.RestClient(base_url=server.base_url, api_key=server.api_key)
        first = model.save_state("first").result().path
        fill(small_disk)
        step(model)
        with pytest.raises(tinker.TinkerError, match=r"blob store .* is full .*; free space"):
            model.save_state("second").result()
        assert np.isfinite(step(model))

        rest.delete_checkpoint_from_tinker_path(first).result()
        saved = saved_at_last(model, tinker)
        model.load_state(saved).result()
        listed = rest.list_checkpoints(model.model_id).result().checkpoints
        assert [one.tinker_path for one in listed] == [saved]
        assert not list(blobs.rglob("*#*")), "nothing is half-written"
    finally:
        clients.close()
        stop(server)


def saved_at_last(model, tinker):
    """The path of a save once the grace has passed."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return model.save_state("second").result().path
        except tinker.TinkerError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
