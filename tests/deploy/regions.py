"""The servers of several hosts: three with the streams, and a leaf node of another region."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import urllib.request

from nats.js.errors import APIError
from tests.deploy.shipped import ShippedBroker, password

from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus
from tinsmith.bus.permissions import OPERATOR, REGION
from tinsmith.errors import BrokerUnavailable, StartupError

PATIENCE_S = 60


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Server(ShippedBroker):
    """One of the three."""

    def __init__(self, name, folder, tls, routes, route, leaf_port):
        self.leaf_port = leaf_port
        ports = {"6222": route, "7422": leaf_port}
        super().__init__(
            "cluster.conf",
            folder / name,
            tls,
            changes=[
                (f'listen: "0.0.0.0:{theirs}"', f'listen: "127.0.0.1:{port}"')
                for theirs, port in ports.items()
            ],
            more={"NATS_NAME": name, "NATS_ROUTES": routes},
        )

    def bus_config(self, user, **others):
        return super().bus_config(user, **{"replicas": 3, **others})


@contextlib.contextmanager
def cluster(folder, tls):
    """Three servers, as on three hosts."""
    ports = free_ports(6)
    routes = f"[{', '.join(f'tls://127.0.0.1:{port}' for port in ports[:3])}]"
    servers = [Server(f"nats-{n}", folder, tls, routes, ports[n], ports[3 + n]) for n in range(3)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(running(server))
        yield servers


@contextlib.contextmanager
def running(server):
    try:
        server.start()
        yield server
    finally:
        with contextlib.suppress(RuntimeError):  # it was not reached
            server.kill()


def leaf_node(folder, tls, ports, changes=(), name="leaf"):
    """The leaf node of a region that reaches the first region's servers at ``ports``."""
    hub = ", ".join(f"tls://{REGION}:{password(REGION)}@127.0.0.1:{port}" for port in ports)
    return ShippedBroker(
        "leaf.conf", folder / name, tls, changes=changes,
        more={"NATS_NAME": name, "NATS_HUB": f"[{hub}]"},
    )  # fmt: skip


def links(server):
    """How many leaf nodes, or servers with streams, it is connected to."""
    with urllib.request.urlopen(f"{server.monitoring_url}/leafz", timeout=10) as answer:
        return json.load(answer)["leafnodes"]


async def until(condition):
    """Wait until ``condition()`` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0.05)


async def answered(question):
    """Await ``question()`` until the servers have a leader."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await question()
        except (BrokerUnavailable, APIError, StartupError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


async def prepare(server, folder):
    """Make the streams."""
    blobs = BlobStore.open("", default=folder / "blobs")
    config = server.bus_config(OPERATOR)

    async def ensure():
        async with Bus.connect(config, name=OPERATOR, blobs=blobs) as bus:
            await bus.ensure()

    await answered(ensure)
