"""An engine in another process takes each version in one go, and all of it when it was lost."""

from __future__ import annotations

from contextlib import asynccontextmanager

import numpy as np
import pytest
from tests.integration.weights.lineage import (
    Engine,
    Site,
    replica,
    served_only_what_is_in_the_log,
)

from tinsmith.errors import StorageFull
from tinsmith.weights.memory import StagedMemory
from tinsmith.weights.state import WrongBits


class Distant:
    """Has an engine's arrays, and writes them in a pause from what was staged before it."""

    def __init__(self):
        self.engine = Engine()
        self.staged = None
        self.is_paused = False
        self.is_deaf = False
        self.has_room = True
        self.told = []  # (what was called, in a pause)
        self.digested = []  # (name, whether in a pause)

    @property
    def receiver(self):
        return self.engine.receiver

    @receiver.setter
    def receiver(self, receiver):
        self.engine.receiver = receiver

    @property
    def served(self):
        return self.engine.served

    def names(self):
        return self.engine.names()

    def digest(self, name):
        is_paused = self.is_paused
        found = self.engine.digest(name)
        self.digested.append((name, is_paused))
        return found

    def stage(self, writes, digests):
        self.told.append(("stage", self.is_paused))
        if not self.has_room:
            self.has_room = True
            raise StorageFull("no room for it")
        self.staged, self.wanted = list(writes), dict(digests)

    def swap(self):
        self.told.append(("swap", self.is_paused))
        if self.is_deaf:
            self.is_deaf = False
            raise WrongBits("it does not answer")
        for write in self.staged:
            self.engine.write(*write)
            if write.indices is None and self.engine.digest(write.name) != self.wanted[write.name]:
                raise WrongBits("it holds something else")

    @asynccontextmanager
    async def pause(self):
        self.is_paused = True
        async with self.engine.pause():
            yield
        self.is_paused = False


async def test_each_version_is_staged_before_the_pause_and_swapped_in_it(bus):
    site = await Site(bus).first(steps=2)
    distant = Distant()
    assert isinstance(distant, StagedMemory)
    assert not isinstance(distant.engine, StagedMemory)
    async with replica(bus, site, distant) as following:
        await following.at(3)
        for version in (4, 5):
            await site.step()
            await following.at(version)
        await served_only_what_is_in_the_log(site, following)
    assert distant.told == [("stage", False), ("swap", True)] * 3


@pytest.mark.parametrize("checks_all", [False, True])
async def test_in_a_pause_a_swap_proves_what_it_writes_and_no_digest_is_asked_for(bus, checks_all):
    """Who computes may leave no room for that: a server of SGLang that is paused spins."""
    site = await Site(bus).first()
    distant = Distant()
    async with replica(bus, site, distant, checks_all_in_pause=checks_all) as following:
        await following.at(1)
        await site.step()
        await following.at(2)
    assert any(is_paused for _, is_paused in distant.digested) == checks_all


async def test_what_a_swap_does_not_write_is_not_served(bus):
    site = await Site(bus).first()
    distant = Distant()
    async with replica(bus, site, distant) as following:
        await following.at(1)
        distant.is_deaf = True
        await site.step()
        await following.at(2)
        assert following.receiver.status().mismatches == 1
        assert "fenced" in following.states()
        await served_only_what_is_in_the_log(site, following)


async def test_without_room_for_the_next_version_the_one_before_goes_on_being_served(bus):
    site = await Site(bus).first()
    distant = Distant()
    async with replica(bus, site, distant) as following:
        await following.at(1)
        distant.has_room = False
        await site.step()
        await following.at(2)
        assert "fenced" not in following.states()
        assert following.receiver.status().mismatches == 0
        await served_only_what_is_in_the_log(site, following)
    assert [what for what, _ in distant.told] == ["stage", "swap", "stage", "stage", "swap"]


async def test_memory_that_may_be_lost_is_written_anew_before_it_serves(bus):
    site = await Site(bus).first()
    distant = Distant()
    async with replica(bus, site, distant) as following:
        await following.at(1)
        await all_digested(following, distant, times=1)
        for array in distant.engine.arrays.values():
            array[:] = np.zeros_like(array)
        following.receiver.doubt()
        assert following.receiver.serving is None
        await following.until(lambda r: r.receiver.serving is not None, "served again")
        await all_digested(following, distant, times=2)
        following.engine.engine.compute()
        assert following.receiver.status().mismatches == 0
        await served_only_what_is_in_the_log(site, following)
    assert len(distant.told) == 4


async def all_digested(following, distant, times):
    """Each array so often, once for each time that all was written, and never in a pause."""
    count = times * len(distant.names())
    await following.until(lambda _: len(distant.digested) >= count, "digested")
    assert sorted(distant.digested) == sorted([(name, False) for name in distant.names()] * times)
