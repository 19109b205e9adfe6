"""Everything here kills real processes; `make test-fault` runs it, `make test` does not."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.fault.cluster import Cluster
from tests.integration.conftest import (  # noqa: F401 - a fixture
    CLIENT_WARNINGS,
    connect,
    model_folder,
)


@pytest.fixture
def new_cluster(tmp_path, model_folder):  # noqa: F811 - the fixture above
    """Makes the broker of a cluster; whatever the test starts on it ends with the test."""
    with ExitStack() as stack:

        def make(**options):
            cluster = Cluster(tmp_path, model_folder, **options)
            stack.callback(cluster.close)
            return cluster

        yield make


@pytest.fixture
def clients():
    """Makes clients of the unmodified SDK, each a session of its own."""
    with ExitStack() as stack:

        def make(server):
            connected = connect(server)
            stack.callback(connected.close)
            return next(connected)

        yield make


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.fault)
            for entry in CLIENT_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(entry))
