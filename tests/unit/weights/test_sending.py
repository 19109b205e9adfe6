"""Sending holds a few chunks at a time, however large a state is."""

from __future__ import annotations

import asyncio

import numpy as np
from blake3 import blake3

from tinsmith.messages.base import BlobRef
from tinsmith.weights.change import raw
from tinsmith.weights.places import WINDOW, in_order
from tinsmith.weights.sending import send
from tinsmith.weights.specs import TensorSpec
from tinsmith.weights.state import WeightState

TENSORS = 40
SPECS = {f"t{number}": TensorSpec("float32", (25,)) for number in range(TENSORS)}


class Slow:
    """A place that takes and gives chunks when it is told to."""

    limit = 100  # a tensor

    def __init__(self):
        self.open = asyncio.Event()
        self.waiting = 0
        self.full = asyncio.Event()

    async def put(self, data):
        await self._pass()
        return BlobRef(blake3(data).hexdigest(), len(data))

    async def get(self, ref):
        await self._pass()
        return bytes(ref.size)

    async def _pass(self):
        self.waiting += 1
        if self.waiting == WINDOW:
            self.full.set()
        await self.open.wait()


def state():
    return WeightState(SPECS, {name: np.arange(25, dtype=np.uint32) for name in SPECS})


class Watched(Slow):
    """Takes chunks in a while; whoever does not wait for it would have read everything by then."""

    def __init__(self, read):
        super().__init__()
        self.read, self.taken, self.most = read, 0, 0

    async def put(self, data):
        for _ in range(20):
            await asyncio.sleep(0.001)
        self.most = max(self.most, len(self.read) - self.taken)
        self.taken += 1
        return BlobRef(blake3(data).hexdigest(), len(data))


async def test_no_more_is_read_of_a_state_than_is_on_its_way():
    read = []

    def code(bits):
        read.append(bits)
        return raw(bits)

    place = Watched(read)
    sent = await send(place, state().full(code), SPECS)

    assert place.most <= WINDOW + 1
    assert len(sent.chunks) == len(read) == TENSORS


async def test_no_more_is_asked_for_than_is_taken():
    place = Slow()
    refs = [BlobRef("", number) for number in range(20)]
    coming = in_order(place, refs)
    async with asyncio.timeout(60):
        first = asyncio.create_task(anext(coming))
        await place.full.wait()
        asked = place.waiting
        place.open.set()
        rest = [await first] + [data async for data in coming]

    assert asked == WINDOW
    assert [len(data) for data in rest] == list(range(20))
