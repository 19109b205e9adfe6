"""The operations that a loss sent as data may use, each of known cost.

None of them looks anything up by name, writes to its inputs or makes a tensor larger than its
inputs broadcast together. ``Budget`` bounds what a graph may make in all.
"""

# ruff: noqa: A006, PLW0108 - torch's parameter names, and no more of them than are written here

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Value = Any
"""A tensor, a number, or a tuple of them: graphs have no static types."""

_LARGEST_INT = 1 << 53


class Budget:
    """How many elements the results of a graph may still have."""

    def __init__(self, elements: int) -> None:
        self._all = self._left = elements

    def spend(self, elements: int) -> None:
        """InvalidRequest when there are not as many left."""
        self._left -= elements
        if self._left < 0:
            raise InvalidRequest(
                f"its results have more than {self._all} elements in all; avoid products of every "
                "token with every other"
            )


def sizes_of(arguments: Sequence[Value]) -> int:
    """Elements of a result at most: of the tensors broadcast together, or laid side by side."""
    shapes = [value.shape for value in _tensors(arguments)]
    if not shapes:
        return 0
    together = sum(math.prod(shape) for shape in shapes)
    try:
        return max(together, math.prod(np.broadcast_shapes(*shapes)))
    except ValueError:  # they do not go together: no operation will take them so
        return together


def checked(value: Value) -> Value:
    """``value``; ValueError for an integer that no size or index can be."""
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        msg = f"the integer {value:.3g} is too large"
        raise ValueError(msg)
    return value


def _tensors(value: Value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [found for item in value for found in _tensors(item)]
    return []


def _tensor(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _pow(base: Value, exponent: Value) -> Value:
    # Of Python's integers it could take for ever.
    return (base if isinstance(base, Tensor) else float(base)) ** _number(exponent)


def _getattr(value: Tensor, name: str) -> Value:
    if name not in ("shape", "ndim"):
        msg = f"attribute {name!r} is not allowed; use shape or ndim"
        raise ValueError(msg)
    return tuple(value.shape) if name == "shape" else value.ndim


def _getitem(value: Value, index: Value) -> Value:
    for part in index if isinstance(index, tuple) else (index,):
        if not (part is None or part is Ellipsis or isinstance(part, int | slice)):
            msg = "an index must be made of integers, slices, None and ...; use where for masks"
            raise ValueError(msg)
    return value[index]


def _size(value: Tensor, dim: int | None = None) -> Value:
    return tuple(value.shape) if dim is None else value.shape[dim]


def _extreme(
    whole: Callable[[Tensor], Tensor], pairwise: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    def extreme(x: Tensor, other: Value = None) -> Tensor:
        if other is None:
            return whole(x)
        if not isinstance(other, Tensor):
            msg = "a dimension is not allowed; use amax or amin"
            raise TypeError(msg)
        return pairwise(x, other)

    return extreme


def _maximum(first: Value, second: Value) -> Tensor:
    return torch.maximum(_tensor(first), _tensor(second))


def _minimum(first: Value, second: Value) -> Tensor:
    return torch.minimum(_tensor(first), _tensor(second))


def _number(value: Value) -> Value:
    """``value``; TypeError for texts and tuples, whose products could be of any size."""
    if not isinstance(value, Tensor | int | float):
        msg = f"a {type(value).__name__} is no operand; use tensors and numbers"
        raise TypeError(msg)
    return value


def _one(function: Callable[[Any], Any]) -> Callable[[Value], Value]:
    """Of one argument, and nothing beside it."""
    return lambda x: function(_number(x))


def _two(function: Callable[[Any, Any], Any]) -> Callable[[Value, Value], Value]:
    return lambda x, other: function(_number(x), _number(other))


def _reduced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(
        x: Tensor,
        dim: int | tuple[int, ...] | None = None,
        keepdim: bool = False,  # noqa: FBT001, FBT002 - torch's order
    ) -> Tensor:
        return function(x) if dim is None else function(x, dim, keepdim)

    return reduce


def _shaped(x: Tensor, *shape: Value) -> Tensor:
    return x.reshape(*shape)


_ADD, _SUB, _MUL, _DIV, _NEG = (
    _two(lambda a, b: a + b),
    _two(lambda a, b: a - b),
    _two(lambda a, b: a * b),
    _two(lambda a, b: a / b),
    _one(lambda a: -a),
)
_AND, _OR = _two(lambda a, b: a & b), _two(lambda a, b: a | b)

_LIKE_TORCH = (
    "abs ceil clone cos exp expm1 floor isfinite isnan log log1p logical_not reciprocal relu rsqrt "
    "sigmoid sign sin sqrt square tanh detach"
)
OPERATIONS: dict[str, Callable[..., Value]] = {
    **{name: _one(getattr(torch, name)) for name in _LIKE_TORCH.split()},
    "expit": _one(torch.sigmoid),
    "log_sigmoid": _one(F.logsigmoid),
    "logsigmoid": _one(F.logsigmoid),
    "softplus": _one(F.softplus),
    "contiguous": _one(lambda a: a),
    "pos": _one(lambda a: a),
    "neg": _NEG,
    "negative": _NEG,
    "invert": _one(lambda a: ~a),
    "float": _one(lambda a: a.float()),
    "numel": _one(lambda a: a.numel()),
    "zeros_like": _one(torch.zeros_like),
    "ones_like": _one(torch.ones_like),
    "full_like": lambda x, fill_value: torch.full_like(x, fill_value),
    "add": _ADD,
    "sub": _SUB,
    "subtract": _SUB,
    "mul": _MUL,
    "multiply": _MUL,
    "div": _DIV,
    "divide": _DIV,
    "truediv": _DIV,
    "true_divide": _DIV,
    "pow": _pow,
    "and_": _AND,
    "or_": _OR,
    "logical_and": _two(torch.logical_and),
    "logical_or": _two(torch.logical_or),
    "eq": _two(lambda a, b: a == b),
    "ne": _two(lambda a, b: a != b),
    "lt": _two(lambda a, b: a < b),
    "le": _two(lambda a, b: a <= b),
    "gt": _two(lambda a, b: a > b),
    "ge": _two(lambda a, b: a >= b),
    "maximum": _maximum,
    "minimum": _minimum,
    "max": _extreme(torch.max, torch.maximum),
    "min": _extreme(torch.min, torch.minimum),
    "clamp": lambda x, min=None, max=None: torch.clamp(x, min, max),
    "clip": lambda x, min=None, max=None: torch.clamp(x, min, max),
    "clamp_min": lambda x, min: torch.clamp(x, min=min),
    "clamp_max": lambda x, max: torch.clamp(x, max=max),
    "where": lambda condition, x, other: torch.where(condition, x, other),
    "masked_fill": lambda x, mask, value: x.masked_fill(mask, value),
    "sum": _reduced(torch.sum),
    "mean": _reduced(torch.mean),
    "amax": _reduced(torch.amax),
    "amin": _reduced(torch.amin),
    "all": _reduced(torch.all),
    "any": _reduced(torch.any),
    "logsumexp": lambda x, dim, keepdim=False: torch.logsumexp(x, dim, keepdim),
    "softmax": lambda x, dim: torch.softmax(x, dim),
    "log_softmax": lambda x, dim: torch.log_softmax(x, dim),
    "cumsum": lambda x, dim: torch.cumsum(x, dim),
    "flatten": _one(torch.flatten),
    "reshape": _shaped,
    "view": _shaped,
    "squeeze": lambda x, dim=None: x.squeeze() if dim is None else x.squeeze(dim),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "stack": lambda tensors, dim=0: torch.stack(tuple(tensors), dim),
    "cat": lambda tensors, dim=0: torch.cat(tuple(tensors), dim),
    "getitem": _getitem,
    "getattr": _getattr,
    "size": _size,
}
