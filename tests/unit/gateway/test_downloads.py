"""Archives and traces by links that need no key."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.gateway.fake_bus import FakeBus
from tests.unit.gateway.test_checkpoints import url

from tinsmith import ids
from tinsmith.errors import NotFound
from tinsmith.messages import ops
from tinsmith.messages.base import BlobRef
from tinsmith.messages.table import CHECKPOINTS, OPS
from tinsmith_gateway.signing import Signer, Ticket

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


@pytest.mark.parametrize("wanted", ["99999999-", "5-2", "0-1,5-9", "x", "--1"])
async def test_a_range_outside_of_the_archive_is_refused(rig, path, wanted):
    address = await link(rig, path)
    answer = await fetch(rig, address, headers={"Range": f"bytes={wanted}"})

    assert (answer.status, "Range" in answer.detail) == (416, True)
    assert int(answer.headers["Content-Range"].removeprefix("bytes */")) > 2304000


async def test_who_has_all_of_a_download_is_told_so_when_it_is_taken_up(rig, path):
    address = await link(rig, path)
    size = len((await fetch(rig, address)).raw)

    answer = await fetch(rig, address, headers={"Range": f"bytes={size}-"})

    assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{size}")


async def test_the_head_of_a_download_tells_its_size(rig, path):
    address = await link(rig, path)
    size = len((await fetch(rig, address)).raw)

    answer = await rig.call("HEAD", address, key=None)

    assert (answer.status, answer.headers["Content-Length"], answer.raw) == (200, str(size), b"")
    assert answer.headers["Accept-Ranges"] == "bytes"


@given(st.text(max_size=60) | st.from_regex(r"\A[A-Za-z0-9_-]{1,40}\.[A-Za-z0-9_-]{0,44}\Z"))
@settings(max_examples=100, deadline=None)
def test_no_text_that_was_not_signed_is_a_ticket(text):
    async def read():
        signer = Signer(FakeBus())
        with pytest.raises(NotFound, match="not made by this server"):
            await signer.read(text)

    asyncio.run(read())


async def test_a_ticket_with_one_letter_changed_opens_nothing(rig, path):
    address = await link(rig, path)
    start = address.index("/downloads/") + len("/downloads/")
    for place in range(start, address.rindex("/"), 7):
        other = "A" if address[place] != "A" else "B"
        changed = address[:place] + other + address[place + 1 :]
        assert (await fetch(rig, changed)).status == 404


async def test_a_part_that_could_lead_anywhere_is_never_read(rig, path, replace):
    table, key = rig.bus.table(CHECKPOINTS), ids.checkpoint_key(ids.parse_path(path))
    ref = await rig.bus.blobs.put(b"secret")
    for name, at in (("../x", ref), ("x", BlobRef("../../../etc/hostname", ref.size))):
        await table.put(key, replace(await table.get(key), parts={name: at}))
        answer = await fetch(rig, await link(rig, path))
        assert (answer.status, "parts: " in answer.detail) == (400, True)


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


EXTERNAL = {"adapter_model.safetensors.age": bytes(range(256)) * 9000, "adapter_config.json": b"{}"}


@pytest.fixture
async def external(rig, replace):
    """Weights for other tools."""
    path = await rig.checkpoint(await rig.model(), "external_weights")
    table, key = rig.bus.table(CHECKPOINTS), ids.checkpoint_key(ids.parse_path(path))
    parts = {name: await rig.bus.blobs.put(data) for name, data in EXTERNAL.items()}
    await table.put(key, replace(await table.get(key), parts=parts))
    return path


async def links(rig, path):
    answer = await rig.call("GET", url(path, "/external_weights_urls"))
    assert answer.status == 200, answer.raw
    return {name: link.removeprefix(rig.url) for name, link in answer.json["urls"].items()}


async def test_every_file_has_a_link_that_needs_no_key(rig, external):
    found = {name: await fetch(rig, link) for name, link in (await links(rig, external)).items()}

    assert {name: answer.raw for name, answer in found.items()} == EXTERNAL
    for answer in found.values():
        assert answer.headers["Content-Length"] == str(len(answer.raw))


async def test_a_download_is_taken_up_where_it_broke_off(rig, external):
    name = "adapter_model.safetensors.age"
    address = (await links(rig, external))[name]

    rest = await fetch(rig, address, headers={"Range": "bytes=1234567-"})

    assert (rest.status, rest.raw) == (206, EXTERNAL[name][1234567:])
    assert rest.headers["Content-Range"] == f"bytes 1234567-{2304000 - 1}/2304000"


async def test_links_do_not_outlive_their_checkpoint(rig, external, replace):
    table, key = rig.bus.table(CHECKPOINTS), ids.checkpoint_key(ids.parse_path(external))
    soon = (int(time.time()) + 60) * 10**9
    await table.put(key, replace(await table.get(key), expires_ns=soon))

    answer = (await rig.call("GET", url(external, "/external_weights_urls"))).json

    assert datetime.fromisoformat(answer["expires"]).timestamp() * 1e9 == soon


async def test_a_link_does_not_open_what_was_saved_in_its_place(rig, external, replace):
    address = (await links(rig, external))["adapter_model.safetensors.age"]
    table, key = rig.bus.table(CHECKPOINTS), ids.checkpoint_key(ids.parse_path(external))
    parts = {"adapter_model.safetensors.age": await rig.bus.blobs.put(b"other")}
    await table.put(key, replace(await table.get(key), parts=parts))

    answer = await fetch(rig, address)

    assert (answer.status, "saved anew" in answer.detail) == (404, True)


async def test_only_external_weights_are_given_out_file_by_file(rig, path):
    answer = await rig.call("GET", url(path, "/external_weights_urls"))

    assert (answer.status, "save_weights_external" in answer.detail) == (400, True)


async def test_nobody_gets_links_to_the_files_of_others(rig, external):
    answer = await rig.call("GET", url(external, "/external_weights_urls"), key=OTHER)

    assert answer.status == 404


@pytest.mark.parametrize("route", ["load_weights", "create_sampling_session"])
async def test_external_weights_are_neither_loaded_nor_sampled_from(rig, external, route):
    session = await rig.session()
    if route == "load_weights":
        request = {"model_id": await rig.model(session), "seq_id": 1, "path": external}
        assert (await rig.post(route, request)).status == 200
        message = rig.bus.queued(OPS)[-1].body.reason.message
    else:
        request = {"session_id": session, "sampling_session_seq_id": 1, "model_path": external}
        message = (await rig.post(route, request)).detail

    assert "is of kind 'external_weights', but" in message
