"""One server with a tiny model for all examples, and a way to run them as their reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.conftest import MODEL, model_folder, server

__all__ = ["model_folder", "server"]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0  # of one script; alone it takes some seconds


@dataclass(frozen=True)
class Scripts:
    """Runs Python as somebody at the shell: the two variables are all that points at the server."""

    base_url: str
    api_key: str

    def example(self, name, *options, model=MODEL):
        """What the example of that name printed."""
        command = [str(ROOT / "docs/examples" / f"{name}.py"), "--model", model, *options]
        return self.run(command)

    def run(self, command):
        """What Python printed; deprecations and all errors fail."""
        environ = {
            k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))
        }
        environ |= {
            "TINKER_BASE_URL": self.base_url,
            "TINKER_API_KEY": self.api_key,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        ended = subprocess.run(
            [sys.executable, "-W", "error::FutureWarning", *command],
            env=environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
        return ended.stdout


@pytest.fixture(scope="session")
def scripts(server):
    return Scripts(server.base_url, server.api_key)


def figures(output, name):
    """Every number behind that name, in order."""
    return [float(one) for one in re.findall(rf"{name} +(-?[\d.]+)", output)]


def pytest_collection_modifyitems(items):
    """Whole runs, each in a process of its own."""
    for item in items:
        if Path(__file__).parent in item.path.parents and "scripts" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(2 * PATIENCE_S))
