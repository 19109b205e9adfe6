"""Weights saved for other tools: downloaded with the client's own command, encrypted, ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

import pyrage
import pytest
from blake3 import blake3
from tests.integration.management.conftest import until
from tests.integration.management.test_checkpoints import SEEDS, blobs, expire, parts_of
from tests.integration.steps import new_model, step

from tinsmith import ids
from tinsmith.messages.table import SESSIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def model(alice):
    trained = new_model(alice[0], seed=next(SEEDS))
    step(trained)
    return trained


@pytest.fixture
def identity():
    return pyrage.x25519.Identity.generate()


def command(server, *args):
    """The client's own command line."""
    environ = os.environ | {
        "TINKER_BASE_URL": server.base_url,
        "TINKER_API_KEY": server.api_key,
        "TINKER_TELEMETRY": "0",
        "PYTHONWARNINGS": "ignore",
    }
    run = [sys.executable, "-m", "tinker.cli", *map(str, args)]
    return subprocess.run(
        run, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


def fetch(rest, path):
    """The files of external weights, as anybody with the links gets them."""
    urls = rest.get_external_weights_urls(path).result().urls
    found = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=60) as answer:
            found[name] = answer.read()
            assert answer.headers["Content-Length"] == str(len(found[name]))
    return found


def test_the_client_s_command_downloads_a_training_checkpoint(
    managed, alice, model, tmp_path, on_bus
):
    path = model.save_state("mark").result().path
    before = set(alice[1].list_sessions().result().sessions)

    done = command(managed, "--format", "json", "checkpoint", "download", path, "-o", tmp_path)

    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    (folder,) = tmp_path.iterdir()
    found = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert told["file_size_bytes"] == sum(map(len, found.values()))
    assert found == fetch(alice[1], model.save_weights_external("same").result().path)
    (session,) = set(alice[1].list_sessions().result().sessions) - before
    runs = alice[1].get_session(session).result().training_run_ids
    assert alice[1].list_checkpoints(runs[0]).result().checkpoints == []
    ended = on_bus(lambda bus: bus.table(SESSIONS).get(ids.token(session)))
    assert (ended.status, ended.finish_reason) == ("finished", "success")


def test_an_encrypted_file_is_read_with_its_key_alone(managed, alice, model, identity, on_bus):
    recipients = [str(identity.to_public())]
    saved = model.save_weights_external("x", age_encryption_recipients=recipients).result()
    sealed = fetch(alice[1], saved.path)
    plain = {name: pyrage.decrypt(data, [identity]) for name, data in sealed.items()}

    assert set(sealed) == {f"{name}.age" for name in FILES}
    for data in sealed.values():
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(data, [pyrage.x25519.Identity.generate()])
    open_path = model.save_weights_external("y").result().path
    assert {name.removesuffix(".age"): data for name, data in plain.items()} == fetch(
        alice[1], open_path
    )


def test_what_was_encrypted_is_not_kept(managed, alice, model, identity, on_bus):
    recipients = [str(identity.to_public())]
    path = model.save_weights_external("x", age_encryption_recipients=recipients).result().path
    sealed = fetch(alice[1], path)["adapter_model.safetensors.age"]
    plain = blake3(pyrage.decrypt(sealed, [identity])).hexdigest()[2:]

    until(lambda: plain not in blobs(managed))

    assert fetch(alice[1], path)["adapter_model.safetensors.age"] == sealed
    parts = parts_of(on_bus, path)
    alice[1].delete_checkpoint_from_tinker_path(path).result()
    until(lambda: not parts & blobs(managed))


def test_it_is_listed_published_copied_and_ends_as_others(alice, bob, model, on_bus):
    path = model.save_weights_external("x", ttl_seconds=3600).result().path
    assert path == f"tinker://{model.model_id}/external_weights/x"
    (listed,) = alice[1].list_checkpoints(model.model_id).result().checkpoints
    assert (listed.checkpoint_type, listed.checkpoint_id) == ("external", "external_weights/x")
    assert listed.expires_at is not None
    files = fetch(alice[1], path)
    assert listed.size_bytes == sum(map(len, files.values()))

    with pytest.raises(Exception, match="there is no checkpoint"):
        bob[1].get_external_weights_urls(path).result()
    alice[1].publish_checkpoint_from_tinker_path(path).result()
    assert fetch(bob[1], path) == files

    urls = alice[1].get_external_weights_urls(path).result().urls
    expire(on_bus, path)
    with pytest.raises(urllib.error.HTTPError, match="410"):
        urllib.request.urlopen(urls["adapter_config.json"], timeout=60)


def test_it_is_not_loaded(alice, model):
    path = model.save_weights_external("x").result().path

    service = alice[0]
    for load in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
        service.create_sampling_client,
    ):
        with pytest.raises(Exception, match="is of kind 'external_weights', but"):
            load(path).result()


def test_a_replay_comes_to_the_same_files(managed, model, identity):
    recipients = [str(identity.to_public())]
    model.save_weights_external("x").result()
    model.save_weights_external("y", age_encryption_recipients=recipients).result()

    run = [sys.executable, "-m", "tinsmith", "replay", model.model_id, "--json"]
    run += ["--config", managed.folder / "tinsmith.toml", "--data-dir", managed.folder / "data"]
    done = subprocess.run(
        list(map(str, run)), capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr
    assert not json.loads(done.stdout).get("not_repeated")
