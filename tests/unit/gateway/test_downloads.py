"""Archives and traces by links that need no key."""

from __future__ import annotations

import io
import tarfile
import time

import pytest
from tests.unit.gateway.test_checkpoints import url

from tinsmith import ids
from tinsmith.messages import ops
from tinsmith.messages.table import CHECKPOINTS, OPS
from tinsmith_gateway.signing import Ticket

OTHER = "tml-bob"
FILES = {"adapter_model.safetensors": bytes(range(256)) * 9000, "adapter_config.json": b"{}"}


@pytest.fixture
async def path(rig, replace):
    """A checkpoint whose parts are there."""
    path = await rig.checkpoint(await rig.model(), "sampler_weights")
    table, key = rig.bus.table(CHECKPOINTS), ids.checkpoint_key(ids.parse_path(path))
    parts = {name: await rig.bus.blobs.put(data) for name, data in FILES.items()}
    await table.put(key, replace(await table.get(key), parts=parts))
    return path


async def link(rig, path):
    answer = await rig.call("GET", url(path, "/archive"), allow_redirects=False)
    assert answer.status == 302
    return answer.headers["Location"].removeprefix(rig.url)


async def fetch(rig, path, **kwargs):
    return await rig.call("GET", path, key=None, **kwargs)


async def test_an_archive_has_every_file_byte_for_byte(rig, path):
    answer = await fetch(rig, await link(rig, path))

    with tarfile.open(fileobj=io.BytesIO(answer.raw)) as tar:
        found = {name: tar.extractfile(name).read() for name in tar.getnames()}
    assert found == FILES
    assert answer.headers["Content-Length"] == str(len(answer.raw))


@pytest.mark.parametrize("wanted", ["0-99", "100-2000000", "1500000-", "-700"])
async def test_a_part_of_an_archive_is_that_part(rig, path, wanted):
    address = await link(rig, path)
    whole = (await fetch(rig, address)).raw
    first, _, last = wanted.partition("-")
    start, end = (int(first), int(last or len(whole)) + 1) if first else (-int(last), None)

    part = await fetch(rig, address, headers={"Range": f"bytes={wanted}"})

    assert (part.status, part.raw) == (206, whole[start:end])
    assert part.headers["Content-Range"].endswith(f"/{len(whole)}")


async def test_a_range_outside_of_the_archive_is_refused(rig, path):
    answer = await fetch(rig, await link(rig, path), headers={"Range": "bytes=99999999-"})

    assert (answer.status, "Range" in answer.detail) == (400, True)


@pytest.mark.parametrize("wrong", ["x", "x.y", "e30.e30", "WyJhcmNoaXZlIl0."])
async def test_a_link_that_was_not_signed_opens_nothing(rig, wrong):
    assert (await fetch(rig, f"/api/v1/downloads/{wrong}/a.tar")).status == 404


async def test_a_link_ends(rig, path):
    ticket = Ticket("archive", path, int(time.time()) - 1)
    text = await rig.gateway.signer.sign(ticket)

    assert (await fetch(rig, f"/api/v1/downloads/{text}/a.tar")).status == 410


async def test_a_link_to_a_deleted_checkpoint_opens_nothing(rig, path):
    address = await link(rig, path)
    await rig.call("DELETE", url(path))

    assert (await fetch(rig, address)).status == 404


async def test_nobody_gets_a_link_to_the_checkpoints_of_others(rig, path):
    assert (await rig.call("GET", url(path, "/archive"), key=OTHER)).status == 404


async def test_a_trace_has_what_was_done_in_the_session(rig):
    session = await rig.session()
    await rig.model(session)
    op = rig.bus.queued(OPS)[0]
    await rig.bus.finish_op(op, ops.CreateModelDone(model_id=op.model_id, lora=ops.LoraShape()))

    answer = (await rig.get(f"sessions/{session}/trace_export")).json
    events = (await fetch(rig, answer["url"].removeprefix(rig.url))).json["traceEvents"]

    assert answer["status"] == "ready"
    assert [(e["name"], e["tid"]) for e in events if e["ph"] == "i"] == [("op", op.model_id)]
    assert (await rig.get(f"sessions/{session}/trace_export", key=OTHER)).status == 404
