"""The unmodified client when answers are lost: what it sends again is what it sent before."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from tests.unit.gateway.test_real_client import draw, train

from tinsmith.messages import ops
from tinsmith.messages.table import OPS

tinker = pytest.importorskip("tinker")

MODEL = "tiny/model"
SEQUENCED = (
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
)
pytestmark = [
    # The client's own: pydantic warns of its field names, its loop thread leaves transports open.
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class Lossy:
    """Passes everything on to a gateway, and loses the first answer to each sequenced request."""

    def __init__(self, target, http):
        self._target = target
        self._http = http
        self._kept = set()
        self.asked = Counter()  # how often each path was
        self.statuses = Counter()

    async def handle(self, request):
        path, body = request.path, await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() != "host"}
        async with self._http.request(
            request.method, self._target + request.path_qs, data=body, headers=headers
        ) as answer:
            raw = await answer.read()
        name = path.rpartition("/")[2]
        self.asked[name] += 1
        self.statuses[answer.status] += 1
        if name in SEQUENCED and name not in self._kept:
            self._kept.add(name)
            request.transport.abort()
        return web.Response(status=answer.status, body=raw, content_type=answer.content_type)


@pytest.fixture
async def lossy(rig):
    async with aiohttp.ClientSession() as http:
        passing = Lossy(rig.url, http)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", passing.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        passing.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield passing
        await runner.cleanup()


@pytest.fixture
async def service(rig, lossy, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", lossy.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-alice")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(train(rig)), group.create_task(draw(rig))]
        client = await asyncio.to_thread(tinker.ServiceClient)
        yield client
        await asyncio.to_thread(lambda: client.close("success").result())
        for task in tasks:
            task.cancel()


def datum():
    tokens = list(range(1, 9))
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": np.array(tokens), "weights": np.ones(8, np.float32)},
    )


async def test_nothing_that_is_sent_again_is_taken_for_something_else(service, lossy, rig):
    def loop():
        model = service.create_lora_training_client(MODEL, rank=8).result()
        model.forward_backward([datum()], "cross_entropy").result()
        model.optim_step(tinker.types.AdamParams(learning_rate=0.1)).result()
        path = model.save_state("kept").result().path
        model.save_weights_and_get_sampling_client().result()
        return model, path

    model, path = await asyncio.to_thread(loop)
    await rig.checkpoint(model.model_id, name="kept")
    await asyncio.to_thread(lambda: service.create_training_client_from_state(path).result())

    assert {name: lossy.asked[name] for name in SEQUENCED} == dict.fromkeys(SEQUENCED, 2)
    assert 400 not in lossy.statuses
    assert [op for op in rig.bus.queued(OPS) if isinstance(op.body, ops.Refused)] == []
