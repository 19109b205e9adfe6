"""Where two outcomes differ, and by how much. Pure.

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

from tinsmith.messages.base import ITEM_SIZE, Failed, Tensor, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_WHOLES = (msgspec.Struct, dict, tuple)

_ABSENT = "(absent)"
_WHOLE = "result"  # what a message is called when it differs as a whole


@dataclass(frozen=True)
class Difference:
    """The first place where two outcomes differ."""

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


class Comparison:
    """Of one outcome with the one that it should equal."""

    def __init__(self, *, tolerance: float | None = None) -> None:
        """``tolerance`` is absolute; None asks for equal bits."""
        self._tolerance = tolerance
        self.largest = NO_GAP
        """The largest gap between two numbers; only kept with a tolerance."""

    def first(self, expected: msgspec.Struct, found: msgspec.Struct) -> Difference | None:
        """The first difference between two messages; None when there is none."""
        if encode(expected) == encode(found):
            return None
        differences = list(self._between("", expected, found))
        if differences:
            return differences[0]
        if self._tolerance is not None or isinstance(expected, Failed):
            return None
        return Difference(_WHOLE, "these values", "the same values in another order")

    def _between(self, field: str, expected: object, found: object) -> Iterator[Difference]:
        if type(expected) is not type(found):
            yield Difference(field or _WHOLE, _shown(expected), _shown(found))
        elif isinstance(expected, Tensor) and isinstance(found, Tensor):
            yield from self._between_tensors(field, expected, found)
        elif isinstance(expected, float) and isinstance(found, float):
            yield from self._between_numbers(field, expected, found)
        elif isinstance(expected, _WHOLES) and isinstance(found, _WHOLES):
            left, right = _parts(field, expected), _parts(field, found)
            for name in left | right:
                yield from self._between(name, left.get(name, _ABSENT), right.get(name, _ABSENT))
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
        elif expected.dtype != "float32":
            yield Difference(field, _digits(expected.data), _digits(found.data))
        else:
            left, right = _float32(expected), _float32(found)
            if (at := self._apart(field, expected.shape, left, right)) is not None:
                name = _at(field, expected.shape, at)
                yield Difference(name, f"{left[at]:.9g}", f"{right[at]:.9g}")

    def _apart(
        self,
        field: str,
        shape: tuple[int, ...],
        expected: NDArray[np.float32],
        found: NDArray[np.float32],
    ) -> int | None:
        """The flat index of the first number that is not equal, or not near enough."""
        if self._tolerance is None:
            return int(np.argmax(expected.view(np.uint32) != found.view(np.uint32)))
        with np.errstate(invalid="ignore"):  # infinity less infinity; NaN is near nothing
            gaps = np.abs(found.astype(np.float64) - expected)
        worst = int(np.argmax(gaps))  # the first NaN, if there is one
        if self._is_near(Gap(float(gaps[worst]), _at(field, shape, worst))):
            return None
        return int(np.argmax(~(gaps <= self._tolerance)))

    def _is_near(self, gap: Gap) -> bool:
        if gap.amount > self.largest.amount or math.isnan(gap.amount):
            self.largest = gap
        return self._tolerance is not None and gap.amount <= self._tolerance


def _parts(
    field: str, whole: msgspec.Struct | dict[Any, Any] | tuple[Any, ...]
) -> dict[str, object]:
    """What a message, a dict or a tuple consists of, by the name that each part is told by."""
    if isinstance(whole, Failed):
        return {"category": whole.category, "code": whole.code}
    if isinstance(whole, msgspec.Struct):
        prefix = f"{field}." if field else ""
        return {f"{prefix}{name}": getattr(whole, name) for name in whole.__struct_fields__}
    if isinstance(whole, dict):
        return {f"{field}[{key}]": value for key, value in whole.items()}
    return {f"{field}[{index}]": value for index, value in enumerate(whole)}


def _form(tensor: Tensor) -> str:
    """Its dtype and shape, and the bytes when they are not what these take."""
    told = f"{tensor.dtype} {list(tensor.shape)}"
    size = ITEM_SIZE[tensor.dtype] * math.prod(tensor.shape)
    return told if size == len(tensor.data) else f"{told} of {len(tensor.data)} bytes"


def _float32(tensor: Tensor) -> NDArray[np.float32]:
    return np.frombuffer(tensor.data, "<f4")


def _at(field: str, shape: tuple[int, ...], flat: int) -> str:
    return field + "".join(f"[{index}]" for index in np.unravel_index(flat, shape))


def _digits(data: bytes) -> str:
    return f"{data[:16].hex()}..."


def _shown(value: object) -> str:
    if isinstance(value, Failed):
        return f"failed ({value.category}: {value.message})"
    if isinstance(value, msgspec.Struct):
        return type(value).__name__
    return _ABSENT if value == _ABSENT else repr(value)
