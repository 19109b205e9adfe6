"""Where two messages differ, part by part, and by how much. Pure.

Without a tolerance every bit counts: -0.0 is not 0.0. With one, numbers may differ by it, and
everything else must be equal still. Failures are compared by who must act and by their kind:
their texts may hold figures of the machine.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tinsmith.logbook.text import plain
from tinsmith.messages.base import ITEM_SIZE, Failed, Tensor, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

_WHOLES = (msgspec.Struct, dict, tuple)
_NUMBERS = {"float32": "<f4", "int64": "<i8", "int32": "<i4"}

_ABSENT = "(absent)"
_WHOLE = "result"  # what a message is called when it differs as a whole
_MAX_SHOWN = 80


@dataclass(frozen=True)
class Difference:
    """One place where two messages differ."""

    field: str  # such as logprobs[0][3], metrics[loss:sum] or state
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.field}: {self.found}, where the log has {self.expected}"


@dataclass(frozen=True)
class Gap:
    """By how much a number differed, and which one."""

    amount: float
    field: str


NO_GAP = Gap(0.0, "")
Names = tuple["Mapping[str, str]", "Mapping[str, str]"]


class Comparison:
    """Of messages with those that they should equal."""

    def __init__(self, *, tolerance: float | None = None, names: Names = ({}, {})) -> None:
        """``tolerance`` is absolute; None asks for equal bits.

        ``names`` are texts that stand for something else on either side, such as ids that
        differ between any two runs: text by text, by what it is replaced.
        """
        self._tolerance = tolerance
        self._names = names
        self.largest = NO_GAP
        """The largest gap between two numbers; only kept with a tolerance."""

    def first(self, expected: msgspec.Struct, found: msgspec.Struct) -> Difference | None:
        """The first difference between two messages; None when there is none."""
        if encode(expected) == encode(found):
            return None
        differences = list(self.between("", expected, found))
        if differences:
            return differences[0]
        if self._tolerance is not None or isinstance(expected, Failed):
            return None
        return Difference(_WHOLE, "these values", "the same values in another order")

    def between(self, field: str, expected: object, found: object) -> Iterator[Difference]:
        """Every difference of two values, which are called ``field``."""
        if isinstance(expected, str) and isinstance(found, str):
            expected, found = map(_renamed, (expected, found), self._names)
        if type(expected) is not type(found):
            yield Difference(field or _WHOLE, _shown(expected), _shown(found))
        elif isinstance(expected, Tensor) and isinstance(found, Tensor):
            yield from self._between_tensors(field, expected, found)
        elif isinstance(expected, float) and isinstance(found, float):
            yield from self._between_numbers(field, expected, found)
        elif isinstance(expected, _WHOLES) and isinstance(found, _WHOLES):
            left, right = _parts(field, expected), _parts(field, found)
            for name in left | right:
                yield from self.between(name, left.get(name, _ABSENT), right.get(name, _ABSENT))
        elif expected != found:
            yield Difference(field, _shown(expected), _shown(found))

    def _between_numbers(self, field: str, expected: float, found: float) -> Iterator[Difference]:
        if self._tolerance is None:
            is_equal = struct.pack("<d", expected) == struct.pack("<d", found)
        else:
            is_equal = self._is_near(Gap(abs(found - expected), field))
        if not is_equal:
            yield Difference(field, repr(expected), repr(found))

    def _between_tensors(self, field: str, expected: Tensor, found: Tensor) -> Iterator[Difference]:
        if _form(expected) != _form(found):
            yield Difference(field, _form(expected), _form(found))
        elif expected.data == found.data:
            return
        elif expected.dtype not in _NUMBERS or not _is_whole(expected):
            yield Difference(field, _digits(expected.data), _digits(found.data))
        else:
            left, right = _array(expected), _array(found)
            if (at := self._apart(field, expected, left, right)) is not None:
                name = _at(field, expected.shape, at)
                yield Difference(name, f"{left[at]:.9g}", f"{right[at]:.9g}")

    def _apart(
        self, field: str, tensor: Tensor, expected: NDArray[Any], found: NDArray[Any]
    ) -> int | None:
        """The flat index of the first number that is not equal, or not near enough."""
        if self._tolerance is None or tensor.dtype != "float32":
            bits = f"u{ITEM_SIZE[tensor.dtype]}"
            return int(np.argmax(expected.view(bits) != found.view(bits)))
        with np.errstate(invalid="ignore"):  # infinity less infinity; NaN is near nothing
            gaps = np.abs(found.astype(np.float64) - expected)
        worst = int(np.argmax(gaps))  # the first NaN, if there is one
        if self._is_near(Gap(float(gaps[worst]), _at(field, tensor.shape, worst))):
            return None
        return int(np.argmax(~(gaps <= self._tolerance)))

    def _is_near(self, gap: Gap) -> bool:
        if gap.amount > self.largest.amount or math.isnan(gap.amount):
            self.largest = gap
        return self._tolerance is not None and gap.amount <= self._tolerance


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for name, stand_in in names.items():
        text = text.replace(name, stand_in)
    return text


def _parts(
    field: str, whole: msgspec.Struct | dict[Any, Any] | tuple[Any, ...]
) -> dict[str, object]:
    """What a message, a dict or a tuple consists of, by the name that each part is told by."""
    if isinstance(whole, Failed):
        prefix = f"{field}." if field else ""
        return {f"{prefix}category": whole.category, f"{prefix}code": whole.code}
    if isinstance(whole, msgspec.Struct):
        prefix = f"{field}." if field else ""
        return {f"{prefix}{name}": getattr(whole, name) for name in whole.__struct_fields__}
    if isinstance(whole, dict):
        return {f"{field}[{key}]": value for key, value in whole.items()}
    return {f"{field}[{index}]": value for index, value in enumerate(whole)}


def _is_whole(tensor: Tensor) -> bool:
    """Whether its bytes are those that its shape takes; in a log from elsewhere it may lie."""
    return ITEM_SIZE[tensor.dtype] * math.prod(tensor.shape) == len(tensor.data)


def _form(tensor: Tensor) -> str:
    """Its dtype and shape, and the bytes when they are not what these take."""
    told = f"{tensor.dtype} {list(tensor.shape)}"
    return told if _is_whole(tensor) else f"{told} of {len(tensor.data)} bytes"


def _array(tensor: Tensor) -> NDArray[Any]:
    return np.frombuffer(tensor.data, _NUMBERS[tensor.dtype])


def _at(field: str, shape: tuple[int, ...], flat: int) -> str:
    return field + "".join(f"[{index}]" for index in np.unravel_index(flat, shape))


def _digits(data: bytes) -> str:
    return f"{data[:16].hex()}..."


def _shown(value: object) -> str:
    if isinstance(value, Failed):
        return f"failed ({value.category}: {plain(value.message, _MAX_SHOWN)})"
    if isinstance(value, msgspec.Struct):
        return type(value).__name__
    return _ABSENT if value == _ABSENT else plain(repr(value), _MAX_SHOWN)
