"""Keys that were made for a name, over HTTP: in use, exchanged for tokens, ended."""

from __future__ import annotations

import asyncio
import time

import jwt
import pytest
from msgspec import structs

from tinsmith import keys
from tinsmith.messages.registry import ApiKey
from tinsmith.messages.table import API_KEYS
from tinsmith_gateway.config import GatewayConfig

ME = "/api/v1/auth/apikey/me"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def config():
    return GatewayConfig(long_poll_s=30, recheck_s=30, exchange_keys=True)


@pytest.fixture
def made(rig):
    async def make(name="carol", **fields):
        key = keys.new_key()
        entry = ApiKey(
            digest=keys.digest(key),
            owner=keys.owner_of_name(name),
            name=name,
            last_four=key[-4:],
            created_ns=time.time_ns(),
            **fields,
        )
        await rig.bus.table(API_KEYS).put(entry.digest, entry)
        await asyncio.sleep(0)  # the watch brings it
        return key

    return make


async def revoke(rig, key):
    table = rig.bus.table(API_KEYS)
    await table.update(keys.digest(key), keys.revoked)
    await asyncio.sleep(0)


async def test_two_keys_of_a_name_reach_the_same_runs(rig, made):
    first, second = await made(), await made()
    session = await rig.session(key=first)

    assert (await rig.get(f"sessions/{session}", key=second)).status == 200
    assert (await rig.get(f"sessions/{session}", key=await made("dave"))).status == 404


async def test_sessions_go_to_the_project_of_their_key_unless_they_name_one(rig, made):
    key = await made(project_id="p1")
    await rig.session(key=key)
    await rig.post("create_session", {"project_id": "p2"}, key=key)

    assert {s.project_id for s in rig.gateway.registry.sessions} == {"p1", "p2"}


async def test_a_revoked_key_is_refused_at_once(rig, made):
    key = await made()
    assert (await rig.get("sessions", key=key)).status == 200
    await revoke(rig, key)

    answer = await rig.get("sessions", key=key)

    assert (answer.status, "revoked" in answer.detail) == (401, True)


async def test_a_poll_that_is_held_gives_nothing_to_a_key_that_was_revoked_meanwhile(rig, made):
    key = await made()
    model = await rig.model(key=key)
    await rig.announce("trainer", "tiny/model")
    poll = asyncio.create_task(rig.poll(f"{model}:0", key=key))
    while not len(rig.gateway.futures.waiters):
        await asyncio.sleep(0.01)
    await revoke(rig, key)
    rig.gateway.futures.waiters.wake_all()
    rig.gateway.futures.release()

    assert (await poll).status == 401


async def test_the_holder_of_a_key_ends_it(rig, made):
    key = await made()
    assert (await rig.call("GET", ME, key=key)).json["name"] == "carol"

    assert (await rig.call("DELETE", ME, key=key)).status == 200

    assert (await rig.call("GET", ME, key=key)).status == 401
    entry = await rig.bus.table(API_KEYS).get(keys.digest(key))
    assert entry.revoked_ns is not None


async def test_a_configured_key_is_not_ended_from_outside(rig):
    answer = await rig.call("DELETE", ME)

    assert (answer.status, "gateway.api_keys" in answer.detail) == (400, True)
    assert (await rig.call("GET", ME)).status == 200


async def token_for(rig, key):
    return await rig.post("auth/token", {}, key=key)


async def test_a_key_is_exchanged_for_a_token_that_stands_for_it(rig, made):
    key = await made()
    assert (await rig.post("client/config", {}, key=key)).json["pjwt_auth_enabled"] is True
    token = (await token_for(rig, key)).json["jwt"]
    session = await rig.session(key=token)

    assert (await rig.get(f"sessions/{session}", key=key)).status == 200
    claims = jwt.decode(token, options={"verify_signature": False})
    assert claims["sub"] == keys.owner_of_name("carol")
    assert claims["exp"] - claims["iat"] == 900

    await revoke(rig, key)
    assert (await rig.get("sessions", key=token)).status == 401


async def test_a_token_is_not_exchanged_for_another(rig, made):
    token = (await token_for(rig, await made())).json["jwt"]

    assert (await token_for(rig, token)).status == 401


async def test_a_client_is_told_to_exchange_its_key_again(rig):
    answer = await rig.get("sessions", key="eyJhbGciOiJIUzI1NiJ9.e30.x")

    assert answer.status == 401
    assert 'error="invalid_token"' in answer.headers["WWW-Authenticate"]


async def test_a_revoked_entry_stays_revoked(rig, made):
    key = await made()
    await revoke(rig, key)
    first = await rig.bus.table(API_KEYS).get(keys.digest(key))
    await revoke(rig, key)

    assert await rig.bus.table(API_KEYS).get(keys.digest(key)) == first
    assert keys.revoked(structs.replace(first, revoked_ns=None)).revoked_ns
