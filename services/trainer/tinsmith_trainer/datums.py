"""The datums of an op, checked before anything is computed: from wire tensors to arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import InvalidRequest, TooLarge
from tinsmith.loss_graphs import LOGPROBS
from tinsmith.messages.base import ITEM_SIZE
from tinsmith_trainer import provenance
from tinsmith_trainer.loss import HIGH, LOW, SAMPLED, listed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from tinsmith.messages.base import Tensor
    from tinsmith.messages.ops import Datum
    from tinsmith_trainer.loss import Loss

TARGETS = "target_tokens"
MAX_TARGETS = 1024  # per position

_NUMPY = {"int32": "<i4", "int64": "<i8", "float32": "<f4"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the base model can take."""

    vocab_size: int
    context_length: int  # tokens


@dataclass(frozen=True, slots=True)
class Example:
    """A valid datum of n tokens."""

    tokens: NDArray[np.int64]  # [n]
    targets: NDArray[np.int64]  # [n], or [n, k] for k targets per position
    inputs: dict[str, NDArray[np.float32]]  # the loss's, of the targets' shape, absent ones too
    sampled: NDArray[np.bool_] | None = None  # which targets were sampled, [n], if that is known
    extras: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    """What a loss of the client's own reads, of any shape."""

    def __len__(self) -> int:
        return len(self.tokens)


def parse(
    data: Collection[Datum], loss: Loss, settings: Mapping[str, float], limits: Limits
) -> list[Example]:
    """Every datum as an ``Example``; InvalidRequest for the first one that is not valid."""
    if not data:
        raise InvalidRequest("data: there are 0 datums; send at least 1")
    return [
        _parse(datum, f"data[{index}]", loss, settings, limits) for index, datum in enumerate(data)
    ]


def _parse(
    datum: Datum, where: str, loss: Loss, settings: Mapping[str, float], limits: Limits
) -> Example:
    tokens = _tokens(datum.tokens, f"{where}.model_input", limits)
    if loss.ranks is None:
        _check_keys(datum, where, loss)
    targets = _targets(datum, f"{where}.loss_fn_inputs[{TARGETS!r}]", loss, len(tokens), limits)
    inputs = _inputs(datum, where, loss, settings, targets.shape)
    sampled = provenance.sampled_targets(datum, where, tokens=len(tokens))
    if loss.needs_provenance:
        logprobs, advantages = inputs["logprobs"], inputs["advantages"]
        if sampled is None:
            sampled = provenance.inferred_targets(logprobs, advantages)
        provenance.check_advantages(sampled, advantages, where)
        inputs[SAMPLED] = sampled.astype(np.float32)
    extras = _extras(datum, where, loss.ranks, targets) if loss.ranks else {}
    return Example(tokens, targets, inputs, sampled, extras)


def _check_keys(datum: Datum, where: str, loss: Loss) -> None:
    known = {TARGETS, *loss.inputs}
    for key in datum.inputs:
        if key not in known:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{key!r}]: {loss.name} does not take it; "
                f"it takes {listed(known)}"
            )


def _tokens(tensor: Tensor, at: str, limits: Limits) -> NDArray[np.int64]:
    if len(tensor.shape) != 1:
        raise InvalidRequest(f"{at}: shape {list(tensor.shape)} is not one-dimensional")
    tokens = _ids(tensor, at, limits.vocab_size)
    if not len(tokens):
        raise InvalidRequest(f"{at}: it has 0 tokens; send at least 1")
    if len(tokens) > limits.context_length:
        raise InvalidRequest(
            f"{at}: {len(tokens)} tokens are {len(tokens) - limits.context_length} more than the "
            f"context window of {limits.context_length}; shorten or split the datum"
        )
    return tokens


def _targets(datum: Datum, at: str, loss: Loss, tokens: int, limits: Limits) -> NDArray[np.int64]:
    if TARGETS not in datum.inputs:
        raise InvalidRequest(f"{at}: missing; {loss.name} needs one target per input token")
    tensor = datum.inputs[TARGETS]
    if len(tensor.shape) == 2 and loss.takes_rows:
        _check_rows(tensor.shape, at, tokens)
    elif len(tensor.shape) == 2:
        raise InvalidRequest(
            f"{at}: shape {list(tensor.shape)} gives several targets per position, which "
            f"{loss.name} does not take; send shape [{tokens}], or use cross_entropy"
        )
    else:
        _check_shape(tensor, at, (tokens,), f"the {tokens} tokens of model_input")
    return _ids(tensor, at, limits.vocab_size)


def _check_rows(shape: tuple[int, ...], at: str, tokens: int) -> None:
    rows, columns = shape
    if rows != tokens or columns < 1:
        raise InvalidRequest(
            f"{at}: shape {list(shape)} does not match the {tokens} tokens of model_input; "
            f"send shape [{tokens}], or [{tokens}, k] for k targets per position"
        )
    if columns > MAX_TARGETS:
        raise TooLarge(
            f"{at}: shape {list(shape)} has {columns} targets per position, over the limit of "
            f"{MAX_TARGETS}; send the likeliest, or split them over several datums"
        )


def _inputs(
    datum: Datum,
    where: str,
    loss: Loss,
    settings: Mapping[str, float],
    shape: tuple[int, ...],
) -> dict[str, NDArray[np.float32]]:
    """Every input of the loss, float32 of ``shape``, whether or not it was sent."""
    inputs: dict[str, NDArray[np.float32]] = {}
    for key, default in loss.inputs.items():
        at = f"{where}.loss_fn_inputs[{key!r}]"
        if key in datum.inputs:
            inputs[key] = _floats(datum.inputs[key], at, shape)
        elif default is None:
            raise InvalidRequest(f"{at}: missing; send one float32 per target token")
        elif isinstance(default, float):
            inputs[key] = np.full(shape, default, dtype=np.float32)
        elif default in inputs:
            inputs[key] = inputs[default]
        else:
            inputs[key] = np.full(shape, settings[default], dtype=np.float32)
    if LOW in inputs:
        _check_bounds(inputs[LOW], inputs[HIGH], where)
    return inputs


def _extras(
    datum: Datum, where: str, ranks: Mapping[str, int], targets: NDArray[np.int64]
) -> dict[str, NDArray[np.generic]]:
    """What a loss of the client's own reads beside the log-probabilities."""
    shapes = {LOGPROBS: targets.shape}
    extras = {}
    for key in ranks.keys() - {LOGPROBS}:
        at = f"{where}.loss_fn_inputs[{key!r}]"
        if key not in datum.inputs:
            raise InvalidRequest(f"{at}: missing; the loss reads it")
        if datum.inputs[key].dtype not in _NUMPY:
            raise InvalidRequest(f"{at}: dtype is {datum.inputs[key].dtype}; use float32 or int64")
        values = _values(datum.inputs[key], at).copy()
        if (place := _first(~np.isfinite(values))) is not None:
            raise _not_finite(at, place, values[place])
        # A scalar comes without a shape, which stands for one dimension.
        extras[key] = values.reshape(()) if ranks[key] == 0 and values.size == 1 else values
        shapes[key] = extras[key].shape
    for key, shape in shapes.items():
        if len(shape) != ranks[key] or shape[:1] not in ((), (len(targets),)):
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{(TARGETS if key == LOGPROBS else key)!r}]: shape "
                f"{list(shape)} has not {ranks[key]} dimensions of which the first is "
                f"{len(targets)}, as the loss was declared"
            )
    return extras


def _check_bounds(low: NDArray[np.float32], high: NDArray[np.float32], where: str) -> None:
    bad = np.flatnonzero((low > high) | (low < 0))
    if len(bad):
        raise InvalidRequest(
            f"{where}.loss_fn_inputs[{LOW!r}][{bad[0]}]: {low[bad[0]]:g} is not between 0 and the "
            f"{HIGH} of {high[bad[0]]:g}; they bound the ratio itself, e.g. 0.8 and 1.2"
        )


def _ids(tensor: Tensor, at: str, vocab_size: int) -> NDArray[np.int64]:
    if tensor.dtype not in {"int32", "int64"}:
        raise InvalidRequest(f"{at}: dtype {tensor.dtype} cannot hold token ids; use int64")
    ids = _values(tensor, at).astype(np.int64)
    if (place := _first((ids < 0) | (ids >= vocab_size))) is not None:
        raise InvalidRequest(
            f"{at}{list(place)}: token id {ids[place]} is not in the vocabulary, "
            f"0 to {vocab_size - 1}; use this model's tokenizer"
        )
    return ids


def _floats(tensor: Tensor, at: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if tensor.dtype != "float32":
        raise InvalidRequest(f"{at}: dtype is {tensor.dtype}; use float32")
    _check_shape(
        tensor, at, shape, TARGETS if len(shape) > 1 else f"the {shape[0]} tokens of model_input"
    )
    values = _values(tensor, at).astype(np.float32)
    if (place := _first(~np.isfinite(values))) is not None:
        raise _not_finite(at, place, values[place])
    return values


def _not_finite(at: str, place: tuple[int, ...], value: object) -> InvalidRequest:
    return InvalidRequest(
        f"{at}{list(place)}: {value} is not a finite number; look where it was computed, and send "
        "0 for what should not count"
    )


def _check_shape(tensor: Tensor, at: str, shape: tuple[int, ...], of: str) -> None:
    if tensor.shape != shape:
        raise InvalidRequest(
            f"{at}: shape {list(tensor.shape)} does not match {of}; send shape {list(shape)}"
        )


def _first(is_bad: NDArray[np.bool_]) -> tuple[int, ...] | None:
    """The indices of the first true element."""
    found = np.argwhere(is_bad)
    return tuple(map(int, found[0])) if len(found) else None


def _values(tensor: Tensor, at: str) -> NDArray[np.generic]:
    """The array; the shape must tell the truth about the bytes."""
    size = math.prod(tensor.shape) * ITEM_SIZE[tensor.dtype]
    if any(length < 0 for length in tensor.shape) or size != len(tensor.data):
        raise InvalidRequest(
            f"{at}: shape {list(tensor.shape)} of {tensor.dtype} takes {size} bytes, but "
            f"{len(tensor.data)} came"
        )
    return np.frombuffer(tensor.data, dtype=_NUMPY[tensor.dtype]).reshape(tensor.shape)
