"""Sessions over HTTP, and their end."""

from __future__ import annotations

import pytest
from tests.clock import Clock

from tinsmith import ids
from tinsmith.bus.views import View
from tinsmith.errors import BrokerUnavailable
from tinsmith.messages.registry import Session
from tinsmith.messages.services import SessionAlive
from tinsmith.messages.table import SESSION_ALIVE, SESSIONS
from tinsmith_gateway.liveness import Hearing
from tinsmith_gateway.sessions import Sessions

OTHER = "tml-bob"


async def beat(rig, session, **kwargs):
    return await rig.post("session_heartbeat", {"session_id": session}, **kwargs)


async def finish(rig, session, kind="success", detail=None, **kwargs):
    body = {"reason": {"type": kind}, "detail": detail}
    return await rig.post(f"sessions/{session}/finish", body, **kwargs)


async def entry(rig, session):
    return await rig.bus.table(SESSIONS).get(session)


async def test_a_session_is_stored_with_what_the_client_said(rig, recorded):
    body = recorded("create_session", tags=["a"])

    answer = await rig.post("create_session", body)

    stored = await entry(rig, ids.check_session_id(answer.json["session_id"]))
    assert (stored.display_name, stored.user_metadata) == ("disp", {"who": "me"})
    assert (stored.tags, stored.sdk_version, stored.status) == (("a",), "0.38.0", "active")


async def test_a_session_is_labelled_with_its_project_and_so_are_its_runs(rig):
    body = {"project_id": "team/x"}
    refused = await rig.post("create_session", body)
    session = (await rig.post("create_session", {"project_id": "p"})).json["session_id"]
    model = await rig.model(session)
    await rig.model()

    listed = (await rig.get("training_runs?project_id=p")).json["training_runs"]

    assert [run["training_run_id"] for run in listed] == [model]
    assert refused.status == 400
    assert "project_id: 'team/x'" in refused.detail


async def test_a_heartbeat_is_answered_and_told_to_the_other_gateways(rig):
    session = await rig.session()

    answer = await beat(rig, session)

    assert (answer.status, answer.json) == (200, {"type": "session_heartbeat"})
    assert rig.bus.emitted[-1] == SessionAlive(session_id=session)


async def test_a_heartbeat_of_a_session_that_has_ended_is_410(rig):
    session = await rig.session()
    await finish(rig, session, "errored", "boom")

    answer = await beat(rig, session)

    assert (answer.status, "finished: errored: boom" in answer.detail) == (410, True)


@pytest.mark.parametrize("session", ["s" * 26, "nonsense"])
async def test_a_session_that_is_not_there_has_no_heartbeat(rig, session):
    assert (await beat(rig, session)).status in (400, 404)


async def test_a_session_of_someone_else_is_not_there(rig):
    session = await rig.session(key=OTHER)

    assert (await beat(rig, session)).status == 404
    assert (await finish(rig, session)).status == 404


async def test_the_first_reason_for_an_end_stays(rig):
    session = await rig.session()

    answers = [await finish(rig, session, kind) for kind in ("success", "errored")]

    assert [answer.status for answer in answers] == [200, 200]
    assert (await entry(rig, session)).detail == "success"


async def test_a_finished_session_takes_no_more_work(rig, new_model, recorded):
    session = await rig.session()
    model, sampler = await rig.model(session), await rig.sampler(session)
    await finish(rig, session)
    sample = recorded("asample_topk", sampling_session_id=sampler)

    answers = [
        await rig.post("create_model", new_model(session, 1)),
        await rig.post("optim_step", {"model_id": model, "seq_id": 1}),
        await rig.post("asample", sample),
    ]

    assert [answer.status for answer in answers] == [410, 410, 410]


@pytest.mark.parametrize("name", ["client_config", "client_dynamic_config"])
async def test_the_client_is_told_how_to_work(rig, recorded, name):
    path = name.replace("client_", "client/", 1)

    answer = await rig.post(path, recorded(name))

    assert answer.status == 200
    assert answer.json["sample_cancel_enabled" if "dynamic" in name else "parallel_fwdbwd_chunks"]


async def test_telemetry_is_accepted(rig, recorded):
    answer = await rig.post("telemetry", recorded("telemetry_session_start"))

    assert (answer.status, answer.json) == (200, {"status": "accepted"})


@pytest.fixture
async def watched(fake):
    """Sessions on a clock that the test moves, and one that was just opened."""
    clock = Clock()
    hearing = Hearing(clock)
    view = View(fake.table(SESSIONS), lambda s: s.owner)
    sessions = Sessions(fake, view, hearing, timeout_s=300)
    session = Session(session_id=ids.new_session_id(), owner="o", created_ns=1)
    await fake.table(SESSIONS).put(session.session_id, session)
    view.apply(session.session_id, session)

    async def status_after(seconds):
        clock.now += seconds
        await sessions.expire_silent()
        return (await fake.table(SESSIONS).get(session.session_id)).status

    sessions.status_after, sessions.one, sessions.hearing = status_after, session, hearing
    return sessions


async def test_a_session_that_falls_silent_expires(watched):
    assert await watched.status_after(300) == "active"
    assert await watched.status_after(1) == "expired"


async def test_a_sign_of_life_starts_the_wait_anew(watched):
    await watched.status_after(299)
    watched.touch(watched.one.session_id)

    assert await watched.status_after(300) == "active"
    assert await watched.status_after(1) == "expired"


async def test_using_a_session_is_a_sign_of_life(watched):
    await watched.status_after(299)
    watched.check_active(watched.one)

    assert await watched.status_after(299) == "active"


async def test_a_gateway_that_was_cut_off_ends_no_session(watched):
    await watched.status_after(299)
    watched.hearing.tick(is_connected=False)

    assert await watched.status_after(299) == "active"


async def test_a_session_cannot_expire_while_the_broker_is_away_but_does_later(watched, fake):
    fake.is_connected = False
    with pytest.raises(BrokerUnavailable):
        await watched.status_after(301)
    fake.is_connected = True

    assert await watched.status_after(0) == "expired"


async def test_a_heartbeat_heard_by_another_gateway_counts(rig):
    session = await rig.session()
    rig.gateway.sessions._heard.clear()

    await rig.bus.emit(SESSION_ALIVE, SessionAlive(session_id=session))

    assert session in rig.gateway.sessions._heard


async def test_signs_of_life_of_the_dead_are_forgotten(watched):
    watched.touch("gone")
    await watched.status_after(301)

    assert watched._heard == {}
