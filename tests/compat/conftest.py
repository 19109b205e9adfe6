"""One live server, and what the client of each version makes of it."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.compat.expectations import NOT_CALLED
from tests.integration.conftest import MODEL, model_folder, start, stop

__all__ = ["model_folder"]

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
VERSIONS = (HERE / "versions.txt").read_text().split()
OUTSIDE = (HERE / "outside.txt").read_text().split()
AT_ONCE = 2  # as many as the smallest machine has cores
PATIENCE_S = 560


@pytest.fixture(scope="session")
def server(tmp_path_factory, model_folder):
    """It exchanges keys for tokens: without that, clients refuse to ask who they are."""
    folder = tmp_path_factory.mktemp("server")
    running = start(folder, model_folder=model_folder, extra="[gateway]\nexchange_keys = true\n")
    try:
        yield running
    finally:
        stop(running)


@pytest.fixture(scope="session")
def run(server, model_folder, tmp_path_factory):
    """Runs Python in a client's environment, in a folder of its own."""

    def run(version, *arguments):
        python = ENVIRONMENTS / version / "bin/python"
        assert python.exists(), f"{python} is missing: run this suite as 'make test-clients'"
        folder = tmp_path_factory.mktemp(version)
        (folder / MODEL).parent.mkdir()
        (folder / MODEL).symlink_to(model_folder)  # where the client looks for the tokenizer
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TINKER_BASE_URL": server.base_url,
            "TINKER_API_KEY": server.api_key,
            "TINKER_PROJECT_ID": "compat",
        }
        return folder, subprocess.run(
            [python, "-W", "ignore", *arguments],
            check=False,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    return run


@pytest.fixture(scope="session")
def reports(run, server):
    """What the driver tells, by version."""

    asked = {"model": MODEL, "not_called": NOT_CALLED, "key": server.api_key}
    scene = server.folder / "scene.json"
    scene.write_text(json.dumps(asked))

    def report(version):
        folder, done = run(version, HERE / "driver.py", scene, "report.json")
        assert done.returncode == 0, f"tinker {version}:\n{done.stdout}\n{done.stderr}"
        return json.loads((folder / "report.json").read_text())

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(VERSIONS, pool.map(report, VERSIONS), strict=True))
