"""Rounds go on whatever a round meets, and end their watches with themselves."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from tinsmith.bus import Subscription
from tinsmith.errors import BrokerUnavailable, StorageFull
from tinsmith_checkpointer.rounds import keep_going_round

PATIENCE_S = 60


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), StorageFull("full")])
async def test_a_round_that_fails_is_followed_by_another(error):
    left, is_done, closed = [error, None], asyncio.Event(), []

    async def go_round():
        if failure := left.pop(0):
            raise failure
        is_done.set()
        await asyncio.Event().wait()

    async def watch():
        async def close():
            closed.append(True)

        return Subscription(close)

    rounds = asyncio.create_task(
        keep_going_round(go_round, [watch], structlog.get_logger(), every_s=0)
    )
    async with asyncio.timeout(PATIENCE_S):
        await is_done.wait()
    rounds.cancel()
    await asyncio.wait([rounds])

    assert closed == [True]
