"""The protobuf schema: what is checked in is what the text says, and what the client speaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb

FOLDER = Path(pb.__file__).parent
NAMES = [message.name for message in pb.DESCRIPTOR.message_types_by_name.values()]


def fields(descriptor, package):
    """Everything about a message that is on the wire, or decides how it is read."""
    proto = descriptor_pb2.DescriptorProto()
    descriptor.CopyToProto(proto)
    proto.ClearField("reserved_range")
    return str(proto).replace(f".{package}.", ".")


def clear_json_names(messages):
    """A module has them left out."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        clear_json_names(message.nested_type)


def test_the_generated_module_is_made_from_the_checked_in_schema(tmp_path):
    out = tmp_path / "set"
    args = ["protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", "tinsmith_wire.proto"]

    assert protoc.main(args) == 0

    compiled = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    clear_json_names(compiled.message_type)
    assert compiled == descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)


@pytest.mark.parametrize("name", NAMES)
def test_every_message_is_that_of_the_client(name):
    theirs = pytest.importorskip("tinker.proto.tinker_public_pb2")

    expected = fields(theirs.DESCRIPTOR.message_types_by_name[name], "tinker_public")

    assert fields(pb.DESCRIPTOR.message_types_by_name[name], "tinsmith_wire") == expected


@pytest.mark.parametrize("name", ["StopReason", "DType"])
def test_every_enum_is_that_of_the_client(name):
    theirs = pytest.importorskip("tinker.proto.tinker_public_pb2")

    expected = theirs.DESCRIPTOR.enum_types_by_name[name].values_by_number

    ours = pb.DESCRIPTOR.enum_types_by_name[name].values_by_number
    assert {n: v.name for n, v in ours.items()} == {n: v.name for n, v in expected.items()}
