"""Where two runs part: the first op at which they differ, and in what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from tinsmith.ids import session_of
from tinsmith.logbook.contents import op_of, result_of
from tinsmith.logbook.text import plain
from tinsmith.messages import ops
from tinsmith.messages.base import ITEM_SIZE, Tensor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tinsmith.logbook.source import Logbook

MAX_SHOWN = 80
_NUMBERS = {"float32": "<f4", "int64": "<i8", "int32": "<i4"}
_WHOLES = (msgspec.Struct, dict, tuple)


class Side(NamedTuple):
    """One of the two runs."""

    logbook: Logbook
    model_id: str


class Step(NamedTuple):
    """An op of one side, as it went."""

    seq: int
    compared: dict[str, object]  # seq, op, result, state
    environment: dict[str, str]


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ."""

    seq: int
    field: str  # such as op.learning_rate or result.logprobs[0][3]
    a: str
    b: str
    environments: tuple[tuple[str, str, str], ...] = ()
    """What the op was computed with, as far as that differs."""


@dataclass(frozen=True)
class Outcome:
    """Of a comparison."""

    equal_ops: int
    difference: Difference | None


async def compare(a: Side, b: Side, *, on_op: Callable[[], None]) -> Outcome:
    """Compare two runs op by op up to the first difference.

    Their own ids, and those of their sessions, do not count.

    Raises:
        LogDamaged: an op or its result cannot be read.
    """
    walk = _Walk(_names(a.model_id), _names(b.model_id))
    left, right = _steps(a), _steps(b)
    equal = 0
    while True:
        one, other = await anext(left, None), await anext(right, None)
        if one is None or other is None:
            return Outcome(equal, _end(one, other))
        found = next(walk.between("", one.compared, other.compared), None)
        if found is not None:
            environments = tuple(walk.between("", one.environment, other.environment))
            return Outcome(equal, Difference(one.seq, *found, environments))
        equal += 1
        on_op()


def _end(one: Step | None, other: Step | None) -> Difference | None:
    """At least one side has no more ops."""
    longer = one or other
    if longer is None:
        return None
    a, b = ("its log has ended" if step is None else "it is there" for step in (one, other))
    return Difference(longer.seq, "op", a, b)


async def _steps(side: Side) -> AsyncIterator[Step]:
    environment: dict[str, str] = {}
    async for entry in side.logbook.entries(side.model_id):
        found = entry.entry
        if isinstance(found, ops.Owned):
            environment = found.environment
        elif isinstance(found, ops.Record):
            op, result = await op_of(side.logbook, found), await result_of(side.logbook, found)
            compared = {"seq": found.seq, "op": op.body, "result": result}
            yield Step(found.seq, {**compared, "state": found.state_blake3}, environment)


def _names(model_id: str) -> dict[str, str]:
    """What stands for the ids that differ in any two runs."""
    return {model_id: "<run>", session_of(model_id): "<session>"}


class _Walk:
    """Through two values of the same make, part by part."""

    def __init__(self, a_names: dict[str, str], b_names: dict[str, str]) -> None:
        self._a_names = a_names
        self._b_names = b_names

    def between(self, name: str, a: object, b: object) -> Iterator[tuple[str, str, str]]:
        """Every difference: which part, and what it is on either side."""
        if isinstance(a, str) and isinstance(b, str):
            a, b = _renamed(a, self._a_names), _renamed(b, self._b_names)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            yield from _between_tensors(name, a, b)
        elif isinstance(a, _WHOLES) and isinstance(b, _WHOLES) and type(a) is type(b):
            left, right = _parts(name, a), _parts(name, b)
            for part in left | right:
                yield from self.between(part, left.get(part), right.get(part))
        elif type(a) is not type(b) or (a != b and not _are_nan(a, b)):
            yield name, _shown(a), _shown(b)


def _renamed(text: str, names: dict[str, str]) -> str:
    for name, stand_in in names.items():
        text = text.replace(name, stand_in)
    return text


def _are_nan(a: object, b: object) -> bool:
    return a != a and b != b  # noqa: PLR0124 - what makes a NaN one


def _parts(
    name: str, whole: msgspec.Struct | dict[Any, Any] | tuple[Any, ...]
) -> dict[str, object]:
    prefix = f"{name}." if name else ""
    if isinstance(whole, msgspec.Struct):
        return {f"{prefix}{field_}": getattr(whole, field_) for field_ in whole.__struct_fields__}
    if isinstance(whole, dict):
        return {f"{prefix}{key}": value for key, value in whole.items()}
    return {f"{name}[{index}]": value for index, value in enumerate(whole)}


def _between_tensors(name: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, str, str]]:
    forms = [f"{t.dtype} {list(t.shape)} of {len(t.data)} bytes" for t in (a, b)]
    if forms[0] != forms[1]:
        yield name, forms[0], forms[1]
    elif a.data != b.data:
        left, right = (np.frombuffer(tensor.data, "u1") for tensor in (a, b))
        index = int(np.argmax(left != right)) // ITEM_SIZE[a.dtype]
        yield f"{name}[{index}]", _element(a, index), _element(b, index)


def _element(tensor: Tensor, index: int) -> str:
    """The value at the flat ``index``; as bytes where these are not whole numbers."""
    size = ITEM_SIZE[tensor.dtype]
    data = tensor.data[index * size : (index + 1) * size]
    if len(data) < size or tensor.dtype not in _NUMBERS:
        return data.hex()
    return f"{np.frombuffer(data, _NUMBERS[tensor.dtype])[0]:.9g}"


def _shown(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return type(value).__name__
    return "nothing" if value is None else plain(repr(value), MAX_SHOWN)
