"""Results in JSON, for clients that do not take protobuf: the same numbers in the older form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb
from tinsmith_gateway.wire import tensors
from tinsmith_gateway.wire.results import JSON, PROTOBUF, Payload, json_number, json_payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_KINDS = {"float32": "<f4", "int64": "<i8", "int32": "<i4"}
_STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}
_FILLER = -99999.0  # the log-probability of a cell that has none


def is_wanted(accept: str) -> bool:
    """Whether an ``Accept`` header asks for JSON alone."""
    return JSON in accept and PROTOBUF not in accept


def of(body: bytes, kind: str) -> Payload:
    """The result of a pass or of a sample in JSON, from protobuf."""
    if kind == "train":
        return json_payload(_forward_backward(pb.ForwardBackwardOutput.FromString(body)))
    return json_payload(_sample(pb.SampleResponse.FromString(body)))


def _forward_backward(output: pb.ForwardBackwardOutput) -> dict[str, Any]:
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            {key: _of_batch(batch, index) for key, batch in record.fields.items()}
            for record in output.loss_fn_outputs
            for index in range(record.num_datums)
        ],
        "metrics": {key: json_number(value) for key, value in output.metrics.items()},
    }


def _of_batch(batch: pb.BatchedTensor, index: int) -> dict[str, Any]:
    start, end = np.frombuffer(batch.offsets, "<i8")[index : index + 2]
    values = _array(batch.data[start:end], batch.dtype)
    return _tensor(values.reshape(-1, *batch.trailing_shape))


def _sample(response: pb.SampleResponse) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence(sequence) for sequence in response.sequences],
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
    }
    if response.HasField("prompt_logprobs"):
        logprobs = np.frombuffer(response.prompt_logprobs, "<f4")
        answer["prompt_logprobs"] = [None if math.isnan(x) else x for x in logprobs.tolist()]
    if response.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _topk(response.topk_prompt_logprobs)
    if response.HasField("target_prompt_logprobs"):
        answer["target_prompt_logprobs"] = _proto_tensor(response.target_prompt_logprobs)
    if response.HasField("prompt_alt_tokens"):
        drawn = response.prompt_alt_tokens
        answer["prompt_alt_tokens"] = {
            "tokens": _proto_tensor(drawn.tokens),
            "logprobs": _proto_tensor(drawn.logprobs),
        }
    return answer


def _sequence(sequence: pb.SampledSequence) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "stop_reason": _STOP_REASONS[sequence.stop_reason],
        "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
        "logprobs": _floats(np.frombuffer(sequence.logprobs, "<f4")),
    }
    if sequence.HasField("topk_sampled_logprobs"):
        answer["topk_sampled_logprobs"] = _topk(sequence.topk_sampled_logprobs)
    return answer


def _topk(topk: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    """Per token its best ones; None for a token that has none, as the first of a prompt."""
    shape = (topk.length, topk.k)
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(shape).tolist()
    rows = (
        [(token, x) for token, x in zip(*row, strict=True) if x != _FILLER]
        for row in zip(ids, logprobs, strict=True)
    )
    return [row or None for row in rows]


def _proto_tensor(tensor: pb.Tensor) -> dict[str, Any]:
    if tensor.WhichOneof("encoding") == "dense":
        return _tensor(_array(tensor.dense, tensor.dtype).reshape(tuple(tensor.shape)))
    sparse = tensor.sparse_csr
    return _tensor(_array(sparse.values, tensor.dtype)) | {
        "shape": list(tensor.shape),
        "sparse_crow_indices": np.frombuffer(sparse.crow_indices, "<i8").tolist(),
        "sparse_col_indices": np.frombuffer(sparse.col_indices, "<i8").tolist(),
    }


def _array(data: bytes, dtype: int) -> NDArray[Any]:
    name = tensors.NAMES[dtype]
    if name == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, _KINDS[name])


def _tensor(values: NDArray[Any]) -> dict[str, Any]:
    is_float = values.dtype.kind == "f"
    return {
        "data": _floats(values.ravel()) if is_float else values.ravel().tolist(),
        "dtype": "float32" if is_float else "int64",
        "shape": list(values.shape),
    }


def _floats(values: NDArray[Any]) -> Sequence[float | str]:
    numbers: list[float] = values.tolist()
    return numbers if np.isfinite(values).all() else [json_number(x) for x in numbers]
