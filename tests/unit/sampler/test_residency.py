"""Which adapters are loaded: the limit, the one that makes room, failures and cancellation."""

from __future__ import annotations

import asyncio
import random

import pytest

from tinsmith.errors import InvalidRequest
from tinsmith_sampler.residency import Residency


class Shelf:
    """The part of an engine that holds adapters; ``bad`` versions cannot be loaded."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.loads: list[str] = []
        self.bad: set[str] = set()

    async def load_adapter(self, version, files):
        await asyncio.sleep(0)  # as a real load, it lets others run
        if version in self.bad:
            raise InvalidRequest(f"adapter {version}: bad")
        self.loads.append(version)
        self.loaded.add(version)

    async def unload_adapter(self, version):
        await asyncio.sleep(0)
        self.loaded.remove(version)


async def fetch() -> dict[str, bytes]:
    await asyncio.sleep(0)
    return {}


async def settle() -> None:
    """Let every task run until it waits for another."""
    for _ in range(50):
        await asyncio.sleep(0)


class Holder:
    """Holds an adapter until ``release``."""

    def __init__(self, residency: Residency, version: str, fetch=fetch) -> None:
        self.is_holding = False
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._hold(residency, version, fetch))

    async def _hold(self, residency, version, fetch):
        async with residency.hold(version, fetch):
            self.is_holding = True
            await self._end.wait()

    async def release(self) -> None:
        self._end.set()
        await self.task


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def residency(shelf) -> Residency:
    return Residency(shelf, 2)


async def use(residency, *versions: str) -> None:
    for version in versions:
        async with residency.hold(version, fetch):
            pass


async def test_an_adapter_stays_loaded_for_the_next_request(residency, shelf):
    await use(residency, "a", "a")

    assert shelf.loads == ["a"]


async def test_many_requests_at_once_load_an_adapter_once(residency, shelf):
    await asyncio.gather(*(use(residency, "a") for _ in range(10)))

    assert shelf.loads == ["a"]


async def test_the_least_recently_used_adapter_makes_room(residency, shelf):
    await use(residency, "a", "b", "a", "c")

    assert shelf.loaded == {"a", "c"}
    assert residency.versions == ("a", "c")


async def test_an_adapter_in_use_does_not_make_room(residency, shelf):
    holder = Holder(residency, "a")
    await settle()
    await use(residency, "b", "c")

    assert shelf.loaded == {"a", "c"}
    await holder.release()


async def test_where_all_are_in_use_the_next_one_waits_until_one_is_free(residency, shelf):
    first, second = Holder(residency, "a"), Holder(residency, "b")
    third = Holder(residency, "c")
    await settle()

    assert (first.is_holding, second.is_holding, third.is_holding) == (True, True, False)
    await second.release()
    await settle()
    assert third.is_holding
    assert shelf.loaded == {"a", "c"}
    await asyncio.gather(first.release(), third.release())


async def test_a_loaded_adapter_is_served_while_others_wait_for_room(residency):
    holders = [Holder(residency, version) for version in "abc"]
    await settle()
    again = Holder(residency, "a")
    await settle()

    assert again.is_holding
    await asyncio.gather(*(one.release() for one in [*holders, again]))


async def test_a_failed_load_leaves_nothing_and_the_next_caller_tries_anew(residency, shelf):
    shelf.bad = {"a"}
    with pytest.raises(InvalidRequest, match="a: bad"):
        await use(residency, "a")

    assert residency.versions == ()
    shelf.bad = set()
    await use(residency, "a")
    assert shelf.loaded == {"a"}


async def test_a_failed_fetch_takes_no_place(residency, shelf):
    async def missing():
        raise KeyError("gone")

    for version in "abc":
        with pytest.raises(KeyError):
            async with residency.hold(version, missing):
                pass
    await use(residency, "d", "e")

    assert shelf.loaded == {"d", "e"}


async def test_a_failure_reaches_everyone_who_waits_for_that_version(residency, shelf):
    shelf.bad = {"a"}
    calls = [use(residency, "a") for _ in range(3)]

    outcomes = await asyncio.gather(*calls, use(residency, "b"), return_exceptions=True)

    assert [type(one) for one in outcomes] == [InvalidRequest] * 3 + [type(None)]


async def test_when_the_loader_is_cancelled_the_next_in_line_loads(residency, shelf):
    never = asyncio.Event()
    loader = Holder(residency, "a", fetch=never.wait)
    await settle()
    waiting = Holder(residency, "a")
    await settle()
    loader.task.cancel()
    await settle()

    assert waiting.is_holding
    assert shelf.loads == ["a"]
    await waiting.release()


async def test_a_caller_cancelled_while_it_waits_for_room_is_passed_over(residency):
    holders = [Holder(residency, version) for version in "ab"]
    await settle()
    cancelled, patient = Holder(residency, "c"), Holder(residency, "d")
    await settle()
    cancelled.task.cancel()
    await holders[0].release()
    await settle()

    assert patient.is_holding
    await asyncio.gather(holders[1].release(), patient.release())


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_comes_and_goes_what_is_held_is_loaded_and_within_the_limit(seed):
    shelf, chance = Shelf(), random.Random(seed)
    residency = Residency(shelf, 3)
    shelf.bad = {"f"}

    async def visit(version: str, turns: int) -> None:
        async with residency.hold(version, fetch):
            for _ in range(turns):
                assert version in shelf.loaded
                assert len(shelf.loaded) <= 3
                await asyncio.sleep(0)

    visits = [visit(chance.choice("abcdef"), chance.randrange(5)) for _ in range(200)]
    outcomes = await asyncio.gather(*visits, return_exceptions=True)

    assert {type(one) for one in outcomes} == {type(None), InvalidRequest}
    assert set(residency.versions) == shelf.loaded
