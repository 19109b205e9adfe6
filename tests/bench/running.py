"""A server for a benchmark: `tinsmith up` in a folder of its own, stopped at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.bench import shaped


class Server:
    """Use as a context manager; ``base_url`` and ``api_key`` hold inside."""

    def __init__(
        self,
        folder,
        *,
        threads,
        model=None,
        mixing="exact",
        services="gateway,trainer,checkpointer",
        settings=None,
    ):
        """``model`` is a folder, served as ``shaped.NAME``; by default the demo's is served.

        ``services`` are those beside it; ``settings`` are more variables of the environment.
        """
        self._folder = folder
        self._threads = str(threads)
        self._model = model
        self._mixing = mixing
        self._services = services
        self._settings = settings or {}

    def __enter__(self):
        ready = self._folder / "ready.json"
        environ = dict(os.environ)
        for service in ("TRAINER", "SAMPLER"):
            environ[f"TINSMITH_{service}__THREADS"] = self._threads
        environ["TINSMITH_TRAINER__MIXING"] = self._mixing
        environ |= self._settings
        log = (self._folder / "server.log").open("wb")
        command = [sys.executable, "-m", "tinsmith", "up", "--port", "0"]
        command += ["--data-dir", str(self._folder / "data"), "--ready-file", str(ready)]
        if self._model is not None:
            config = self._folder / "bench.toml"
            config.write_text(f'[[models]]\nname = "{shaped.NAME}"\npath = "{self._model}"\n')
            command += ["--config", str(config), "--services", self._services]
        self._process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        while not ready.exists():
            if self._process.poll() is not None:
                sys.exit((self._folder / "server.log").read_text()[-2000:])
            time.sleep(0.1)
        told = json.loads(ready.read_text())
        self.base_url = told["base_url"]
        self.api_key = Path(told["api_key_file"]).read_text().strip()
        self.nats_url = told["nats_url"]
        self.pid = self._process.pid  # of the parent of all its processes
        trainers = [pid for name, pid in told["pids"].items() if "trainer" in name]
        self.trainer_pid = trainers[0] if trainers else None
        return self

    def __exit__(self, *_):
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)

    def trainer_cpu_s(self):
        """CPU seconds of the trainer so far, of all its threads."""
        fields = Path(f"/proc/{self.trainer_pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def trainer_peak_bytes(self):
        """The most memory that the trainer ever had."""
        lines = Path(f"/proc/{self.trainer_pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class TrainerLoad:
    """What the trainer tells of its work in its pings; use as a context manager."""

    def __init__(self, server):
        self._url = server.nats_url
        self._heard = threading.Condition()
        self._load = {}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)

    def __enter__(self):
        self._stop = threading.Event()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def next(self):
        """The figures of a ping yet to come."""
        with self._heard:
            self._heard.wait()
            return dict(self._load)

    async def _listen(self):
        from tinsmith.bus import Bus
        from tinsmith.config import BusConfig
        from tinsmith.messages.table import SERVICE_ALIVE

        async with Bus.connect(BusConfig(url=self._url), name="bench", blobs=None) as bus:
            await bus.listen(SERVICE_ALIVE, self._on_alive)
            while not self._stop.is_set():
                await asyncio.sleep(0.1)

    def _on_alive(self, alive):
        if alive.service == "trainer":
            with self._heard:
                self._load = alive.load
                self._heard.notify_all()


class Tenant:
    """One client with one model on the server."""

    def __init__(self, server, *, rank, name=shaped.NAME, **options):
        import tinker
        from tinker import types

        self.types = types
        service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
        self.model = service.create_lora_training_client(name, rank=rank, **options).result()

    def send(self, data, loss="cross_entropy"):
        """Sends a step; the futures of its two halves."""
        losses = self.model.forward_backward(data, loss)
        return losses, self.optim()

    def step(self, data, loss="cross_entropy"):
        """The loss, once the step is made."""
        losses, stepped = self.send(data, loss)
        stepped.result()
        return losses.result().metrics["loss:sum"]

    def optim(self):
        return self.model.optim_step(self.types.AdamParams(learning_rate=1e-4))

    def datum(self, row, **inputs):
        """A datum of token ids whose last one is only a target."""
        return self.types.Datum(
            model_input=self.types.ModelInput.from_ints([int(token) for token in row[:-1]]),
            loss_fn_inputs={"target_tokens": row[1:], **inputs},
        )
