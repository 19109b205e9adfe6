"""The datums of an op, checked before anything is computed: from wire tensors to arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith.messages.base import ITEM_SIZE

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from tinsmith.messages.base import Tensor
    from tinsmith.messages.ops import Datum
    from tinsmith_trainer.losses import Loss

TARGETS = "target_tokens"

_NUMPY = {"int32": "<i4", "int64": "<i8", "float32": "<f4"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the base model can take."""

    vocab_size: int
    context_length: int  # tokens


@dataclass(frozen=True, slots=True)
class Example:
    """A valid datum; all arrays have its length."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    inputs: dict[str, NDArray[np.float32]]  # the loss's, absent ones filled in

    def __len__(self) -> int:
        return len(self.tokens)


def parse(data: Collection[Datum], loss: Loss, limits: Limits) -> list[Example]:
    """Every datum as an ``Example``; InvalidRequest for the first one that is not valid."""
    if not data:
        raise InvalidRequest("data: there are 0 datums; send at least 1")
    return [_parse(datum, f"data[{index}]", loss, limits) for index, datum in enumerate(data)]


def _parse(datum: Datum, where: str, loss: Loss, limits: Limits) -> Example:
    tokens = _tokens(datum.tokens, f"{where}.model_input", limits)
    known = {TARGETS, *loss.inputs}
    for key in datum.inputs:
        if key not in known:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{key!r}]: {loss.name} does not take it; "
                f"it takes {', '.join(sorted(known))}"
            )
    at = f"{where}.loss_fn_inputs[{TARGETS!r}]"
    if TARGETS not in datum.inputs:
        raise InvalidRequest(f"{at}: missing; {loss.name} needs one target per input token")
    _check_length(datum.inputs[TARGETS], at, len(tokens))
    targets = _ids(datum.inputs[TARGETS], at, limits.vocab_size)
    inputs = {
        key: _floats(datum.inputs.get(key), f"{where}.loss_fn_inputs[{key!r}]", default, tokens)
        for key, default in loss.inputs.items()
    }
    return Example(tokens, targets, inputs)


def _tokens(tensor: Tensor, at: str, limits: Limits) -> NDArray[np.int64]:
    tokens = _ids(tensor, at, limits.vocab_size)
    if not len(tokens):
        raise InvalidRequest(f"{at}: it has 0 tokens; send at least 1")
    if len(tokens) > limits.context_length:
        raise InvalidRequest(
            f"{at}: {len(tokens)} tokens are {len(tokens) - limits.context_length} more than the "
            f"context window of {limits.context_length}; shorten or split the datum"
        )
    return tokens


def _ids(tensor: Tensor, at: str, vocab_size: int) -> NDArray[np.int64]:
    if tensor.dtype not in {"int32", "int64"}:
        raise InvalidRequest(f"{at}: dtype {tensor.dtype} cannot hold token ids; use int64")
    ids = _vector(tensor, at).astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise InvalidRequest(
            f"{at}[{outside[0]}]: token id {ids[outside[0]]} is not in the vocabulary, "
            f"0 to {vocab_size - 1}; use this model's tokenizer"
        )
    return ids


def _floats(
    tensor: Tensor | None, at: str, default: float | None, tokens: NDArray[np.int64]
) -> NDArray[np.float32]:
    if tensor is None:
        if default is None:
            raise InvalidRequest(f"{at}: missing; send one float32 per target token")
        return np.full(len(tokens), default, dtype=np.float32)
    if tensor.dtype != "float32":
        raise InvalidRequest(f"{at}: dtype is {tensor.dtype}; use float32")
    _check_length(tensor, at, len(tokens))
    values = _vector(tensor, at).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise InvalidRequest(f"{at}[{bad[0]}]: {values[bad[0]]} is not a finite number")
    return values


def _check_length(tensor: Tensor, at: str, tokens: int) -> None:
    """Compare with the number of input tokens; a second dimension is another feature."""
    if len(tensor.shape) == 2:
        raise NotSupported(
            f"{at}: shape {list(tensor.shape)} gives several targets per position, which this "
            f"server does not take; send one per position, shape [{tokens}]"
        )
    if tensor.shape != (tokens,):
        raise InvalidRequest(
            f"{at}: shape {list(tensor.shape)} does not match the {tokens} tokens of "
            f"model_input; send shape [{tokens}]"
        )


def _vector(tensor: Tensor, at: str) -> NDArray[np.generic]:
    """The values of a 1-D tensor; the shape must tell the truth about the bytes."""
    if len(tensor.shape) != 1:
        raise InvalidRequest(f"{at}: shape {list(tensor.shape)} is not one-dimensional")
    size = math.prod(tensor.shape) * ITEM_SIZE[tensor.dtype]
    if tensor.shape[0] < 0 or size != len(tensor.data):
        raise InvalidRequest(
            f"{at}: shape {list(tensor.shape)} of {tensor.dtype} takes {size} bytes, but "
            f"{len(tensor.data)} came"
        )
    return np.frombuffer(tensor.data, dtype=_NUMPY[tensor.dtype])
