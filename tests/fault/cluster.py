"""A broker and any number of each service as processes of their own, as on several machines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.integration.conftest import MODEL, Server

from tinsmith import lifeline
from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.messages import ops
from tinsmith.paths import DataDir

if TYPE_CHECKING:
    from pathlib import Path

KEY = "tml-fault"
READY_PATIENCE_S = 240.0  # a busy machine takes its time to import torch
PATIENCE_S = 90.0  # for anything that is waited for
LEASE_S = 3  # how long a silent trainer keeps its models

CONFIG = """\
[[models]]
name = "{name}"
path = "{folder}"
tokenizer_id = "{folder}"
[gateway]
port = 0
api_keys = ["{key}"]
long_poll_s = 2
recheck_s = 0.5
service_stale_s = 4
{gateway}
[trainer]
placement_timeout_s = {lease}
{trainer}
[logs]
format = "json"
"""


class StrictBroker(Broker):
    """A nats-server with other limits: pairs of a line of our configuration and its place."""

    limits: tuple[tuple[str, str], ...] = ()

    def _write_config(self):
        path = super()._write_config()
        text = path.read_text()
        for ours, wanted in self.limits:
            assert ours in text, ours
            text = text.replace(ours, wanted)
        path.write_text(text)
        return path


@dataclass(frozen=True)
class Node:
    """One running service."""

    process: subprocess.Popen
    log: Path
    url: str = ""  # of a gateway

    def kill(self):
        """As a crash would."""
        self.process.kill()
        self.process.wait()

    def pause(self):
        """Alive, but silent."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    @property
    def is_running(self):
        return self.process.poll() is None

    @property
    def instance(self):
        """The name by which it owns models."""
        return self.events("ready")[-1]["instance"]

    def events(self, name):
        """Lines of its log about one event, oldest first."""
        lines = (line for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [said for line in lines if (said := json.loads(line)).get("event") == name]


class Cluster:
    """All processes of one test; ``close`` ends whatever still runs."""

    def __init__(self, folder, model_folder, *, gateway="", trainer="", store=None, limits=()):
        self.folder = folder
        self.config = folder / "tinsmith.toml"
        self.config.write_text(
            CONFIG.format(
                name=MODEL,
                folder=model_folder,
                key=KEY,
                lease=LEASE_S,
                gateway=gateway,
                trainer=trainer,
            )
        )
        self.data = DataDir(folder / "data")
        self.data.prepare()
        self.broker = StrictBroker(store or self.data.nats, self.data.run)
        self.broker.limits = limits
        self.broker.start()
        self._nodes = []

    def begin(self, service, **settings):
        """Start a service without waiting for it: ``settings`` are variables of its section."""
        section = {f"TINSMITH_{service}__{key}".upper(): str(v) for key, v in settings.items()}
        ready, ready_end = os.pipe()
        path = self.folder / f"{len(self._nodes)}-{service}.log"
        with path.open("wb") as log:  # the child has its own handle
            process = subprocess.Popen(
                [sys.executable, "-m", "tinsmith", service],
                env=self.environ | section | {lifeline.READY_VARIABLE: str(ready_end)},
                pass_fds=(ready_end,),
                stdout=log,
                stderr=log,
            )
        os.close(ready_end)
        node = Node(process, path)
        self._nodes.append(node)
        return node, ready

    def run(self, arguments, name):
        """Start Python with ``arguments``: what starts services by itself."""
        path = self.folder / f"{len(self._nodes)}-{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], env=self.environ, stdout=log, stderr=log
            )
        node = Node(process, path)
        self._nodes.append(node)
        return node

    def started(self, node, ready):
        """Wait until a service that was begun does its work."""
        with os.fdopen(ready) as pipe:
            can_read, _, _ = select.select([pipe], [], [], READY_PATIENCE_S)
            line = pipe.readline() if can_read else ""
        assert line, node.log.read_text()[-4000:]
        return replace(node, url=json.loads(line)["ready"].get("url", ""))

    def start(self, *services, **settings):
        """Start services at the same time; their nodes, in the same order."""
        return [self.started(*begun) for begun in [self.begin(s, **settings) for s in services]]

    @property
    def environ(self):
        return os.environ | {
            "TINSMITH_CONFIG": str(self.config),
            "TINSMITH_NATS_URL": self.broker.url,
            "TINSMITH_DATA_DIR": str(self.data.root),
        }

    def server(self, gateway):
        """What the client and raw requests need of a gateway."""
        return Server(gateway.url, KEY, self.folder, gateway.process)

    def ask(self, question):
        """The answer of ``await question(bus)``, on a connection of our own."""

        async def asked():
            blobs = BlobStore.open("", default=self.data.blobs)
            async with Bus.connect(
                BusConfig(url=self.broker.url), name="auditor", blobs=blobs
            ) as bus:
                return await question(bus)

        return asyncio.run(asked())

    def log(self, model_id):
        """Every entry of a run's log."""

        async def entries(bus):
            return [entry async for entry in bus.log.entries(model_id)]

        return self.ask(entries)

    def says(self, text):
        """Whether the broker has complained of it."""
        return text in (self.data.run / "nats.log").read_text()

    def is_connected(self, node):
        """Whether the broker takes a service for connected."""
        with urllib.request.urlopen(f"{self.broker.monitoring_url}/connz", timeout=10) as answer:
            return node.instance in {one.get("name") for one in json.load(answer)["connections"]}

    def audit(self, *command):
        """The exit code of an auditor's command, and what it said."""
        done = subprocess.run(
            [sys.executable, "-m", "tinsmith", *command],
            env=self.environ,
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr

    def close(self):
        for node in self._nodes:
            if node.is_running:
                node.resume()  # one that is stopped would not end
                node.kill()
        with contextlib.suppress(RuntimeError):
            self.broker.kill()


def until(condition, what, patience_s=PATIENCE_S):
    """Wait for what ``condition()`` returns once it is true; ``what`` names it."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(0.05)
    return found


def replace_killed(server, service):
    """Kill a service of a running ``tinsmith up``, and wait until there is another in its place."""
    old = server.pids[service]
    server.kill(service)
    until(lambda: server.pids.get(service, old) != old, f"another {service}")


def let_pass(seconds):
    """Wait for a lease to run out: there is nothing else to be seen of it."""
    over = time.monotonic() + seconds
    until(lambda: time.monotonic() >= over, "time")


def records(entries):
    return [entry for entry in entries if isinstance(entry, ops.Record)]


def owners(entries):
    """Who has held a model, in order."""
    return [entry.trainer_id for entry in entries if isinstance(entry, ops.Owned)]


def last_state(entries):
    """The digest of the model at the end of its log: weights and optimizer."""
    return [record.state_blake3 for record in records(entries) if record.state_blake3][-1]
