"""What holds for every request: keys, content types, sizes, errors."""

from __future__ import annotations

import asyncio
import gzip

import pytest
import structlog
from backports import zstd

from tinsmith.messages.ops import ForwardBackward, Refused
from tinsmith.messages.table import OPS
from tinsmith_gateway.config import MIB, GatewayConfig

KEY = "tml-alice"
ZSTD = {"Content-Encoding": "zstd"}


@pytest.fixture
def config():
    return GatewayConfig(
        long_poll_s=0.3, max_body_bytes=MIB, max_inflated_bytes=2 * MIB, max_json_bytes=MIB
    )


async def body_of(rig, message, **kwargs):
    answer = await rig.post_proto(message, **kwargs)
    assert answer.status == 200, answer.raw
    return rig.bus.queued(OPS)[-1].body


async def test_a_request_without_a_key_is_unauthorized(rig):
    answer = await rig.get("training_runs", key=None)

    assert (answer.status, answer.detail.partition(":")[0]) == (401, "X-API-Key")


async def test_a_wrong_key_is_unauthorized_at_once(rig):
    answer = await rig.post("client/config", {"sdk_version": "0.38.0"}, key="tml-wrong")

    assert answer.status == 401


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/api/v1/healthz"])
async def test_health_needs_no_key(rig, path):
    for role in ("trainer", "sampler"):
        await rig.announce(role, "tiny/model", instance=role)
    answer = await rig.call("GET", path, key=None)

    assert (answer.status, answer.json) == (200, {"status": "ok"})


async def test_an_unknown_route_is_404_in_json(rig):
    answer = await rig.post("no_such_thing", {})

    assert (answer.status, "/api/v1/no_such_thing" in answer.detail) == (404, True)


async def test_a_wrong_method_is_405_in_json(rig):
    answer = await rig.get("asample")

    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert "asample" in answer.detail


async def test_a_malformed_body_is_400(rig):
    answer = await rig.call(
        "POST", "/api/v1/create_session", data=b"{", headers={"Content-Type": "application/json"}
    )

    assert (answer.status, "not JSON" in answer.detail) == (400, True)


async def test_a_wrong_type_is_named_by_its_path(rig):
    answer = await rig.post("session_heartbeat", {"session_id": 3})

    assert (answer.status, "$.session_id" in answer.detail) == (400, True)


async def test_a_wrong_content_type_is_415(rig):
    answer = await rig.call("POST", "/api/v1/create_session", data=b"x")

    assert (answer.status, "application/json" in answer.detail) == (415, True)


async def test_an_unknown_coding_is_415(rig):
    answer = await rig.post_proto(b"x", headers={"Content-Encoding": "br"})

    assert (answer.status, "'br'" in answer.detail) == (415, True)


@pytest.mark.parametrize(("coding", "compress"), [("zstd", zstd.compress), ("gzip", gzip.compress)])
async def test_a_compressed_body_is_read(rig, recorded, coding, compress):
    message = recorded("forward_backward_zstd", model_id=await rig.model())
    raw = compress(message.SerializeToString())

    body = await body_of(rig, raw, headers={"Content-Encoding": coding})

    assert isinstance(body, ForwardBackward)


@pytest.mark.parametrize("raw", [b"plain", zstd.compress(b"x" * 100)[:-3], b""])
async def test_a_broken_compressed_body_is_400(rig, raw):
    answer = await rig.post_proto(raw, headers=ZSTD)

    assert (answer.status, "zstd" in answer.detail) == (400, True)


async def test_a_large_body_is_413(rig):
    headers = {"Content-Type": "application/json"}

    answer = await rig.call("POST", "/api/v1/create_session", data=bytes(MIB + 1), headers=headers)

    assert (answer.status, str(MIB) in answer.detail) == (413, True)


async def test_a_small_body_that_becomes_large_is_413(rig):
    bomb = zstd.compress(bytes(64 * MIB))
    headers = ZSTD | {"Content-Type": "application/json"}

    answer = await rig.call("POST", "/api/v1/create_session", data=bomb, headers=headers)

    assert len(bomb) < 10_000
    assert (answer.status, "decompressed" in answer.detail) == (413, True)


async def test_a_body_that_breaks_off_is_no_crash(rig):
    host, port = rig.url.removeprefix("http://").split(":")
    head = f"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with structlog.testing.capture_logs() as logs:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        await writer.drain()
        writer.close()
        while not logs:
            await asyncio.sleep(0.001)

    assert [(line["log_level"], line["event"]) for line in logs] == [("info", "request refused")]


@pytest.mark.parametrize("compress", [bytes, zstd.compress])
async def test_a_training_request_that_is_too_large_takes_its_place(rig, recorded, compress):
    model = await rig.model()
    message = recorded("forward_backward_ppo", model_id=model, seq_id=5)
    message.data[0].model_input[0].encoded_text.tokens = bytes(3 * MIB)
    headers = ZSTD if compress is zstd.compress else {}

    body = await body_of(rig, compress(message.SerializeToString()), headers=headers)

    assert rig.bus.queued(OPS)[-1].seq == 5
    assert isinstance(body, Refused)
    assert (body.reason.code, body.reason.category) == ("BodyTooLarge", "user")


async def test_a_training_request_of_more_than_a_megabyte_is_read(rig, recorded):
    message = recorded("forward_backward_ppo", model_id=await rig.model())
    message.data[0].model_input[0].encoded_text.tokens = bytes(MIB + 400)

    body = await body_of(rig, zstd.compress(message.SerializeToString()), headers=ZSTD)

    assert body.data[0].tokens.shape == (MIB // 4 + 100,)


async def test_a_broker_that_is_away_is_503_and_may_be_asked_again(rig):
    session = await rig.session()
    rig.bus.is_connected = False

    answer = await rig.post("session_heartbeat", {"session_id": session})

    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


async def test_an_error_nobody_foresaw_is_500_and_tells_nothing(rig, monkeypatch):
    monkeypatch.setattr(rig.gateway.models, "capabilities", lambda: {}["secret"])

    answer = await rig.get("get_server_capabilities")

    assert (answer.status, "secret" in answer.detail) == (500, False)
    assert answer.headers["X-Request-Id"] in answer.detail
