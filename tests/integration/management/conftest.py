"""A server with two owners, that looks for what has ended, and counts, all the time."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import warnings

import pytest
from tests.integration.conftest import start, stop

from tinsmith.config import load
from tinsmith.logbook.installation import connect

PATIENCE_S = 60.0
KEYS = ("tml-alice", "tml-bob")
SETTINGS = """
[gateway]
api_key_file = "{keys}"
batch_polls = true
announce_bytes = 0

[checkpointer]
upkeep_s = 0.2
grace_s = 0.5
meter_s = 0.2
"""


@pytest.fixture(scope="package")
def managed(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("managed")
    keys = folder / "keys"
    keys.write_text("\n".join(KEYS))
    running = start(folder, model_folder=model_folder, extra=SETTINGS.format(keys=keys))
    yield dataclasses.replace(running, api_key=KEYS[0])
    stop(running)


@pytest.fixture(scope="package")
def tinker():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tinker
    return tinker


@pytest.fixture
def login(managed, tinker, monkeypatch):
    """Service and REST client of an owner."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    opened = []

    def login(owner, **options):
        address = {"base_url": managed.base_url, "api_key": f"tml-{owner}"}
        service = tinker.ServiceClient(**address, **options)
        opened.append(service)
        return service, tinker.RestClient(**address)

    yield login
    for service in opened:
        service.close("success").result()


@pytest.fixture
def alice(login):
    return login("alice")


@pytest.fixture
def bob(login):
    return login("bob")


@pytest.fixture
def on_bus(managed):
    """Runs a coroutine function on a bus of the installation."""

    def run(work):
        environ = {"TINSMITH_DATA_DIR": str(managed.folder / "data")}
        config = load(managed.folder / "tinsmith.toml", environ)

        async def connected():
            async with connect(config, name="test") as (bus, _):
                return await work(bus)

        return asyncio.run(connected())

    return run


def until(condition):
    """What ``condition`` gives when it is true at last."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
    return found
