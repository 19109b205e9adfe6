"""A whole installation on an S3 server: what is saved, read, downloaded, ended and freed there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import time
import urllib.request
import warnings
from io import BytesIO

import numpy as np
import obstore
import pytest
from tests.integration.conftest import connect, start, stop
from tests.integration.steps import new_model, probe, step
from tests.integration.storage import s3_server

from tinsmith.blobs import BlobStore
from tinsmith.config import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 90.0
EXTRA = """
[blobs]
url = "s3://{bucket}/{prefix}"
endpoint = "{endpoint}"
region = "us-east-1"
[checkpointer]
upkeep_s = 0.3
grace_s = 2
collect_hours = 0
"""


def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)
    return found


class Installation:
    """The server, the bucket, and commands on them."""

    def __init__(self, server, bucket, link):
        self.server = server
        self.link = link
        self._bucket = bucket

    def keys(self):
        """Of blobs, without marks."""
        paths = [meta["path"] for page in obstore.list(self._bucket) for meta in page]
        return {path for path in paths if path[2] == "/"}

    def archive(self, path):
        """Of a checkpoint, through the gateway and its link."""
        run_id, kind, name = path.removeprefix("tinker://").split("/")
        url = f"{self.server.base_url}/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
        request = urllib.request.Request(
            f"{url}/archive", headers={"X-API-Key": self.server.api_key}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read()

    def command(self, *arguments):
        options = ["--config", self.server.folder / "tinsmith.toml"]
        options += ["--data-dir", self.server.folder / "data"]
        return subprocess.run(
            [sys.executable, "-m", "tinsmith", *map(str, (*arguments, *options))],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def collected(self, *options):
        done = self.command("gc", "--json", *options)
        assert done.returncode == 0, done.stderr
        assert s3_server.SECRET not in done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def link(s3_endpoint):
    made = s3_server.Link(s3_endpoint)
    yield made
    made.close()


@pytest.fixture(scope="module")
def installation(tmp_path_factory, model_folder, s3_endpoint, link):
    """Its credentials come from the environment, and it reaches the server by a link."""
    folder = tmp_path_factory.mktemp("on-s3")
    given = {
        "TINSMITH_BLOBS__ACCESS_KEY_ID": s3_server.KEY_ID,
        "TINSMITH_BLOBS__SECRET_ACCESS_KEY": s3_server.SECRET,
    }
    os.environ.update(given)
    extra = EXTRA.format(bucket=s3_server.BUCKET, prefix=folder.name, endpoint=link.endpoint)
    server = start(folder, model_folder=model_folder, extra=extra)
    try:
        yield Installation(server, s3_server.client(s3_endpoint, folder.name), link)
    finally:
        stop(server)
        for name in given:
            del os.environ[name]
    assert s3_server.SECRET not in (folder / "server.log").read_text()


@pytest.fixture
def client(installation):
    yield from connect(installation.server)


@pytest.fixture
def rest(installation):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tinker
    server = installation.server
    return tinker.RestClient(base_url=server.base_url, api_key=server.api_key)


@pytest.fixture
def model(client):
    trained = new_model(client, seed=7)
    step(trained)
    return trained


def test_checkpoints_live_and_end_in_the_bucket(installation, client, rest, model, tmp_path):
    path = model.save_state("one").result().path
    before = probe(model)
    there = installation.keys()
    assert there

    step(model)
    installation.link.fail("slow down", "drop", "cut")  # while it is read
    model.load_state(path).result()
    np.testing.assert_array_equal(probe(model), before)

    archive = BytesIO(installation.archive(path))
    with tarfile.open(fileobj=archive) as opened:
        names = opened.getnames()
    assert "adapter_model.safetensors" in names

    exported = installation.command("export", path, tmp_path / "adapter")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size

    other = new_model(client, seed=8)
    step(other)
    gone = other.save_state("two").result().path
    added = installation.keys() - there
    assert len(added) >= 2
    installation.collected()
    assert installation.keys() >= there | added  # all of it is needed
    rest.delete_checkpoint_from_tinker_path(gone).result()
    # The configuration of an adapter is the same in both.
    until(lambda: len(installation.keys() & added) <= 1, "deleted bytes to be freed")
    assert there <= installation.keys()
    again = other.save_state("two").result().path
    other.load_state(again).result()


def test_a_store_that_is_away_fails_saves_in_words_and_harms_nothing(installation, model):
    import tinker

    installation.link.fail(*["slow down"] * 100_000)
    failing = model.save_state("late")
    losses = [step(model) for _ in range(2)]
    with pytest.raises(
        tinker.TinkerError, match=r"blob store s3://.* cannot be written"
    ) as refused:
        failing.result(timeout=300)
    installation.link.heal()

    assert np.isfinite(losses).all()
    assert s3_server.SECRET not in str(refused.value)
    model.load_state(model.save_state("late").result().path).result()


def test_what_a_save_that_died_left_is_found_and_freed(installation):
    environ = os.environ | {"TINSMITH_DATA_DIR": str(installation.server.folder / "data")}
    config = load(installation.server.folder / "tinsmith.toml", environ)
    store = BlobStore.configured(config.blobs, default=None)
    ref = asyncio.run(store.put(b"left by who died"))

    def is_orphan():
        found = {one["name"]: one for one in installation.collected("--dry-run")["classes"]}
        return found["orphans"]["blobs"]

    until(is_orphan, "the grace to pass")
    assert asyncio.run(store.has(ref))
    until(lambda: installation.collected()["freed_bytes"] >= ref.size, "it to be freed")
    assert not asyncio.run(store.has(ref))
