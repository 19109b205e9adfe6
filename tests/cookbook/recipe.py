"""Recipes as a user runs them, `tinsmith cookbook` as a child, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "model_name=tiny/llama"
PATIENCE_S = 900.0  # of one recipe; a busy machine takes half a minute to import it
POLL_S = 0.05
_PROGRESS = {"progress", "progress/batch", "progress/done_frac"}
_OURS = ("TINKER_", "TINSMITH_", "HF_")


@dataclass(frozen=True)
class Recipes:
    """Where the server is, and where recipes work."""

    config: Path
    data: Path
    folder: Path

    def run(self, recipe, *arguments):
        """Run it to its end, which must be a good one; returns what it printed."""
        with self.running(recipe, *arguments) as process:
            output = self._ended(process)
        assert process.returncode == 0, output[-6000:]
        return output

    def log(self, name):
        """The log folder of that name."""
        return Log(self.folder / name)

    @contextlib.contextmanager
    def running(self, recipe, *arguments):
        """A recipe's process, killed at the end if it is still there."""
        command = [sys.executable, "-m", "tinsmith", "cookbook"]
        command += ["--config", self.config, "--data-dir", self.data, recipe, *arguments]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        # An empty cache: what a hub has been asked for earlier must not matter.
        environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hf")}
        environ |= {"TOKENIZERS_PARALLELISM": "false", "TINKER_TELEMETRY": "0"}
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()

    def _ended(self, process):
        try:
            return process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            pytest.fail(f"the recipe has not ended after {PATIENCE_S:.0f} s")

    def kill_when(self, condition, recipe, *arguments):
        """Start it, and kill it at a moment when ``condition()`` holds."""
        with self.running(recipe, *arguments) as process:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                assert process.poll() is None, process.stdout.read()[-6000:]
                assert time.monotonic() < deadline, "the moment has not come"
                if condition():
                    os.killpg(process.pid, signal.SIGSTOP)
                    if condition():  # now nothing can change it
                        return
                    os.killpg(process.pid, signal.SIGCONT)
                time.sleep(POLL_S)


@dataclass(frozen=True)
class Log:
    """A recipe's log folder."""

    folder: Path

    @property
    def steps(self):
        """One row of figures per training step, in the order of their writing."""
        rows = self._rows("metrics.jsonl")
        for row in rows:
            numbers = [value for value in row.values() if isinstance(value, float)]
            assert all(map(math.isfinite, numbers)), row
        # The last row only tells how long the end took.
        return [
            row for row in rows if {"progress", "progress/batch", "progress/done_frac"} & {*row}
        ]

    def of(self, key):
        """The figure in every row that has it."""
        return [row[key] for row in self.steps if key in row]

    @property
    def checkpoints(self):
        """By name, as recorded."""
        return {row["name"]: row for row in self._rows("checkpoints.jsonl")}

    def _rows(self, name):
        path = self.folder / name
        # A line without its end is still being written.
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]
