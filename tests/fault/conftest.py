"""Everything here kills real processes; `make test-fault` runs it, `make test` does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.conftest import CLIENT_WARNINGS, model_folder  # noqa: F401 - a fixture


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.fault)
            for entry in CLIENT_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(entry))
