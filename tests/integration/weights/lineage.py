"""A publisher and receivers of one small lineage on a real broker, and what they may serve."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import numpy as np

from tinsmith import ids
from tinsmith.messages.weights import WeightsStored
from tinsmith.weights.bits import ordered, unordered
from tinsmith.weights.digest import TensorEntry, digest, root
from tinsmith.weights.memory import ArrayMemory
from tinsmith.weights.planes import plane
from tinsmith.weights.policy import Policy
from tinsmith.weights.publisher import Publisher, Wanted
from tinsmith.weights.receiver import Receiver, ReceiverSettings
from tinsmith.weights.specs import TensorSpec
from tinsmith.weights.state import bits_of

PATIENCE_S = 90.0
SHAPES = {"embed": (500, 16), "norm": (16,), "mlp.up": (64, 16), "mlp.down": (16, 64)}
SPECS = {name: TensorSpec("bfloat16", shape) for name, shape in SHAPES.items()}
DELTAS = Policy(full_below_bytes=0, full_every=10**6, full_share=1e9, fold=0)
"""Deltas and nothing else after the first version."""


def first_bits(seed=0):
    rng = np.random.default_rng(seed)
    return {n: bits_of(rng.standard_normal(shape, np.float32)) for n, shape in SHAPES.items()}


def stepped(rng, bits, density=0.02):
    """A training step: few elements, by a unit in the last place or two."""
    new = {}
    for name, old in bits.items():
        new[name] = old.copy()
        at = np.flatnonzero(rng.random(old.size) < density)
        steps = rng.choice(np.array([1, -1, 2], np.int16), at.size).view(np.uint16)
        new[name][at] = unordered(ordered(old[at]) + steps)
    return new


class Engine(ArrayMemory):
    """Computes when nobody pauses it; notes every root that it has computed with."""

    def __init__(self, plane_id="bf16", specs=SPECS):
        rule = plane(plane_id)
        self.specs = {}
        for name, spec in specs.items():
            self.specs |= rule.specs(name, spec)
        widths = {"bfloat16": "u2", "float32": "u4"}
        super().__init__(
            {n: np.zeros(s.size, widths.get(s.dtype, "u1")) for n, s in self.specs.items()}
        )
        self.receiver = None
        self.served = []  # (version, root that was told, root that was found in the arrays)
        self.pauses = 0

    def root(self):
        return root(
            TensorEntry(n, s.dtype, s.shape, digest(n, self.arrays[n]))
            for n, s in self.specs.items()
        )

    @asynccontextmanager
    async def pause(self):
        self.pauses += 1
        try:
            yield
        finally:
            self.compute()

    def compute(self):
        """What a forward pass would do: use the weights, if it may."""
        if self.receiver is not None and (serving := self.receiver.serving) is not None:
            self.served.append((serving.version, serving.plane_root, self.root()))


class Site:
    """One publisher's side: the true bits of each version."""

    def __init__(self, bus, policy=DELTAS, planes=(), lineage_id=None):
        self.bus = bus
        self.lineage_id = lineage_id or ids.model_id(ids.new_session_id(), 0)
        self.wanted = Wanted(
            lineage_id=self.lineage_id,
            publisher_id="trainer-a",
            content="full",
            planes=planes,
            policy=policy,
        )
        self.bits = first_bits()
        self.rng = np.random.default_rng(1)
        self.publisher = None

    async def open(self):
        copies = {name: array.copy() for name, array in self.bits.items()}
        self.publisher = await Publisher.open(self.bus.lineages, self.wanted, SPECS, copies)
        return self.publisher

    async def step(self, density=0.02):
        self.bits = stepped(self.rng, self.bits, density)
        return await self.publisher.publish(self.bits)

    async def first(self, steps=0):
        """Opened, with the first version and so many more."""
        await self.open()
        await self.publisher.publish(self.bits)
        for _ in range(steps):
            await self.step()
        return self

    async def entries(self):
        return [entry async for entry in self.bus.lineages.entries(self.lineage_id)]

    async def stored(self, form=None):
        found = [e.message for e in await self.entries() if isinstance(e.message, WeightsStored)]
        return [entry for entry in found if form in (None, entry.form)]

    async def roots(self):
        """Of every version in the log, as a plane of its bits."""
        return {entry.version: entry.root for entry in await self.stored()}


class Replica:
    """A receiver that runs, its engine, and what it told."""

    def __init__(self, bus, lineage_id, engine, options):
        self.engine = engine
        self.told = []
        settings = ReceiverSettings(
            lineage_id=lineage_id, replica="replica", retry_s=0.05, beat_s=0.2, **options
        )
        self.receiver = Receiver(bus.lineages, engine, settings, self._hear)
        engine.receiver = self.receiver

    async def _hear(self, status):
        self.told.append(status)

    async def until(self, condition, what):
        """Wait for a condition of this replica; fails with its status."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition(self):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"never {what}: {self.receiver.status()}") from None

    async def at(self, version):
        await self.until(
            lambda r: r.receiver.serving is not None and r.receiver.serving.version == version,
            f"at version {version}",
        )
        await self.until(lambda r: r.told and r.told[-1].version == version, "told")

    def states(self):
        """What was told, without repetitions."""
        states = [status.state for status in self.told]
        return [s for i, s in enumerate(states) if i == 0 or states[i - 1] != s]


@asynccontextmanager
async def replica(bus, site, engine=None, **options):
    """A running replica of the site's lineage, over ``bus``."""
    lineage_id = site if isinstance(site, str) else site.lineage_id
    made = Replica(bus, lineage_id, engine or Engine(options.get("plane", "bf16")), options)
    task = asyncio.create_task(made.receiver.run())
    try:
        yield made
    finally:
        ended_early = task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert not ended_early, "a receiver runs until it is cancelled"


async def served_only_what_is_in_the_log(site, *replicas):
    """The oracle: every root that was computed with names a version of the chain, and is true."""
    stored = await site.stored()
    roots = {e.root for e in stored} | {r for e in stored for r in e.plane_roots.values()}
    for each in replicas:
        assert each.engine.served
        for version, told, found in each.engine.served:
            assert told == found, f"version {version} was served with other bits"
            assert found in roots, f"version {version} is not in the log"
