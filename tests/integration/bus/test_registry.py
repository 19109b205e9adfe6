"""Registry tables and results of sampling: first writers, last values, watchers."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith import ids
from tinsmith.bus.claims import INLINE_BYTES
from tinsmith.messages import registry, sampling, table

pytestmark = pytest.mark.integration


def session(status="active"):
    return registry.Session(session_id="s", owner="o", created_ns=1, status=status)


class Seen:
    """A watcher's view, and waiting for it to hold something."""

    def __init__(self):
        self.view = {}
        self._changed = asyncio.Event()

    def __call__(self, key, value):
        self.view[key] = value
        self._changed.set()

    async def until(self, key, value):
        async with asyncio.timeout(20):
            while self.view.get(key, ...) != value:
                self._changed.clear()
                await self._changed.wait()


async def test_the_first_creator_wins(bus):
    sessions = bus.table(table.SESSIONS)
    await sessions.create("k", session())

    assert await sessions.create("k", session("expired")) == session()


async def test_put_replaces_and_delete_removes(bus):
    sessions = bus.table(table.SESSIONS)
    await sessions.put("k", session())
    await sessions.put("k", session("finished"))
    assert (await sessions.get("k")).status == "finished"

    await sessions.delete("k")

    assert await sessions.get("k") is None


async def test_a_deleted_entry_can_be_created_again(bus):
    sessions = bus.table(table.SESSIONS)
    await sessions.put("k", session())
    await sessions.delete("k")

    assert await sessions.create("k", session("finished")) == session("finished")


async def test_a_watcher_has_everything_before_watch_returns(bus):
    sessions = bus.table(table.SESSIONS)
    for n in range(1200):
        await sessions.put(f"k{n}", session())
    seen = Seen()
    watching = await sessions.watch(seen)
    await watching.close()

    assert len(seen.view) == 1200


async def test_a_watcher_of_an_empty_table_returns_at_once(bus):
    watching = await asyncio.wait_for(bus.table(table.RUNS).watch(Seen()), 5)
    await watching.close()


async def test_a_watcher_sees_changes_and_deletions(bus):
    sessions, seen = bus.table(table.SESSIONS), Seen()
    watching = await sessions.watch(seen)
    await sessions.put("k", session())
    await seen.until("k", session())
    await sessions.delete("k")
    await seen.until("k", None)
    await watching.close()


async def test_a_watcher_goes_on_after_the_broker_was_killed(broker, bus):
    sessions, seen = bus.table(table.SESSIONS), Seen()
    watching = await sessions.watch(seen)
    await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.restart)
    await sessions.put("k", session())
    await seen.until("k", session())
    await watching.close()


async def test_the_first_result_of_a_sample_stays(bus):
    sampler = ids.sampler_id(ids.new_session_id(), 0)
    for name in ("first", "second"):
        await bus.results.put_first(sampler, 3, sampling.SampleDone(request_id=name))

    assert (await bus.results.get(sampler, 3)).request_id == "first"
    assert await bus.results.get(sampler, 4) is None


async def test_a_large_result_comes_back_whole(bus):
    sampler = ids.sampler_id(ids.new_session_id(), 0)
    result = sampling.SampleDone(request_id="r", prompt_logprobs=bytes(INLINE_BYTES + 1))
    await bus.results.put_first(sampler, 1, result)

    assert await bus.results.get(sampler, 1) == result


async def test_a_watch_that_is_called_off_before_it_has_begun_leaves_nothing_behind(bus):
    def watches():
        return {task for task in asyncio.all_tasks() if task.get_name().startswith("watch ")}

    watching = asyncio.create_task(bus.table(table.SESSIONS).watch(lambda _key, _value: None))
    await asyncio.sleep(0)  # it has started its task
    (begun,) = watches()
    watching.cancel()
    await asyncio.wait({watching, begun}, timeout=20)

    assert watching.cancelled()
    assert begun.done()
