"""One small SGLang server for all tests, and clients of it; they need `make sglang`."""

from __future__ import annotations

import pytest
from tests.sglang import running
from tests.sglang.engines import engine_on
from tests.threads import one_thread
from tests.unit.sampler.engines import running as torch_running

from tinsmith.testing import tiny_model
from tinsmith_sampler.sglang.client import SglangClient

__all__ = ["one_thread"]

PATIENCE_S = 1200  # of one test, the start of the server included


def pytest_collection_modifyitems(items):
    """Servers take their time to start."""
    for item in items:
        if "tests/sglang" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(PATIENCE_S))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model of a family that SGLang serves."""
    return tiny_model.build(tmp_path_factory.mktemp("model"), family="qwen3")


@pytest.fixture(scope="session")
def server(model, tmp_path_factory):
    """It runs for the whole session; tests leave it as they found it."""
    yield from running.serve(tmp_path_factory.mktemp("sglang"), running.options(model))


@pytest.fixture(scope="session")
def whole_server(model, tmp_path_factory):
    """One whose weights are replaced, for the whole session; without adapters."""
    chosen = running.options(model, is_whole=True)
    yield from running.serve(tmp_path_factory.mktemp("sglang-whole"), chosen)


@pytest.fixture
async def client(server):
    """A client of that server, in the loop of the test."""
    connected = SglangClient(server.url, key=server.key)
    yield connected
    if connected.is_paused:  # a test has failed in between
        await connected.resume()
    await connected.close()


@pytest.fixture
async def engine(server):
    """An engine on that server, with nothing loaded."""
    async with engine_on(server) as engine:
        yield engine


@pytest.fixture
async def built_in(model):
    """The torch engine on the same model: what the other is compared with."""
    async with torch_running(model) as engine:
        yield engine
