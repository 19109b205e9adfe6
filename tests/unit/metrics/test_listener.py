"""The listener of a process: what it answers to whom."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tinsmith.errors import StartupError
from tinsmith.health import Health, Readiness
from tinsmith.metrics.config import MetricsConfig
from tinsmith.metrics.exposition import Exposition
from tinsmith.metrics.listener import MAX_REQUEST_BYTES
from tinsmith.metrics.pages import telling

CONFIG = MetricsConfig()


@pytest.fixture
async def health():
    return Health()


@pytest.fixture
async def url(health):
    async with telling(CONFIG, Exposition("trainer"), health) as made:
        yield made


async def sent(url, data):
    """(status, head, body) of the answer to these bytes; None when there is none."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split(b" ")[1]), head, body) if head else None


async def got(url, path):
    return await sent(url, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def test_metrics_are_told_in_the_format_of_prometheus(url):
    status, head, body = await got(url, "/metrics?name=x")

    assert (status, b"Content-Type: text/plain" in head) == (200, True)
    assert b"\ntinsmith_trainer_models_waiting{" in body


async def test_health_asks_nobody_and_readiness_tells_what_is_missing(url, health):
    assert (await got(url, "/readyz"))[0] == 200

    health.checks.append(lambda: Readiness(missing=("the broker is away",)))
    health.checks.append(lambda: Readiness(missing=("it is stopping", "the broker is away")))
    status, _, body = await got(url, "/readyz")

    assert status == 503
    assert json.loads(body)["missing"] == ["the broker is away", "it is stopping"]
    assert (await got(url, "/healthz"))[0] == 200
    assert b"tinsmith_ready{" in (await got(url, "/metrics"))[2]


async def test_models_are_told_too(url, health):
    health.checks.append(lambda: Readiness(models={"m": {"trainer": "none running"}}))

    assert json.loads((await got(url, "/readyz"))[2]) == {
        "status": "ok",
        "models": {"m": {"trainer": "none running"}},
    }


async def test_head_has_no_body(url):
    status, head, body = await sent(url, b"HEAD /healthz HTTP/1.1\r\n\r\n")

    assert (status, b"Content-Length: 15" in head, body) == (200, True, b"")


async def test_other_pages_are_named_and_other_methods_refused(url):
    status, _, body = await got(url, "/")

    assert (status, "/readyz" in json.loads(body)["detail"]) == (404, True)
    assert (await sent(url, b"POST /metrics HTTP/1.1\r\n\r\n"))[0] == 405


@pytest.mark.parametrize(
    "data", [b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"GET /%00\x00 HTTP/9\r\n\r\n"]
)
async def test_nonsense_is_refused(url, data):
    assert (await sent(url, data))[0] in (404, 405)


async def test_too_much_is_not_answered_and_the_next_is(url):
    assert await sent(url, b"GET / HTTP/1.1\r\nX: " + b"x" * (2 * MAX_REQUEST_BYTES)) is None
    assert (await got(url, "/healthz"))[0] == 200


async def test_a_taken_port_is_named_with_the_remedy(health):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = MetricsConfig(port=port)

        with pytest.raises(StartupError, match=f"metrics.port {port} is taken.*METRICS__PORT"):
            async with telling(config, Exposition("trainer"), health):
                pass


async def test_it_can_be_turned_off(health):
    async with telling(MetricsConfig(enabled=False), Exposition("trainer"), health) as url:
        assert url == ""
