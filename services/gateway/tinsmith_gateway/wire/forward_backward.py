"""The training request as an op body: token and tensor bytes are passed on as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from google.protobuf.message import DecodeError

from tinsmith import ids
from tinsmith.errors import InvalidRequest, NotSupported, TooLarge
from tinsmith.messages import ops
from tinsmith.messages.base import Tensor
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb
from tinsmith_gateway.wire import json_training, tensors
from tinsmith_gateway.wire.requests import Sequenced
from tinsmith_gateway.wire.training import lazily, sequenced

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TOKEN_BYTES = 4  # int32


class Bounds(NamedTuple):
    """How large one request may be."""

    max_bytes: int  # of its sparse tensors, once dense
    max_datums: int = 2**31 - 1
    max_tokens: int = 2**31 - 1


def from_proto(raw: bytes, bounds: Bounds) -> tuple[Sequenced, ops.OpBody]:
    """The request's place, and its body: ``Refused`` when the content is wrong, or too large.

    InvalidRequest when the request cannot be attributed to a model and a place in its sequence.
    """
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequest(
            f"request body: {len(raw)} bytes are not a ForwardBackwardRequest in protobuf"
        ) from error
    place = _place(request.model_id, request.seq_id)
    return place, lazily(lambda: _body(request, bounds))


def from_json(
    raw: bytes, bounds: Bounds, *, forward_only: bool = False
) -> tuple[Sequenced, ops.OpBody]:
    """As ``from_proto``, for a request in JSON."""
    place = sequenced(raw)
    return place, lazily(
        lambda: _body(json_training.to_proto(raw, forward_only=forward_only), bounds)
    )


def place_in(prefix: bytes) -> Sequenced | None:
    """The place of a request of which only the first bytes were read, if they tell it.

    Encoders write the two fields in order and first: tag 1 with the model's id, tag 2 with the
    sequence number. A refused request must take its place, else its successors wait for it.
    """
    if len(prefix) < 2 or prefix[0] != 0x0A or prefix[1] >= 0x80:
        return None
    end = 2 + prefix[1]
    if prefix[end : end + 1] != b"\x10":
        return None
    number = prefix[end + 1 : end + 6]
    last = next((index for index, byte in enumerate(number) if byte < 0x80), None)
    if last is None:
        return None
    head = pb.ForwardBackwardRequest()
    try:
        head.ParseFromString(prefix[: end + 2 + last])
        return _place(head.model_id, head.seq_id)
    except (DecodeError, InvalidRequest):
        return None


def _place(model_id: str, seq: int) -> Sequenced:
    if seq < 1:
        raise InvalidRequest(f"seq_id: {seq} is not a place in a sequence; the first is 1")
    return Sequenced(model_id=ids.check_model_id(model_id), seq_id=seq)


def _body(request: pb.ForwardBackwardRequest, bounds: Bounds) -> ops.ForwardBackward:
    _check_size(request, bounds)
    max_bytes = bounds.max_bytes
    data = []
    for index, datum in enumerate(request.data):
        converted = _datum(datum, f"data[{index}]", max_bytes)
        max_bytes -= sum(
            len(tensor.data)
            for key, tensor in converted.inputs.items()
            if datum.loss_fn_inputs[key].HasField("sparse_csr")
        )
        data.append(converted)
    return ops.ForwardBackward(
        data=tuple(data),
        loss_fn=request.loss_fn,
        loss_config=_loss_config(request),
        forward_only=request.forward_only,
    )


def _check_size(request: pb.ForwardBackwardRequest, bounds: Bounds) -> None:
    if (count := len(request.data)) > bounds.max_datums:
        raise TooLarge(
            f"data: {count} datums are over the limit of {bounds.max_datums}; send fewer per "
            "request, or raise gateway.max_datums"
        )
    chunks = (chunk for datum in request.data for chunk in datum.model_input)
    tokens = sum(len(chunk.encoded_text.tokens) for chunk in chunks) // TOKEN_BYTES
    if tokens > bounds.max_tokens:
        raise TooLarge(
            f"data: {tokens} tokens are over the limit of {bounds.max_tokens}; send fewer or "
            "shorter datums per request, or raise gateway.max_request_tokens"
        )


def _datum(datum: pb.Datum, where: str, max_bytes: int) -> ops.Datum:
    inputs: Mapping[str, pb.Tensor] = datum.loss_fn_inputs
    return ops.Datum(
        tokens=_tokens(datum, where),
        # Sorted: protobuf maps have no order, and equal requests must give equal ops.
        inputs={
            key: tensors.from_proto(
                inputs[key], f"{where}.loss_fn_inputs[{key!r}]", max_bytes=max_bytes
            )
            for key in sorted(inputs)
        },
        input_spans=_spans(datum.model_input_spans, f"{where}.model_input_spans"),
        target_spans=_spans(datum.loss_fn_input_spans, f"{where}.loss_fn_input_spans"),
    )


def _spans(spans: Iterable[pb.ProvenanceSpan], where: str) -> tuple[ops.Span, ...]:
    return tuple(_span(span, f"{where}[{index}]") for index, span in enumerate(spans))


def _span(span: pb.ProvenanceSpan, where: str) -> ops.Span:
    match span.WhichOneof("span"):
        case "prompt_tokens":
            return _run("prompt", span.prompt_tokens)
        case "sampled_tokens":
            return _run("sampled", span.sampled_tokens)
        case _:
            raise InvalidRequest(f"{where}: has neither prompt_tokens nor sampled_tokens")


def _run(
    kind: Literal["prompt", "sampled"],
    run: pb.PromptProvenanceSpan | pb.SampledProvenanceSpan,
) -> ops.Span:
    return ops.Span(kind=kind, sequence_id=run.sequence_id, offset=run.offset, length=run.length)


def _tokens(datum: pb.Datum, where: str) -> Tensor:
    parts = []
    for index, chunk in enumerate(datum.model_input):
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise NotSupported(
                f"{where}.model_input[{index}]: a chunk of kind {kind or 'unknown'!r} is not "
                "supported; send text as tokens"
            )
        parts.append(chunk.encoded_text.tokens)
    tokens = b"".join(parts)
    if len(tokens) % TOKEN_BYTES:
        raise InvalidRequest(f"{where}.model_input: {len(tokens)} bytes are not int32 tokens")
    return Tensor("int32", (len(tokens) // TOKEN_BYTES,), tokens)


def _loss_config(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """The newer map holds everything the older one does, and texts."""
    newer = request.loss_fn_config_v2
    if not newer:
        return {key: request.loss_fn_config[key] for key in sorted(request.loss_fn_config)}
    return {key: _loss_value(newer[key], key) for key in sorted(newer)}


def _loss_value(value: pb.LossConfigValue, key: str) -> float | str:
    match value.WhichOneof("value"):
        case "number":
            return value.number
        case "text":
            return value.text
        case _:
            raise InvalidRequest(f"loss_fn_config_v2[{key!r}]: has neither a number nor a text")
