"""A server for a benchmark: `tinsmith up` in a folder of its own, stopped at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Server:
    """Use as a context manager; ``base_url`` and ``api_key`` hold inside."""

    def __init__(self, folder, *, threads):
        self._folder = folder
        self._threads = str(threads)

    def __enter__(self):
        ready = self._folder / "ready.json"
        environ = dict(os.environ)
        for service in ("TRAINER", "SAMPLER"):
            environ[f"TINSMITH_{service}__THREADS"] = self._threads
        log = (self._folder / "server.log").open("wb")
        command = [sys.executable, "-m", "tinsmith", "up", "--port", "0"]
        command += ["--data-dir", str(self._folder / "data"), "--ready-file", str(ready)]
        self._process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        while not ready.exists():
            if self._process.poll() is not None:
                sys.exit((self._folder / "server.log").read_text()[-2000:])
            time.sleep(0.1)
        told = json.loads(ready.read_text())
        self.base_url = told["base_url"]
        self.api_key = Path(told["api_key_file"]).read_text().strip()
        return self

    def __exit__(self, *_):
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
