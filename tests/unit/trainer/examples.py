"""Ops for the trainer made of plain lists, and their results as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinsmith.messages.base import Tensor
from tinsmith.messages.ops import Datum, ForwardBackward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.messages.ops import ForwardBackwardDone

DTYPES = {"int32": "<i4", "int64": "<i8", "float32": "<f4"}


def tensor(values: Sequence[float], dtype: str) -> Tensor:
    array = np.asarray(values, dtype=DTYPES[dtype])
    return Tensor(dtype, array.shape, array.tobytes())


def datum(
    tokens: Sequence[int],
    targets: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
) -> Datum:
    """Without targets, each token's target is its own id plus one."""
    if targets is None:
        targets = [token + 1 for token in tokens]
    inputs = {"target_tokens": tensor(targets, "int64")}
    if weights is not None:
        inputs["weights"] = tensor(weights, "float32")
    return Datum(tokens=tensor(tokens, "int32"), inputs=inputs)


def random_datum(length: int, seed: int = 0, *, vocab: int = 400) -> Datum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, length + 1)
    return datum(tokens[:-1], tokens[1:], rng.uniform(-1, 2, length))


def cross_entropy(*data: Datum, forward_only: bool = False) -> ForwardBackward:
    return ForwardBackward(data=data, loss_fn="cross_entropy", forward_only=forward_only)


def values(wire: Tensor) -> np.ndarray:
    return np.frombuffer(wire.data, DTYPES[wire.dtype]).reshape(wire.shape)


def logprobs(done: ForwardBackwardDone) -> list[np.ndarray]:
    return [values(wire) for wire in done.logprobs]
