"""Results of ops and of sampling as the answers that clients read."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

import msgspec
import numpy as np

from tinsmith.messages import ops, sampling
from tinsmith.messages.base import Failed
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb
from tinsmith_gateway.wire import tensors
from tinsmith_gateway.wire.target_tokens import set_scores

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tinsmith.messages.base import Tensor

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
RECORD = "ArrayRecord"
_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


class Payload(NamedTuple):
    """An answer's body and its content type."""

    body: bytes
    content_type: str
    outcome: str = "done"  # or the category of a failure


def json_payload(value: object) -> Payload:
    """``value`` as JSON."""
    return Payload(msgspec.json.encode(value), JSON)


def failed(failure: Failed) -> Payload:
    """A failure: clients tell it from a success by the top-level key ``error``."""
    told = json_payload({"error": failure.message, "category": failure.category})
    return told._replace(outcome=failure.category)


def op_payload(
    result: ops.OpResult,
    *,
    model_id: str,
    head: Mapping[str, float] | None = None,
    checkpoint: str | None = None,
) -> Payload:
    """The answer to a training future.

    ``head`` is added to its metrics, if it has any; ``checkpoint`` is what a model was created
    from.
    """
    match result:
        case Failed():
            return failed(result)
        case ops.ForwardBackwardDone(metrics=metrics):
            told = msgspec.structs.replace(result, metrics={**metrics, **(head or {})})
            return Payload(forward_backward_output(told), PROTOBUF)
        case ops.OptimStepDone(metrics=metrics):
            numbers = {**metrics, **(head or {})}
            return json_payload({"metrics": {k: json_number(v) for k, v in numbers.items()}})
        case _:
            return json_payload(_json_result(result, model_id, checkpoint))


def sample_payload(result: sampling.SampleResult) -> Payload:
    """The answer to a sampling future."""
    match result:
        case sampling.SampleFailed():
            return failed(result.failure)
        case sampling.SampleDone():
            return Payload(sample_response(result), PROTOBUF)
        case _:
            assert_never(result)


def is_metric_name(name: str) -> bool:
    """Whether clients can read a training metric: ``<name>:<reduction>``, one colon."""
    return name.count(":") == 1


def forward_backward_output(done: ops.ForwardBackwardDone) -> bytes:
    """``ForwardBackwardOutput``: datums in order, one record per stretch of equal row shape.

    A metric whose name clients would stumble over is left out.
    """
    output = pb.ForwardBackwardOutput(loss_fn_output_type=RECORD)
    for (dtype, row), group in itertools.groupby(done.logprobs, key=_row):
        _add_record(output.loss_fn_outputs.add(), list(group), dtype, row)
    for name, value in done.metrics.items():
        if is_metric_name(name):
            output.metrics[name] = value
    return output.SerializeToString()


def sample_response(done: sampling.SampleDone) -> bytes:
    """``SampleResponse``; the byte arrays are passed on as they are."""
    response = pb.SampleResponse(prompt_cache_hit_tokens=done.prompt_cache_hit_tokens)
    for sequence in done.sequences:
        added = response.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=sequence.tokens,
            logprobs=sequence.logprobs,
        )
        if sequence.topk is not None:
            _set_topk(added.topk_sampled_logprobs, sequence.topk)
    if done.prompt_logprobs is not None:
        response.prompt_logprobs = done.prompt_logprobs
    if done.topk_prompt_logprobs is not None:
        _set_topk(response.topk_prompt_logprobs, done.topk_prompt_logprobs)
    if done.target_prompt_logprobs is not None:
        field = response.target_prompt_logprobs
        set_scores(field, done.target_prompt_logprobs, done.prompt_tokens)
    if done.prompt_alt_tokens is not None:
        _set_alternatives(response.prompt_alt_tokens, done.prompt_alt_tokens)
    return response.SerializeToString()


def _json_result(
    result: ops.CreateModelDone
    | ops.SaveWeightsDone
    | ops.SaveWeightsForSamplerDone
    | ops.SaveWeightsExternalDone
    | ops.LoadWeightsDone,
    model_id: str,
    checkpoint: str | None,
) -> dict[str, Any]:
    match result:
        case ops.CreateModelDone() if checkpoint is None:
            return {"type": "create_model", "model_id": model_id}
        case ops.CreateModelDone():
            return {"type": "load_weights", "path": checkpoint, "model_id": model_id}
        case ops.LoadWeightsDone():
            return {"type": "load_weights", "path": result.path, "model_id": model_id}
        case ops.SaveWeightsDone():
            return {"type": "save_weights", "path": result.path}
        case ops.SaveWeightsExternalDone():
            told = {"path": result.path, "size_bytes": result.size_bytes}
            return {"type": "save_weights_external"} | told
        case ops.SaveWeightsForSamplerDone():
            return {"type": "save_weights_for_sampler"} | _sampler_target(result)
        case _:
            assert_never(result)


def _sampler_target(result: ops.SaveWeightsForSamplerDone) -> dict[str, str]:
    if result.sampling_session_id is not None:
        return {"sampling_session_id": result.sampling_session_id}
    return {} if result.path is None else {"path": result.path}


def json_number(value: float) -> float | str:
    """JSON has no NaN or infinity; as texts the client reads them as the numbers they are."""
    return value if math.isfinite(value) else str(value)


def _row(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape[1:]


def _add_record(
    record: pb.ArrayRecord, datums: Sequence[Tensor], dtype: str, row: Iterable[int]
) -> None:
    record.type_tag = RECORD
    record.num_datums = len(datums)
    ends = np.cumsum([0, *(len(datum.data) for datum in datums)], dtype="<i8")
    batch = record.fields["logprobs"]
    batch.data = b"".join(datum.data for datum in datums)
    batch.offsets = ends.tobytes()
    batch.dtype = tensors.NUMBERS[dtype]
    batch.trailing_shape.extend(row)


def _set_alternatives(field: pb.PromptAltTokens, drawn: sampling.TopK) -> None:
    for tensor, dtype, data in (
        (field.tokens, pb.DTYPE_INT32, drawn.token_ids),
        (field.logprobs, pb.DTYPE_FLOAT32, drawn.logprobs),
    ):
        tensor.dtype, tensor.dense = dtype, data
        tensor.shape.extend((drawn.length, drawn.k))


def _set_topk(target: pb.TopkLogprobs, topk: sampling.TopK) -> None:
    target.token_ids = topk.token_ids
    target.logprobs = topk.logprobs
    target.k = topk.k
    target.length = topk.length
