"""The models that a trainer holds: their number, and deliveries of what is held already."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.messages.ops import Placement
from tinsmith_trainer.holdings import Holdings


class Delivery:
    def __init__(self, model_id):
        self.message = Placement(model_id=model_id, base_model="b")
        self.said = []

    async def ack(self):
        self.said.append("ack")

    def let_go(self):
        self.said.append("let go")


@pytest.fixture
def load():
    return {}


@pytest.fixture
def holdings(load):
    return Holdings(2, load)


async def test_there_is_room_up_to_the_limit_and_again_after_a_release(holdings, load):
    first, _ = (holdings.take(Delivery(model)) for model in "ab")
    waiting = asyncio.ensure_future(holdings.room())
    assert load == {"models": 2, "room": 0}
    await first.ack()
    await waiting

    assert load == {"models": 1, "room": 1}


async def test_a_model_that_comes_again_is_held_once_and_by_the_newer_delivery(holdings, load):
    old, new = Delivery("a"), Delivery("a")
    held = holdings.take(old)
    assert holdings.take(new) is None
    await held.ack()

    assert (old.said, new.said) == (["let go"], ["ack"])
    assert load == {"models": 0, "room": 2}


async def test_a_model_that_was_released_can_be_taken_again(holdings):
    holdings.take(Delivery("a")).let_go()

    assert holdings.take(Delivery("a")) is not None
