"""``/readyz`` of a gateway: what it says of the broker and of those who do the work."""

from __future__ import annotations

import pytest

from tinsmith.messages.table import SERVED
from tinsmith_gateway.readiness import readiness

MODEL = "tiny/model"


@pytest.fixture
async def ready(rig):
    for role in ("trainer", "sampler"):
        await rig.announce(role, MODEL, instance=role)
    return rig


async def told(rig, query=""):
    answer = await rig.call("GET", f"/readyz{query}", key=None)
    return answer.status, answer.json.get("status") or answer.detail


async def test_with_a_trainer_and_a_sampler_it_is_ready(ready):
    assert await told(ready) == (200, "ok")


async def test_without_its_broker_it_is_up_but_not_ready(ready):
    ready.bus.is_connected = False

    status, reason = await told(ready)

    assert (status, "broker cannot be reached" in reason) == (503, True)
    assert (await ready.call("GET", "/healthz")).status == 200


@pytest.mark.parametrize(("there", "away"), [("trainer", "sampler"), ("sampler", "trainer")])
async def test_without_anybody_of_a_role_it_is_not_ready(rig, there, away):
    await rig.announce(there, MODEL)

    assert await told(rig) == (503, f"no {away} is running; start one with 'tinsmith {away}'")


async def test_a_load_balancer_can_ask_whether_it_answers_without_them(rig):
    assert (await told(rig))[0] == 503
    assert await told(rig, "?without=workers") == (200, "ok")


async def test_where_nobody_has_ever_been_ready_that_is_said(rig):
    rig.gateway.registry.served._values.clear()

    status, reason = await told(rig)

    assert (status, reason) == (503, "no trainer and no sampler has ever been ready; start them")


async def test_one_model_without_a_trainer_degrades_it_and_is_named(ready, served, replace):
    await ready.bus.table(SERVED).put("other-trainer", replace(served[0], name="other"))

    assert await told(ready) == (200, "degraded")
    assert readiness(ready.gateway).models["other"] == {"trainer": "none running"}


async def test_a_trainer_in_trouble_and_a_fenced_sampler_are_told(rig):
    await rig.announce("trainer", MODEL, trouble="training waits for room")
    await rig.announce("sampler", MODEL, instance="s", load={"weights_fenced": 1.0})

    assert await told(rig) == (200, "degraded")
    assert readiness(rig.gateway).models[MODEL] == {
        "trainer": "1 running; training waits for room",
        "sampler": "1 running; 1 fenced from the weights of a model",
    }
