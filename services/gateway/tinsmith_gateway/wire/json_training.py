"""The JSON training request of clients before 0.25, as the protobuf one of all later clients."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tinsmith import ids
from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.requests import Body, Sequenced

Size = Annotated[int, Meta(ge=0, le=2**62)]
ABSENT = msgspec.Raw(b"null")
DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}

_MODEL_RE = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,200})"')
_SEQ_RE = re.compile(rb'"seq_id"\s*:\s*([0-9]{1,10})\s*[,}]')


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of an input: tokens, or an image in base64."""

    type: str = "encoded_text"
    tokens: list[int] = []
    data: str = ""
    format: Annotated[str, Meta(max_length=40)] = ""
    expected_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """Its chunks belong together without a gap."""

    chunks: list[Chunk]


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers, row-major, or those of the cells of a CSR matrix; ``dtype`` tells which kind."""

    data: msgspec.Raw
    dtype: Literal["float32", "int64"]
    shape: list[Size] | None = None
    sparse_crow_indices: msgspec.Raw = ABSENT
    sparse_col_indices: msgspec.Raw = ABSENT


class Datum(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, and what its loss reads."""

    model_input: Input
    loss_fn_inputs: dict[str, Tensor]


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed; the model and the place are read before it."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackward(Body, frozen=True, kw_only=True):
    """A pass that adds to the gradient."""

    forward_backward_input: Pass


class Forward(Body, frozen=True, kw_only=True):
    """A pass that leaves the gradient alone."""

    forward_input: Pass


def to_proto(raw: bytes, *, forward_only: bool) -> pb.ForwardBackwardRequest:
    """``raw`` without its model and place; InvalidRequest with the field that is wrong."""
    if forward_only:
        asked = requests.decode(raw, Forward).forward_input
    else:
        asked = requests.decode(raw, ForwardBackward).forward_backward_input
    request = pb.ForwardBackwardRequest(loss_fn=asked.loss_fn, forward_only=forward_only)
    for key, value in (asked.loss_fn_config or {}).items():
        if isinstance(value, str):
            request.loss_fn_config_v2[key].text = value
        else:
            request.loss_fn_config_v2[key].number = value
    for index, datum in enumerate(asked.data):
        _set_datum(request.data.add(), datum, f"data[{index}]")
    return request


def place_in(end: bytes) -> Sequenced | None:
    """The place of a request of which only the last bytes were kept, if they tell it.

    Clients write both after the data.
    """
    model, seq = _MODEL_RE.search(end), _SEQ_RE.search(end)
    if model is None or seq is None:
        return None
    try:
        model_id = ids.check_model_id(model[1].decode())
    except (InvalidRequest, UnicodeDecodeError):
        return None
    number = int(seq[1])
    return Sequenced(model_id=model_id, seq_id=number) if 1 <= number < 2**31 else None


def _set_datum(target: pb.Datum, datum: Datum, where: str) -> None:
    for index, chunk in enumerate(datum.model_input.chunks):
        _set_chunk(target.model_input.add(), chunk, f"{where}.model_input.chunks[{index}]")
    for key, tensor in datum.loss_fn_inputs.items():
        _set_tensor(target.loss_fn_inputs[key], tensor, f"{where}.loss_fn_inputs[{key!r}]")


def _set_chunk(target: pb.Chunk, chunk: Chunk, where: str) -> None:
    match chunk.type:
        case "encoded_text":
            target.encoded_text.tokens = _packed(chunk.tokens, "<i4", f"{where}.tokens")
        case "image":
            target.image.data = _unpacked(chunk.data, f"{where}.data")
            target.image.format = chunk.format
            if chunk.expected_tokens is not None:
                target.image.expected_tokens = chunk.expected_tokens
        case kind:
            raise NotSupported(
                f"{where}: a chunk of kind {kind[:80]!r} is not supported; send text as tokens"
            )


def _set_tensor(target: pb.Tensor, tensor: Tensor, where: str) -> None:
    target.dtype = DTYPES[tensor.dtype]
    target.shape.extend(tensor.shape or ())
    values = _numbers(tensor.data, tensor.dtype, f"{where}.data")
    if bytes(tensor.sparse_crow_indices) == bytes(tensor.sparse_col_indices) == b"null":
        target.dense = values
        return
    target.sparse_csr.values = values
    for name in ("sparse_crow_indices", "sparse_col_indices"):
        indices = _numbers(getattr(tensor, name), "int64", f"{where}.{name}")
        setattr(target.sparse_csr, name.removeprefix("sparse_"), indices)


def _numbers(raw: msgspec.Raw, dtype: str, where: str) -> bytes:
    """A JSON list as the bytes of an array; decoded as what it is said to be, in one go."""
    try:
        if dtype == "int64":
            return _packed(msgspec.json.decode(raw, type=list[int]), "<i8", where)
        return _packed(msgspec.json.decode(raw, type=list[float]), "<f4", where)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}") from error


def _packed(numbers: list[int] | list[float], dtype: str, where: str) -> bytes:
    try:
        with np.errstate(over="ignore"):  # what is infinite is refused with the other values
            return np.array(numbers, dtype=dtype).tobytes()
    except OverflowError as error:
        raise InvalidRequest(f"{where}: not all are integers of {dtype[-1]} bytes") from error


def _unpacked(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{where}: not base64 ({error})") from error
