"""Every route, sent what nobody should send: it answers, and never with a 5xx."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import tracemalloc
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.unit.gateway import hostile
from tests.unit.gateway.conftest import KEY, MODEL
from tests.unit.gateway.hostile import Call

from tinsmith.messages.table import OPS
from tinsmith_gateway import bodies
from tinsmith_gateway.app import build_app
from tinsmith_gateway.config import MIB, GatewayConfig
from tinsmith_gateway.wire import requests

PATIENCE_S = 30.0
LONG = b"x" * 99_999
ROUTES = sorted(
    {
        (route.method, route.resource.canonical)
        for route in build_app(None).router.routes()
        if route.method != "HEAD"
    }
)
FUZZ = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
FUZZ_MORE = settings(FUZZ, max_examples=100)


@pytest.fixture
def config():
    return GatewayConfig(
        long_poll_s=0.01,
        recheck_s=0.01,
        max_samples=8,
        max_body_bytes=MIB,
        max_inflated_bytes=2 * MIB,
        max_json_bytes=MIB,
    )


class Target:
    """A gateway with one of everything, and the values by which it is asked for."""

    def __init__(self, rig):
        self.rig = rig
        host, port = rig.url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.decoded = set()
        self.seq = 100
        self.read = {}

    async def prepare(self):
        session = await self.rig.session()
        self.model = await self.rig.model(session)
        self.recorded = list(hostile.recorded_training(self.model))
        path = await self.rig.checkpoint(self.model)
        self.good = hostile.known_values(session, self.model, path, MODEL) | {
            "sampling_session_id": await self.rig.sampler(session)
        }

    def recording(self, decode):
        """``decode``, which notes what it is asked for."""

        def recorded(raw, type_, **options):
            self.decoded.add(type_)
            return decode(raw, type_, **options)

        return recorded

    async def reads(self, route):
        """What a right request to the route has: the fields that it decodes, and parameters."""
        values = {name: self.good.get(name, "x") for name in hostile.parameters(route[1])}
        if route not in self.read:
            self.decoded.clear()
            for body in (b"{}", hostile.encoded(self.good).encode()):
                await self.exchange(route[0], Call(path_of(route, values), (), body))
            found = (getattr(type_, "__struct_fields__", ()) for type_ in self.decoded)
            self.read[route] = {name: self.good.get(name) for name in sorted(set().union(*found))}
        good = self.read[route]
        return {name: value for name, value in good.items() if value is not None}, values

    async def train(self, body):
        """The status of a forward_backward."""
        head = (b"Content-Type: application/x-protobuf",)
        call = Call(b"/api/v1/forward_backward", head, body)
        return check("POST", await self.exchange("POST", call))

    async def exchange(self, method, call, *, is_cut=False):
        """What comes back for a call; nothing must for one whose body is cut."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(as_sent(method, call))
                await writer.drain()
                if is_cut:
                    writer.write_eof()
                return await answer_from(reader)
        finally:
            writer.close()


async def answer_from(reader):
    """One whole answer; the connection may stay open after it, for what is left of a body."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    if head.startswith(b"HTTP/1.1 100"):
        return await answer_from(reader)
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return head + (await reader.readexactly(int(length[1])) if length else await reader.read())


def as_sent(method, call):
    named = {line.partition(b":")[0].lower() for line in call.head}
    head = [b"%s %s HTTP/1.1" % (method.encode(), call.target), b"Connection: close", *call.head]
    defaults = {b"host": b"x", b"x-api-key": KEY.encode(), b"content-type": b"application/json"}
    if not named & {b"transfer-encoding", b"content-length"}:
        defaults[b"content-length"] = b"%d" % len(call.body)
    head += [b"%s: %s" % item for item in defaults.items() if item[0] not in named]
    return b"\r\n".join(head) + b"\r\n\r\n" + call.body


def check(method, answer):
    """An answer that a client can make sense of."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    # /readyz is right: the other services are not there.
    assert status < 500 or b'"no trainer is running' in body, answer[:2000]
    assert b"internal error" not in body
    if status >= 400 and method != "HEAD":
        assert body.strip(), head
    if status >= 400 and b"application/json" in head and body:
        told = json.loads(body)
        assert told.get("detail") or told.get("error") or told["type"] == "try_again"
        assert len(body) < 20_000, "an error echoes too much of what was sent"
    return status


@pytest.fixture
async def target(rig, monkeypatch):
    target = Target(rig)
    await target.prepare()
    for module, name in ((requests, "decode"), (msgspec, "convert")):
        monkeypatch.setattr(module, name, target.recording(getattr(module, name)))
    return target


def path_of(route, values):
    """The path of a route, with ``values`` for its parameters."""
    path = route[1]
    for name, value in values.items():
        path = path.replace("{" + name + "}", quote(str(value), safe=""))
    return path.encode()


@st.composite
def calls(draw, route, good, values):
    """A request that is wrong in one way, or in some; ``good`` is the body that the route reads."""
    target = path_of(route, values)
    ways = ["head", *["path"] * bool(values), *["body", "body", "bytes", "coding"] * bool(good)]
    ways += ["query", "query"] * (route[0] == "GET")
    match draw(st.sampled_from(ways)):
        case "path":
            broken = draw(st.sampled_from(sorted(values)))
            end = draw(st.sampled_from([b"", b"/", b"//", b"%2F", b"%00", b"\xff", b"%ff", b";"]))
            return Call(path_of(route, values | {broken: draw(hostile.texts())}) + end)
        case "query":
            return Call(target + b"?" + draw(hostile.queries()))
        case "head":
            head = draw(st.lists(hostile.HEADS, min_size=1, max_size=2, unique=True))
            return Call(target, tuple(head), hostile.encoded(good).encode())
        case "bytes":
            return Call(target, (), draw(hostile.mutated(hostile.encoded(good).encode())))
        case "coding":
            return Call(target, *draw(hostile.codings(hostile.encoded(good).encode())))
        case _:
            return Call(target, (), draw(hostile.bodies(good)))


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
@FUZZ
@given(data=st.data())
async def test_no_request_to_any_route_is_a_crash(target, route, data):
    good, values = await target.reads(route)
    call = data.draw(calls(route, good, values))

    check(route[0], await target.exchange(route[0], call))


@pytest.mark.parametrize("route", [r for r in ROUTES if r[0] != "GET"], ids=" ".join)
async def test_no_value_of_any_field_is_a_crash(target, route):
    good, values = await target.reads(route)
    fields = [((name,), hostile.SHARP) for name in target.read[route]]
    fields += [(at, hostile.LARGE) for at in hostile.places(good) if len(at) > 1]
    for at, values_there in fields:
        for value in values_there:
            wrong = hostile.replaced(good, at, value)
            body = hostile.encoded(wrong).encode("utf-8", "surrogatepass")
            check(route[0], await target.exchange(route[0], Call(path_of(route, values), (), body)))


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
async def test_no_header_that_a_route_may_read_is_a_crash(target, route):
    good, values = await target.reads(route)
    bodies = [good, {name: value for name, value in good.items() if name != "session_id"}]
    for body in map(hostile.encoded, bodies):
        for head in hostile.READ_HEADS:
            call = Call(path_of(route, values), head, body.encode())
            check(route[0], await target.exchange(route[0], call))


@pytest.mark.parametrize("route", [r for r in ROUTES if r[0] == "GET"], ids=" ".join)
async def test_no_query_is_a_crash(target, route):
    _, values = await target.reads(route)
    for query in hostile.every_query():
        call = Call(path_of(route, values) + b"?" + query.encode())
        check(route[0], await target.exchange(route[0], call))


@FUZZ_MORE
@given(data=st.data())
async def test_no_training_request_is_a_crash(target, data):
    good = data.draw(st.sampled_from(target.recorded))
    body = data.draw(hostile.mutated(good))
    before = len(target.rig.bus.queued(OPS))
    status = await target.train(body)

    assert status in (200, 400, 404)
    assert status == 200 or len(target.rig.bus.queued(OPS)) == before


@FUZZ_MORE
@given(message=hostile.training_requests())
@example(message=hostile.wrapping_rows())
async def test_no_tensor_in_a_training_request_is_a_crash(target, message):
    target.seq += 1
    message.model_id, message.seq_id = target.model, target.seq

    assert await target.train(message.SerializeToString()) == 200
    assert target.rig.bus.queued(OPS)[-1].seq == target.seq  # it takes its place, whatever it is


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Content-Length: 1000", b"{}"),
        (b"Content-Length: -1", b"{}"),
        (b"Content-Length: 1\r\nContent-Length: 2", b"{}"),
        (b"Content-Length: 1", b"{}GET / HTTP/1.1\r\n\r\n"),
        (b"Content-Length: x", b"{}"),
        (b"Transfer-Encoding: chunked", b"5\r\n{}"),
        (b"Transfer-Encoding: chunked", b"zz\r\n{}\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: chunked", b"ffffffffffffffffff\r\n{}"),
        (b"Transfer-Encoding: chunked", b"-2\r\n{}"),
        (b"Transfer-Encoding: chunked, chunked", b"0\r\n\r\n"),
        (b"Transfer-Encoding: x", b"{}"),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 2", b"0\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
async def test_a_body_that_is_not_framed_as_promised_ends(target, monkeypatch, head, body, is_open):
    monkeypatch.setattr(bodies, "STALL_S", 0.05)
    call = Call(b"/api/v1/client/config", (head,), body)
    answer = await target.exchange("POST", call, is_cut=not is_open)

    # Who hangs up need not be answered.
    assert check("POST", answer) in (200, 400) if answer else not is_open
    assert (await target.rig.get("healthz")).status == 200


async def test_refused_requests_leave_nothing_behind(target):
    bodies = {
        b"create_session": b'{"project_id": "%s"}' % LONG,
        b"retrieve_future": b'{"request_id": "%s"}' % LONG,
        b"forward_backward": LONG,
        b"session_heartbeat": hostile.BOMBS[0][1],
    }
    heads = {
        b"forward_backward": (b"Content-Type: application/x-protobuf",),
        b"session_heartbeat": (b"Content-Encoding: zstd",),
    }
    calls = [Call(b"/api/v1/" + to, heads.get(to, ()), body) for to, body in bodies.items()]

    async def send(times):
        for call in calls * times:
            assert 400 <= check("POST", await target.exchange("POST", call)) < 500
        gc.collect()

    await send(3)
    tracemalloc.start()
    try:
        await send(1)
        before = tracemalloc.get_traced_memory()[0]
        await send(25)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert grown < 25 * len(LONG)  # one of them kept each time would be three times as much
    assert len(target.rig.gateway.futures.waiters) == 0
