"""`tinsmith keys` against a real broker, and two gateways that hear of it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from aiohttp import web

from tinsmith import keys
from tinsmith.config import Config
from tinsmith.messages.table import REGISTRY_STREAM
from tinsmith.sealing import Seals
from tinsmith_gateway.app import build_app, build_runner
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.gateway import Gateway

PATIENCE_S = 30


@asynccontextmanager
async def gateway(bus, folder):
    made = Gateway.build(GatewayConfig(), bus, [], Seals(bus, Config(data_dir=folder)))
    await made.start()
    runner = build_runner(build_app(made))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await made.close()


@pytest.fixture
async def gateways(bus, tmp_path):
    async with gateway(bus, tmp_path) as one, gateway(bus, tmp_path) as other:
        yield one, other


@pytest.fixture
def run(bus, tmp_path):
    async def run(*args):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tinsmith", "keys", *args,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={
                "PATH": os.environ["PATH"],
                "TINSMITH_NATS_URL": bus._config.url,
                "TINSMITH_DATA_DIR": str(tmp_path / "data"),
            },
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, out.decode(), err.decode()

    return run


async def statuses(gateways, key):
    async with aiohttp.ClientSession(headers={"X-API-Key": key}) as http:
        answers = [await http.get(f"{url}/api/v1/sessions") for url in gateways]
        return [answer.status for answer in answers]


async def become(gateways, key, status):
    async with asyncio.timeout(PATIENCE_S):
        while set(await statuses(gateways, key)) != {status}:
            await asyncio.sleep(0.01)


async def test_a_key_is_made_used_listed_and_revoked_at_every_gateway(run, gateways, bus):
    code, out, err = await run("create", "alice", "--project", "p1", "--expires-days", "1")
    key = out.strip()
    assert (code, "only time" in err) == (0, True)
    assert re.fullmatch(r"tml-[0-9a-f]{48}", key)
    await become(gateways, key, 200)

    code, out, _ = await run("list")
    (row,) = out.splitlines()[1:]
    assert code == 0
    assert all(part in row for part in ("alice", "p1", key[-4:], "valid until"))
    assert key not in out

    code, out, _ = await run("revoke", row.split()[0])
    assert (code, "alice" in out) == (0, True)
    await become(gateways, key, 401)
    assert "revoked 2" in (await run("list"))[1]


async def test_the_key_itself_is_nowhere_in_the_registry(run, bus):
    key = (await run("create", "alice"))[1].strip()
    js = bus._client.jetstream()
    info = await js.stream_info(REGISTRY_STREAM)

    stored = [
        (await js.get_msg(REGISTRY_STREAM, seq)).data
        for seq in range(info.state.first_seq, info.state.last_seq + 1)
    ]

    assert any(b"alice" in data for data in stored)
    assert not any(key.removeprefix("tml-").encode() in data for data in stored)


async def test_a_key_is_revoked_by_itself_too(run, gateways):
    key = (await run("create", "bob"))[1].strip()
    await become(gateways, key, 200)

    assert (await run("revoke", key))[0] == 0

    await become(gateways, key, 401)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("create", "a b"), "owner: 'a b'"),
        (("create", "alice", "--project", "a/b"), "--project: 'a/b'"),
        (("revoke", "12345678"), "no such key"),
        (("revoke", "x"), "'tinsmith keys list'"),
    ],
)
async def test_what_cannot_be_done_is_said_in_one_line(run, args, words):
    code, out, err = await run(*args)

    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert words in err


async def test_what_operators_do_with_keys_is_in_the_owners_trail(run, bus):
    key = (await run("create", "dora"))[1].strip()
    await run("limit", key, "--sampling-share", "7")
    await run("revoke", key)
    today = datetime.now(UTC).date()
    owner = keys.owner_of_name("dora")
    # Midnight may lie between.
    days = [today, today - timedelta(days=1)]
    found = [entry for day in days for entry in await bus.audit.of_day(owner, day, "keys")]
    assert [entry.event for entry in found] == ["key_created", "key_limited", "key_revoked"]
    assert {entry.details["by"] for entry in found} == {"operator"}
    assert key not in str(found)
