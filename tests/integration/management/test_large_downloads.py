"""A large download: resumed where it broke off, slow or abandoned, and never in memory."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from tests.integration.steps import new_model, step

from tinsmith import ids
from tinsmith.messages.table import CHECKPOINTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZE = 256 << 20
PIECE = 1 << 20
ROOM = 64 << 20  # of a gateway for all that it does beside: far less than the file


@pytest.fixture
def large(alice, on_bus):
    """A link to a file of external weights, and its digest."""
    model = new_model(alice[0], seed=77)
    step(model)
    path = model.save_weights_external("large").result().path
    data = np.random.default_rng(0).bytes(SIZE)

    async def replace(bus):
        table, key = bus.table(CHECKPOINTS), ids.checkpoint_key(ids.parse_path(path))
        parts = {"adapter_model.safetensors": await bus.blobs.put(data)}
        await table.put(key, msgspec.structs.replace(await table.get(key), parts=parts))

    on_bus(replace)
    deadline = time.monotonic() + 60
    while True:  # the gateway follows the registry
        urls = alice[1].get_external_weights_urls(path).result().urls
        with opened(urls["adapter_model.safetensors"]) as answer:
            size = answer.headers["Content-Length"]
        if size == str(SIZE):
            return urls["adapter_model.safetensors"], blake3(data).hexdigest()
        assert time.monotonic() < deadline, "the gateway has not heard of the file"
        time.sleep(0.1)


def opened(url, start=None):
    headers = {} if start is None else {"Range": f"bytes={start}-"}
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)


class Memory:
    """Of the processes of a server's gateway."""

    def __init__(self, server):
        self._pids = [pid for name, pid in server.pids.items() if "gateway" in name]
        assert self._pids
        for pid in self._pids:  # the peak is that from now on
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = self._peak()

    def _peak(self):
        lines = [Path(f"/proc/{pid}/status").read_text().splitlines() for pid in self._pids]
        return sum(int(one.split()[1]) << 10 for of in lines for one in of if "VmHWM" in one)

    @property
    def grown(self):
        return self._peak() - self._before


def test_it_is_resumed_where_it_broke_off_and_the_gateway_stays_small(managed, alice, large):
    url, expected = large
    memory, hasher, have = Memory(managed), blake3(), 0
    for stop in (5 * PIECE + 17, 100 * PIECE, SIZE):
        with opened(url, have or None) as answer:  # left in the middle, but for the last time
            assert answer.status == (206 if have else 200)
            assert answer.headers["Content-Length"] == str(SIZE - have)
            while have < stop and (data := answer.read(min(PIECE, stop - have))):
                hasher.update(data)
                have += len(data)

    assert have == SIZE
    assert hasher.hexdigest() == expected
    with pytest.raises(urllib.error.HTTPError) as end:
        opened(url, SIZE)
    assert (end.value.code, end.value.headers["Content-Range"]) == (416, f"bytes */{SIZE}")
    assert memory.grown < ROOM


def test_whoever_does_not_read_holds_up_nobody_and_takes_no_memory(managed, alice, large):
    url, expected = large
    memory = Memory(managed)
    slow = [opened(url) for _ in range(4)]  # none of which is read now

    step(new_model(alice[0], seed=78))
    with opened(url) as answer:
        hasher = blake3()
        while data := answer.read(PIECE):
            hasher.update(data)

    assert hasher.hexdigest() == expected
    assert len(slow[0].read(PIECE)) == PIECE
    for answer in slow:
        answer.close()
    assert memory.grown < ROOM
