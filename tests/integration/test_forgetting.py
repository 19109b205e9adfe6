"""`tinsmith log forget` on a whole server with the real client: nothing of the data is left."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from tests.integration.conftest import connect, start, stop
from tests.integration.steps import datum, new_model, step

# Dozens of commands, each a process of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LENGTH = 48
LARGE = 700  # datums whose request is over the size that travels inline
RECOGNISABLE = [random.Random(7).randrange(5, 250) for _ in range(LENGTH)]


def audit(server, *command):
    """An operator's command on the machine of the server."""
    options = ["--config", server.folder / "tinsmith.toml", "--data-dir", server.folder / "data"]
    arguments = map(str, [sys.executable, "-m", "tinsmith", *command, *options])
    return subprocess.run(
        arguments,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def traces(server):
    """Files below the data folder that hold the recognisable tokens, in any form they travel in."""
    forms = [np.array(RECOGNISABLE, dtype).tobytes() for dtype in ("<i4", "<i8")]
    # A broker that compresses a block may break the run; a third of it is as telling.
    pieces = [form[: len(form) // 3] for form in forms]
    return sorted(
        str(path.relative_to(server.folder))
        for path in (server.folder / "data").rglob("*")
        if path.is_file() and any(piece in path.read_bytes() for piece in pieces)
    )


@dataclass(frozen=True)
class Trained:
    """A run whose session has ended, and the future of one of its requests."""

    run: str
    future: str


def train(server):
    clients = connect(server)
    client = next(clients)
    model = new_model(client)
    secret = datum(RECOGNISABLE)
    step(model, [secret])
    model.forward([secret] * LARGE, "cross_entropy").result()
    step(model, [secret])
    live = audit(server, "log", "forget", model.model_id, "--yes")
    next(clients, None)  # ends the session
    assert (live.returncode, "is live" in live.stderr) == (2, True), live
    return Trained(model.model_id, f"{model.model_id}:2")


@pytest.fixture(scope="module")
def world(tmp_path_factory, model_folder):
    """A server of these tests' own: its folder must have nobody else's data."""
    running = start(tmp_path_factory.mktemp("forgetful"), model_folder=model_folder)
    yield running
    stop(running)


@pytest.fixture(scope="module")
def trained(world):
    return train(world)


def poll(server, trained):
    return server.post("retrieve_future", {"request_id": trained.future})


def test_without_sealing_the_tokens_are_found(tmp_path, model_folder):
    """The same look on a server that seals nothing: it can find what it looks for."""
    server = start(tmp_path, model_folder=model_folder, extra="[sealing]\nenabled = false\n")
    done = train_plainly(server)
    found = traces(server)
    refused = audit(server, "log", "forget", done, "--yes")
    verified = audit(server, "log", "verify", done)
    stop(server)

    assert {path.split(os.sep)[1] for path in found} == {"nats", "blobs"}
    assert (refused.returncode, "is not sealed" in refused.stderr) == (2, True)
    assert (verified.returncode, "not checked" in verified.stdout) == (0, False)
    assert not (tmp_path / "data" / "master.key").exists()


def train_plainly(server):
    clients = connect(server)
    model = new_model(next(clients))
    step(model, [datum(RECOGNISABLE)])
    model.forward([datum(RECOGNISABLE)] * LARGE, "cross_entropy").result()
    next(clients, None)  # ends the session
    return model.model_id


@pytest.fixture(scope="module")
def exports(world, trained):
    """The run in two files, as it was before it was forgotten: with its key and without."""
    files = []
    for name, options in (("open", ()), ("sealed", ("--sealed",))):
        file = world.folder / f"{name}.tslog"
        done = audit(world, "log", "export", trained.run, file, *options)
        assert done.returncode == 0, done
        files.append(file)
    return files


@pytest.fixture(scope="module")
def forgotten(world, trained, exports):
    """The run, forgotten; first by somebody who is not sure."""
    status, answer = poll(world, trained)
    assert (status, "error" in answer) == (200, False)
    assert traces(world) == []
    unsure = audit(world, "log", "forget", trained.run)
    assert (unsure.returncode, "--yes" in unsure.stderr) == (2, True)
    done = audit(world, "log", "forget", trained.run, "--yes")
    assert (done.returncode, "is forgotten, on 20" in done.stdout) == (0, True), done
    return trained


def test_a_forgotten_run_verifies_and_says_when_it_was_forgotten(world, forgotten):
    done = audit(world, "log", "verify", forgotten.run)

    assert done.returncode == 0
    assert f"{forgotten.run}: verified" in done.stdout
    assert "were forgotten on 20" in done.stdout


def test_what_is_left_of_a_forgotten_run_is_shown(world, forgotten):
    done = audit(world, "log", "show", forgotten.run)

    assert (done.returncode, done.stdout.count("contents forgotten")) == (0, 6), done
    assert "forgotten" in audit(world, "log", "ls").stdout


@pytest.mark.parametrize("command", [("replay",), ("log", "diff", None)], ids=["replay", "diff"])
def test_what_needs_the_contents_says_why_it_cannot(world, forgotten, command):
    arguments = (forgotten.run if argument is None else argument for argument in command)
    done = audit(world, *arguments, forgotten.run)

    assert (done.returncode, "were forgotten on 20" in done.stderr) == (2, True), done


def test_an_old_future_of_a_forgotten_run_fails_clearly(world, forgotten):
    status, answer = poll(world, forgotten)

    assert (status, answer["category"]) == (200, "user")
    assert "were forgotten on 20" in answer["error"]


def test_nothing_of_the_data_is_left_below_the_data_folder(world, forgotten):
    assert traces(world) == []


def test_to_forget_again_tells_when_it_was(world, forgotten):
    done = audit(world, "log", "forget", forgotten.run)

    assert (done.returncode, "was forgotten" in done.stdout) == (0, True), done


def test_a_file_with_the_key_is_replayed_after_all(world, forgotten, exports):
    done = audit(world, "replay", exports[0], "--to", 2)

    assert done.returncode == 0, done


def test_a_file_without_the_key_is_verified_and_not_replayed(world, forgotten, exports):
    assert audit(world, "log", "verify", exports[1]).returncode == 0
    done = audit(world, "replay", exports[1])

    assert (done.returncode, "without their key" in done.stderr) == (2, True), done


def test_a_live_run_is_forgotten_by_force_and_its_client_is_told(world, forgotten):
    clients = connect(world)
    model = new_model(next(clients))
    step(model)
    done = audit(world, "log", "forget", model.model_id, "--yes", "--force")

    assert done.returncode == 0, done
    with pytest.raises(Exception, match="were forgotten on"):
        step(model)
    assert audit(world, "log", "verify", model.model_id).returncode == 0
    next(clients, None)  # ends the session


def test_other_runs_go_on_as_before(world, forgotten):
    clients = connect(world)
    client = next(clients)
    forgotten, other = new_model(client), new_model(client)
    audit(world, "log", "forget", forgotten.model_id, "--yes", "--force")

    assert step(other) > step(other)
    assert audit(world, "replay", other.model_id).returncode == 0
    next(clients, None)  # ends the session


def test_retention_forgets_what_has_ended(tmp_path, model_folder):
    extra = '[retention]\npayloads = "1s"\ncheck_s = 0.2\n'
    server = start(tmp_path, model_folder=model_folder, extra=extra)
    clients = connect(server)
    model = new_model(next(clients))
    step(model)
    before = audit(server, "log", "verify", model.model_id)
    next(clients, None)  # ends the session
    forgotten = asyncio.run(until_forgotten(server, model.model_id))
    after = audit(server, "log", "verify", model.model_id)
    stop(server)

    assert "forgotten" not in before.stdout
    assert forgotten.reason == "retention: 1s after its session ended"
    assert (after.returncode, "retention: 1s" in after.stdout) == (0, True)


async def until_forgotten(server, model_id):
    from tinsmith.config import load
    from tinsmith.logbook.installation import connect as reach
    from tinsmith.sealing import Seals

    environ = {"TINSMITH_DATA_DIR": str(server.folder / "data")}
    config = load(server.folder / "tinsmith.toml", environ)
    async with asyncio.timeout(60), reach(config, name="test") as (bus, _):
        while (found := await Seals(bus, config).forgotten(model_id)) is None:
            await asyncio.sleep(0.1)
    return found
