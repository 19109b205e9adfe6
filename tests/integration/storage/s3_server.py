"""An S3 server on loopback, and a link to it that can be made to fail."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path

import obstore
from obstore.store import S3Store

from tinsmith.config import BlobsConfig

KEY_ID, SECRET = "AKIATINSMITHTEST", "shh-5f1c02ab9d3e-shh"
BUCKET = "tinsmith"
START_PATIENCE_S = 120.0
SLOW_DOWN = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>'
)


def settings(endpoint, prefix="blobs"):
    """The configuration that reaches the server at ``endpoint``."""
    return BlobsConfig(
        url=f"s3://{BUCKET}/{prefix}",
        endpoint=endpoint,
        region="us-east-1",
        access_key_id=KEY_ID,
        secret_access_key=SECRET,
    )


def _free_ports(count):
    with suppress(OSError):
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
    return ports


@contextmanager
def running(folder):
    """The endpoint of a SeaweedFS in ``folder`` that knows one key and has one bucket."""
    users = folder / "s3.json"
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    users.write_text(json.dumps({"identities": [identity]}))
    (folder / "store").mkdir()
    ports = _free_ports(8)
    names = ("master", "volume", "filer", "s3")
    command = [shutil.which("weed", path=str(Path(sys.executable).parent)) or "weed", "server"]
    command += [f"-dir={folder / 'store'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
    command += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[4:], strict=True)]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=512", "-volume.max=16"]
    command += [f"-s3.config={users}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-s3.cacheCapacityMB=0", "-metricsPort=0", "-volume.minFreeSpace=1MiB"]
    endpoint = f"http://127.0.0.1:{ports[3]}"
    log_file = folder / "weed.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HOME": "/"})
    try:
        _until_ready(endpoint, process, log_file)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def client(endpoint, prefix=""):
    """The bucket as it is."""
    return S3Store(
        BUCKET,
        prefix=prefix or None,
        config={
            "endpoint": endpoint,
            "region": "us-east-1",
            "access_key_id": KEY_ID,
            "secret_access_key": SECRET,
        },
        client_options={"allow_http": True},
    )


def _until_ready(endpoint, process, log_file):
    """The bucket is made by the first object that is put into it."""
    deadline = time.monotonic() + START_PATIENCE_S
    while True:
        try:
            obstore.put(client(endpoint), "ready", b"")
        except (OSError, obstore.exceptions.BaseError):
            assert process.poll() is None, log_file.read_text()[-3000:]
            assert time.monotonic() < deadline, log_file.read_text()[-3000:]
            time.sleep(0.2)
        else:
            return


class Link:
    """A proxy that passes bytes on, until faults are asked for: each takes one connection.

    ``slow down``: 503 for the request; ``drop``: the request is taken and the connection closed;
    ``cut``: the answer breaks off after its first bytes.
    """

    def __init__(self, endpoint):
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open = set()
        self._faults = deque()
        self.met = []
        self.endpoint = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def fail(self, *faults):
        """Break all connections; the next ones meet ``faults``, one each."""
        self._faults.extend(faults)
        for one in tuple(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def heal(self):
        """No more faults."""
        self._faults.clear()

    def close(self):
        self.fail()
        self._server.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        self._open.add(connection)
        with connection, suppress(OSError):
            head = connection.recv(65536)
            if not head:
                return
            fault = self._faults.popleft() if self._faults else ""
            self.met += [fault] if fault else []
            if fault == "slow down":
                status = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n"
                length = f"Content-Length: {len(SLOW_DOWN)}\r\n\r\n".encode()
                connection.sendall(status + length + SLOW_DOWN)
                self._drain(connection)
            elif fault != "drop":
                self._pass_on(connection, head, 1000 if fault == "cut" else None)
        self._open.discard(connection)

    @staticmethod
    def _drain(connection):
        """Take in what is still sent, or closing would destroy the answer on its way."""
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        while connection.recv(1 << 20):
            pass

    def _pass_on(self, connection, head, limit):
        with socket.create_connection(self._target) as target:
            target.sendall(head)
            there = threading.Thread(target=self._copy, args=(connection, target), daemon=True)
            there.start()
            self._copy(target, connection, limit)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            there.join()

    @staticmethod
    def _copy(source, target, limit=None):
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data if limit is None else data[: min(limit, len(data) - 1)])
                if limit is not None:
                    break
            target.shutdown(socket.SHUT_WR)
