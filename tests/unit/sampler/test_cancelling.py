"""Requests that are stopped from outside."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.errors import Gone
from tinsmith.messages.services import SampleCancelled
from tinsmith_sampler.cancelling import Cancellable


@pytest.fixture
def in_hand():
    return Cancellable()


async def test_work_that_nobody_stops_is_done(in_hand):
    async def work():
        return 3

    assert await in_hand.run("r", work()) == 3


async def test_cancelled_work_ends_with_an_error_of_the_user_s(in_hand):
    running = asyncio.create_task(in_hand.run("r", asyncio.Event().wait()))
    await asyncio.sleep(0)

    in_hand.cancel(SampleCancelled(request_id="other"))
    in_hand.cancel(SampleCancelled(request_id="r"))

    with pytest.raises(Gone, match="cancelled by its client"):
        await running


async def test_when_the_process_ends_the_work_was_not_cancelled_by_its_client(in_hand):
    running = asyncio.create_task(in_hand.run("r", asyncio.Event().wait()))
    await asyncio.sleep(0)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
