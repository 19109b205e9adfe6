"""What the Go heap of a nats-server holds, by the profile that it gives of itself.

A file store keeps in memory the blocks that it writes and those that were read within seconds,
in buffers of 256 KiB, 1, 4 or 8 MiB; a block of the log that is full is read and compressed once
more. That is most of what a small broker holds, and it goes up and down with the place in its
blocks, by tens of MiB, as a profile of a soak has shown. Go lets garbage double it all
before it collects. So what stays is seen only after a collection, and beside these buffers.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import urllib.request
from dataclasses import dataclass

BUFFERS = ("getMsgBlockBuf", "recompressOnDiskIfNeeded", "StoreCompression")
"""Functions by which blocks come into memory; their names are those of nats-server 2.15."""
INDEX_BYTES = 140
"""Of a stored message, measured: how much 20,000 messages of as many subjects add to the heap,
136 to 139 of the log and of results, after the first 20,000 of a stream."""
HTTP = 'http: "127.0.0.1:-1"'  # a line of our broker's configuration
PATIENCE_S = 5.0


@dataclass(frozen=True)
class Heap:
    """What is reachable, in bytes, and which part of it are buffers of blocks."""

    live: int
    buffers: int


def parse(text):
    """The heap of a profile in Go's legacy format, taken after a collection."""
    found = re.search(r"@ heap/(\d+)", text)
    assert found, text[:200]
    rate = int(found[1]) / 2  # bytes from sample to sample, on average
    buffers = 0.0
    for stack in re.split(r"\n(?=\d+: \d+ \[)", text):
        count, size = map(int, re.match(r"\D*(\d+): (\d+) \[", stack).groups())
        if count and any(name in stack for name in BUFFERS):
            buffers += size / (1 - math.exp(-size / count / rate))
    return Heap(int(re.search(r"# HeapAlloc = (\d+)", text)[1]), round(buffers))


class Profiled:
    """A broker that tells of its heap; give ``limits`` to the cluster that starts it."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.limits = ((HTTP, f"{HTTP}\nprof_port: {self._port}"),)

    def heap(self):
        """What it holds after a collection; None while it does not answer."""
        text = _read(f"http://127.0.0.1:{self._port}/debug/pprof/heap?gc=1&debug=1")
        return parse(text) if text else None


def index_bytes(broker):
    """What the index of what ``broker`` stores takes; None while it does not answer."""
    text = _read(f"{broker.monitoring_url}/jsz")
    return INDEX_BYTES * json.loads(text)["messages"] if text else None


def _read(url):
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.read().decode()
    except (OSError, http.client.HTTPException):  # it has ended, or sleeps
        return ""
