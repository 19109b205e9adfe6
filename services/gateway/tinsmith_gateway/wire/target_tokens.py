"""``target_prompt_logprobs``: the tokens to score, from JSON, and their scores, to protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tinsmith.errors import InvalidRequest
from tinsmith.messages.sampling import Cells, TargetTokens
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tinsmith.messages.sampling import TargetScores

FIELD = "target_prompt_logprobs"


class JsonTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor as clients write it in JSON: dense, or the cells of a CSR matrix."""

    data: list[int]
    dtype: str = "int64"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


def target_tokens(asked: JsonTensor, prompt_length: int, vocab_size: int) -> TargetTokens:
    """``asked`` for a prompt of so many tokens.

    Raises:
        InvalidRequest: it is no int64 matrix [prompt_length - 1, K], its cells do not fit, or it
            names no token below ``vocab_size``.
    """
    shape = asked.shape or []
    if asked.dtype != "int64" or len(shape) != 2 or shape[0] != prompt_length - 1 or shape[1] < 1:
        raise InvalidRequest(
            f"{FIELD}: dtype {asked.dtype}, shape {asked.shape} for a prompt of {prompt_length} "
            f"tokens; send int64 token ids of shape [{prompt_length - 1}, K]"
        )
    tokens = _int64(asked.data, "data")
    wrong = np.flatnonzero((tokens < -1) | (tokens >= vocab_size))
    if wrong.size:
        raise InvalidRequest(
            f"{FIELD}: data[{wrong[0]}] is {tokens[wrong[0]]}, not a token in 0..{vocab_size - 1} "
            "or -1 for none"
        )
    if not (tokens >= 0).any():
        raise InvalidRequest(f"{FIELD}: names no token to score; leave it out")
    return TargetTokens(tokens=tokens.astype("<i4").tobytes(), cells=_cells(asked, shape))


def set_scores(field: pb.Tensor, scores: TargetScores, prompt_length: int) -> None:
    """Write ``scores`` in the layout that was asked for."""
    field.dtype = pb.DTYPE_FLOAT32
    field.shape.extend((prompt_length - 1, scores.cells.width))
    if not scores.cells.bounds:
        field.dense = scores.logprobs
        return
    field.sparse_csr.values = scores.logprobs
    field.sparse_csr.crow_indices = scores.cells.bounds
    field.sparse_csr.col_indices = scores.cells.columns


def _cells(asked: JsonTensor, shape: list[int]) -> Cells:
    rows, width = shape
    if asked.sparse_crow_indices is None or asked.sparse_col_indices is None:
        if len(asked.data) != rows * width:
            raise InvalidRequest(
                f"{FIELD}: {len(asked.data)} items in data do not fill shape {shape}"
            )
        return Cells(width=width)
    bounds = _int64(asked.sparse_crow_indices, "sparse_crow_indices")
    columns = _int64(asked.sparse_col_indices, "sparse_col_indices")
    is_rising = len(bounds) == rows + 1 and bounds[0] == 0 and (bounds[1:] >= bounds[:-1]).all()
    if not (is_rising and bounds[-1] == len(columns) == len(asked.data)):
        raise InvalidRequest(
            f"{FIELD}: sparse_crow_indices must be {rows + 1} numbers that rise from 0 to the "
            f"{len(asked.data)} items of data, and sparse_col_indices as many as these"
        )
    if ((columns < 0) | (columns >= width)).any():
        raise InvalidRequest(f"{FIELD}: sparse_col_indices are not all in 0..{width - 1}")
    return Cells(width=width, bounds=bounds.tobytes(), columns=columns.tobytes())


def _int64(numbers: list[int], name: str) -> NDArray[np.int64]:
    try:
        return np.array(numbers, dtype="<i8")
    except OverflowError as error:
        raise InvalidRequest(f"{FIELD}: {name}: not all are 64-bit integers") from error
