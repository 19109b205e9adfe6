"""The bus contract: bytes on the wire, routes, and the page made from them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.contract.samples import samples

from tinsmith import errors
from tinsmith.messages import ops, table
from tinsmith.messages.base import Failed, decoder, encode
from tinsmith.messages.describe import page, structs
from tinsmith.messages.failures import to_exception, to_failed

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.json"


SAMPLES = samples()
BYTES = {name: bytes.fromhex(text) for name, text in json.loads(GOLDEN.read_text()).items()}


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_message_has_the_bytes_it_always_had(name):
    assert encode(SAMPLES[name]) == BYTES[name], "new fields need defaults; see CONTRIBUTING.md"


@pytest.mark.parametrize("struct", structs(), ids=lambda struct: struct.__name__)
def test_recorded_bytes_are_read_back(struct):
    assert decoder(struct).decode(BYTES[struct.__name__]) == SAMPLES[struct.__name__]


@pytest.mark.parametrize("struct", structs(), ids=lambda struct: struct.__name__)
def test_a_field_from_a_newer_version_is_skipped(struct):
    if struct.__struct_config__.array_like:
        newer = msgspec.msgpack.encode([*msgspec.msgpack.decode(BYTES[struct.__name__]), "new"])
    else:
        newer = encode({**msgspec.msgpack.decode(BYTES[struct.__name__]), "from_the_future": 1})

    assert decoder(struct).decode(newer) == SAMPLES[struct.__name__]


def test_a_decoded_default_is_encoded_like_the_default_itself():
    """Digests are taken of bytes, so equal messages must have equal ones."""
    fresh = encode(ops.LoraShape())

    assert encode(decoder(ops.LoraShape).decode(fresh)) == fresh


def test_no_recorded_message_was_forgotten():
    assert set(BYTES) == set(SAMPLES)


def test_subjects_are_unique():
    rows = (*table.RPCS, *table.QUEUES, *table.EVENTS, *table.ENTITIES)
    templates = [row.template for row in rows]

    assert len(set(templates)) == len(templates)


def test_every_queue_has_its_stream():
    assert {queue.stream for queue in table.QUEUES} <= set(table.STREAMS)


@pytest.mark.parametrize("token", ["a.b", "a b", "", ">", "a*"])
def test_text_that_is_no_token_never_becomes_a_subject(token):
    with pytest.raises(ValueError, match="not a subject token"):
        table.OPS.subject(model=token, seq="1")


def test_the_protocol_page_is_up_to_date():
    recorded = (HERE.parents[1] / "docs" / "protocol.md").read_text()

    assert recorded == page(), "run: python -m tinsmith.messages.describe > docs/protocol.md"


def test_an_unknown_tag_is_an_error_that_names_its_place():
    with pytest.raises(msgspec.ValidationError, match="martian"):
        decoder(ops.OpResult).decode(encode({"t": "martian"}))


@pytest.mark.parametrize(
    "error",
    [errors.NotFound, errors.Gone, errors.Busy, errors.VersionUnmet, errors.StorageFull],
)
def test_an_error_crosses_the_bus_as_itself(error):
    back = to_exception(to_failed(error("why")))

    assert type(back) is error
    assert str(back) == "why"


def test_an_error_of_an_unknown_class_keeps_its_category():
    back = to_exception(Failed(category="user", message="why", code="FromTheFuture"))

    assert isinstance(back, errors.UserError)
