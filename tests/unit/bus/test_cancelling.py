"""A task that is cancelled while it talks to the broker ends, whatever else happens then."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.client import Client

from tinsmith.bus.cancelling import CancellableClient, cancellable


async def test_a_cancellation_that_comes_with_the_result_is_not_lost():
    answer = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(cancellable(asyncio.wait_for(answer, 60)))
    await asyncio.sleep(0)
    answer.set_result("there")
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_request_of_a_client_that_swallows_it_is_cancelled(monkeypatch):
    asked = asyncio.Event()

    async def swallowing(self, subject, **options):
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return subject

    monkeypatch.setattr(Client, "request", swallowing)
    task = asyncio.create_task(CancellableClient().request("subject"))
    await asked.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_result_of_one_that_was_cancelled_before_comes_through():
    """What a task does to clean up behind itself is done to its end."""
    cleaned = []

    async def cleaning():
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(await cancellable(asyncio.sleep(0, "clean")))

    task = asyncio.create_task(cleaning())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert cleaned == ["clean"]
