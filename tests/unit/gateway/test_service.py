"""The gateway as a service: it listens, says where, and stops when it is told to."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
import structlog

from tinsmith.config import Config
from tinsmith.errors import StartupError
from tinsmith.messages.services import ServiceAlive
from tinsmith.service import ServiceContext
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.service import serve

LOG = structlog.get_logger()


@pytest.fixture
def context(fake, blobs, seals, tmp_path):
    def make(**fields):
        config = Config(data_dir=tmp_path, sections=(GatewayConfig(**fields),))
        return ServiceContext(
            name="gateway",
            config=config,
            bus=fake,
            blobs=blobs,
            seals=seals,
            instance="gateway-test",
            stopping=asyncio.Event(),
            log=LOG,
        )

    return make


async def test_a_gateway_answers_where_it_says_until_it_is_stopped(context, fake, monkeypatch):
    made = context(port=0, api_keys=("tml-a",))
    urls = asyncio.Queue()
    ready = ServiceContext.ready

    async def noting(self, *, url="", **kwargs):
        await ready(self, url=url, **kwargs)
        urls.put_nowait(url)

    monkeypatch.setattr(ServiceContext, "ready", noting)
    running = asyncio.create_task(serve(made))
    url = await urls.get()
    async with aiohttp.ClientSession() as http, http.get(f"{url}/healthz") as reply:
        assert reply.status == 200

    made.stopping.set()
    await running

    assert [type(message) for message in fake.emitted] == [ServiceAlive]
    assert fake.listeners == 0


async def test_a_port_that_is_taken_is_named_with_the_remedy(context, fake):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(StartupError, match=f"port {port} is taken.*TINSMITH_GATEWAY__PORT"):
            await serve(context(port=port, api_keys=("tml-a",)))

    assert fake.listeners == 0


async def test_an_address_that_is_not_of_this_machine_is_named(context):
    with pytest.raises(StartupError, match=r"192\.0\.2\.1.*gateway\.host"):
        await serve(context(host="192.0.2.1", api_keys=("tml-a",)))


async def test_a_gateway_without_a_key_starts_and_refuses_everybody(context, monkeypatch):
    made = context(port=0)
    urls = asyncio.Queue()
    monkeypatch.setattr(ServiceContext, "ready", lambda _, *, url, **__: urls.put(url))
    running = asyncio.create_task(serve(made))
    url = await urls.get()
    async with aiohttp.ClientSession() as http, http.get(f"{url}/api/v1/sessions") as reply:
        assert reply.status == 401

    made.stopping.set()
    await running
