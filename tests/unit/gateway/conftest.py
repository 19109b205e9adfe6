"""A real gateway on a loopback port, its bus in memory, and requests to it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tests.unit.gateway.fake_bus import FakeBus

from tinsmith import ids
from tinsmith.config import Config
from tinsmith.messages.base import BlobRef
from tinsmith.messages.checkpoints import Checkpoint
from tinsmith.messages.ops import LoraShape
from tinsmith.messages.registry import ServedModel
from tinsmith.messages.services import ServiceAlive
from tinsmith.messages.table import CHECKPOINTS, SERVED, SERVICE_ALIVE
from tinsmith.sealing import Seals
from tinsmith_gateway.app import build_app, build_runner
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.gateway import Gateway
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

KEY = "tml-alice"
OTHER_KEY = "tml-bob"
MODEL = "tiny/model"
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())


class Answer(NamedTuple):
    """Status, body, and the body as JSON where it is."""

    status: int
    raw: bytes
    headers: CIMultiDictProxy[str]

    @property
    def json(self):
        return json.loads(self.raw)

    @property
    def detail(self):
        return self.json["detail"]


class Rig:
    """One running gateway and a client's means to talk to it."""

    def __init__(self, gateway, bus, url, http):
        self.gateway = gateway
        self.bus = bus
        self.url = url
        self.http = http

    async def call(self, method, path, *, key=KEY, headers=None, data=None, **kwargs):
        headers = ({"X-API-Key": key} if key else {}) | (headers or {})
        if data is not None:
            kwargs["data"] = io.BytesIO(data)
        async with self.http.request(method, self.url + path, headers=headers, **kwargs) as reply:
            return Answer(reply.status, await reply.read(), reply.headers)

    async def get(self, path, **kwargs):
        return await self.call("GET", f"/api/v1/{path}", **kwargs)

    async def post(self, path, body, **kwargs):
        return await self.call("POST", f"/api/v1/{path}", json=body, **kwargs)

    async def post_proto(self, message, *, headers=None, **kwargs):
        body = message if isinstance(message, bytes) else message.SerializeToString()
        headers = {"Content-Type": "application/x-protobuf"} | (headers or {})
        return await self.call(
            "POST", "/api/v1/forward_backward", data=body, headers=headers, **kwargs
        )

    async def poll(self, request_id, **kwargs):
        body = {"request_id": request_id, "allow_metadata_only": True}
        return await self.post("retrieve_future", body, **kwargs)

    async def session(self, **kwargs):
        answer = await self.post("create_session", {"tags": [], "user_metadata": {}}, **kwargs)
        return answer.json["session_id"]

    async def model(self, session=None, *, order=0, rank=8, **kwargs):
        session = session or await self.session(**kwargs)
        answer = await self.post("create_model", create_model(session, order, rank), **kwargs)
        return answer.json["model_id"]

    async def sampler(self, session=None, *, order=0, **kwargs):
        body = {
            "session_id": session or await self.session(**kwargs),
            "sampling_session_seq_id": order,
            "base_model": MODEL,
        }
        return (await self.post("create_sampling_session", body, **kwargs)).json[
            "sampling_session_id"
        ]

    async def checkpoint(self, model_id, kind="weights", name="step1", **fields):
        """As the checkpointer leaves it in the registry."""
        path = ids.CheckpointPath(model_id, kind, name)
        ref = BlobRef("0" * 64, 10)
        entry = Checkpoint(
            path=str(path),
            model_id=model_id,
            kind=kind,
            name=name,
            op_seq=1,
            base_model=fields.pop("base_model", MODEL),
            lora=LoraShape(rank=8),
            step=1,
            parts={"adapter_model.safetensors": ref, "adapter_config.json": ref},
            size_bytes=20,
            created_ns=fields.pop("created_ns", 1_700_000_000_000_000_000),
            **fields,
        )
        await self.bus.table(CHECKPOINTS).put(ids.checkpoint_key(path), entry)
        return entry.path

    async def announce(self, role, *models, **fields):
        """A service's ping."""
        told = {"instance": "t", "version": "0", "base_models": models} | fields
        alive = ServiceAlive(service=role, **told)
        await self.bus.emit(SERVICE_ALIVE, alive)


def create_model(session, order=0, rank=8, **fields):
    lora = {"rank": rank, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    return {
        "session_id": session,
        "model_seq_id": order,
        "base_model": MODEL,
        "lora_config": lora,
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    } | fields


@pytest.fixture
def new_model():
    return create_model


@pytest.fixture
def recorded():
    """A recorded request's JSON body, or its protobuf message, with ids of this server."""

    def get(name, **fields):
        example = RECORDED[name]
        if "json" in example:
            return example["json"] | fields
        message = pb.ForwardBackwardRequest.FromString(base64.b64decode(example["body_b64"]))
        for field, value in fields.items():
            setattr(message, field, value)
        return message

    return get


@pytest.fixture
def config():
    """Waits that a test can afford."""
    return GatewayConfig(long_poll_s=0.3, recheck_s=0.1, max_samples=8, max_topk_logprobs=4)


@pytest.fixture
def served():
    """What a trainer and a sampler of the tiny model leave in the registry."""
    common = {
        "name": MODEL,
        "vocab_size": 256,
        "context_length": 64,
        "tokenizer_id": "tiny/tokenizer",
        "arch": "llama",
        "max_rank": 32,
    }
    return [ServedModel(role=role, **common) for role in ("trainer", "sampler")]


@pytest.fixture
async def fake():
    return FakeBus()


@pytest.fixture
def seals(fake, tmp_path):
    return Seals(fake, Config(data_dir=tmp_path / "data"))


@pytest.fixture
async def rig(config, fake, served, seals):
    for model in served:
        await fake.table(SERVED).put(f"{ids.pool_token(model.name)}-{model.role}", model)
    gateway = Gateway.build(config, fake, [KEY, OTHER_KEY], seals)
    await gateway.start()
    runner = build_runner(build_app(gateway))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as http:
        yield Rig(gateway, fake, url, http)
    gateway.futures.release()
    await runner.cleanup()
    await gateway.close()


@pytest.fixture
def replace():
    return msgspec.structs.replace
