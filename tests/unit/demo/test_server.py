from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tinsmith import config, paths
from tinsmith.demo import server
from tinsmith.errors import ServerError, StartupError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    root = tmp_path / 'da"ta ümlaut\\'
    paths.DataDir(root).prepare()
    return root


def test_the_written_configuration_says_where_the_model_and_its_tokenizer_are(data_dir, tmp_path):
    loaded = config.load(server.write_config(data_dir, tmp_path), {})

    assert loaded.data_dir == data_dir
    assert [(model.path, model.tokenizer) for model in loaded.models] == [(str(tmp_path),) * 2]


def test_a_server_that_cannot_start_says_why(data_dir, tmp_path):
    written = server.write_config(data_dir, tmp_path / "no model here")

    with (
        pytest.raises(StartupError, match=r"holds no config\.json.*see .*server\.log"),
        server.running(written),
    ):
        pass


def lose(process: subprocess.Popen[bytes]) -> None:
    """Let the server end, and wait for something that will never happen."""
    process.stdin.close()
    threading.Event().wait()


def test_a_server_that_ends_interrupts_what_waits_for_it(data_dir, tmp_path, monkeypatch):
    started = []

    def start(config: Path, log: Path, ready_file: Path) -> subprocess.Popen[bytes]:
        ready = json.dumps({"base_url": "http://127.0.0.1:1", "api_key_file": "key"})
        script = (
            f"import pathlib; pathlib.Path({str(ready_file)!r}).write_text({ready!r})\n"
            "print('out of memory', flush=True); input()"
        )
        with log.open("wb") as output:
            command = [sys.executable, "-c", script]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output))
        return started[0]

    monkeypatch.setattr(server, "_start", start)
    written = server.write_config(data_dir, tmp_path)

    with (
        pytest.raises(ServerError, match="the server has ended: out of memory"),
        server.running(written),
    ):
        lose(started[0])
