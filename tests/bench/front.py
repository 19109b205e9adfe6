"""Requests to a gateway at little cost to whoever sends them: plain sockets, ready bodies."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from contextlib import asynccontextmanager

import numpy as np
from aiohttp import web

JSON = "application/json"
_OPENING = asyncio.Semaphore(32)  # more at once than a server's backlog are refused


class Connection:
    """One kept-alive connection, one request at a time."""

    def __init__(self, reader, writer, head):
        self._reader = reader
        self._writer = writer
        self._head = head

    @classmethod
    @asynccontextmanager
    async def to(cls, url, key):
        place = urllib.parse.urlsplit(url)
        async with _OPENING:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            yield cls(reader, writer, f"Host: {place.netloc}\r\nX-API-Key: {key}\r\n")
        finally:
            writer.close()

    async def post(self, path, body, *, content_type=JSON):
        head = f"POST /api/v1/{path} HTTP/1.1\r\n{self._head}Content-Type: {content_type}\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        self._writer.write(body)
        await self._writer.drain()
        return await self._answer()

    async def get(self, path):
        self._writer.write(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode())
        return await self._answer()

    async def _answer(self):
        """(status, body)"""
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return int(head[9:12]), await self._reader.readexactly(length)


class Held:
    """Waits until so many polls have been sent, and then have had time to be held."""

    def __init__(self, polls):
        self._left = polls
        self._all = asyncio.Event()

    def add(self):
        self._left -= 1
        if not self._left:
            self._all.set()

    async def wait(self):
        await self._all.wait()
        await asyncio.sleep(3)


@asynccontextmanager
async def bare():
    """A server that answers a promise and nothing else."""

    async def answer(request):
        asked = json.loads(await request.read())
        return web.json_response({"request_id": asked["seq_id"], "model_id": asked["model_id"]})

    app = web.Application()
    app.router.add_post("/api/v1/{path}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def json_of(body):
    return json.dumps(body).encode()


async def told(connection, path, body):
    status, answer = await connection.post(path, json_of(body))
    assert status == 200, answer
    return json.loads(answer)


async def new_session(connection):
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"}
    return (await told(connection, "create_session", body))["session_id"]


async def new_model(connection, session, base_model):
    lora = {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    body = {"session_id": session, "model_seq_id": 0, "base_model": base_model}
    more = {"lora_config": lora, "optimizer_config": {"type": "adamw"}}
    return (await told(connection, "create_model", body | more))["model_id"]


async def new_sampler(connection, session, base_model):
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base_model}
    answer = await told(connection, "create_sampling_session", body)
    return answer["sampling_session_id"]


def step(model, seq):
    return json_of({"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}})


def draw(sampler, seq):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(range(200))}]}
    body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 1, "prompt": prompt}
    return json_of(body | {"sampling_params": {"max_tokens": 100}})


def large_batch(model, size, length=1024):
    """A forward_backward request of about ``size`` bytes, whose numbers do not compress."""
    from tinker.proto import tinker_public_pb2 as pb

    request = pb.ForwardBackwardRequest(model_id=model, loss_fn="importance_sampling")
    rng = np.random.default_rng(0)
    while request.ByteSize() < size:
        datum = request.data.add()
        tokens = rng.integers(0, 50_000, length)
        datum.model_input.add().encoded_text.tokens = tokens.astype("<i4").tobytes()
        columns = {"target_tokens": (tokens.astype("<i8"), pb.DTYPE_INT64)}
        for name in ("logprobs", "advantages"):
            columns[name] = (rng.random(length, np.float32), pb.DTYPE_FLOAT32)
        for name, (values, dtype) in columns.items():
            column = datum.loss_fn_inputs[name]
            column.dense, column.dtype = values.tobytes(), dtype
            column.shape.append(length)
    return request


def numbered(request, seq):
    request.seq_id = seq
    return request.SerializeToString()
