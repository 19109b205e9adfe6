"""What a receiver's engine holds: the canonical bfloat16 bits, or codes derived from them.

A plane is one named rule, so that two machines hold the same bits: its id says format, groups,
scale and rounding. bfloat16 tensors of two or more dimensions are quantised along their last one;
the others stay as they are. ``NAME:scale`` holds the scales of ``NAME``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from tinsmith.errors import InvalidRequest
from tinsmith.weights.codes import FP8, INT8, Code, quantise, scales
from tinsmith.weights.specs import TensorSpec

if TYPE_CHECKING:
    from tinsmith.weights.bits import Bits, Indices
    from tinsmith.weights.sparse import Sparse

CANONICAL = "bf16"
BFLOAT16, FLOAT32 = "bfloat16", "float32"


class Shift(NamedTuple):
    """Elements of an array that change: where, from what, to what."""

    indices: Indices
    old: Bits
    new: Bits


class Plane(Protocol):
    """One rule."""

    @property
    def id(self) -> str:
        """Its name, which is also that of the rule."""

    def specs(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """The arrays that stand for a tensor, by name."""

    def whole(self, name: str, spec: TensorSpec, bits: Bits) -> dict[str, Bits]:
        """Their contents, flat."""

    def shifts(self, name: str, spec: TensorSpec, old: Bits, patch: Sparse) -> dict[str, Shift]:
        """What changes in them when ``patch`` is written over ``old``."""


@dataclass(frozen=True)
class Same:
    """The canonical bits themselves."""

    id: str = CANONICAL

    def specs(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """See ``Plane``."""
        return {name: spec}

    def whole(self, name: str, spec: TensorSpec, bits: Bits) -> dict[str, Bits]:
        """See ``Plane``."""
        del spec
        return {name: bits}

    def shifts(self, name: str, spec: TensorSpec, old: Bits, patch: Sparse) -> dict[str, Shift]:
        """See ``Plane``."""
        del spec
        return {name: Shift(patch.indices, old[patch.indices], patch.values)}


@dataclass(frozen=True)
class Widened:
    """float32, for machines that compute in it: every bfloat16 number is one."""

    id: str = "fp32"

    def specs(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """See ``Plane``."""
        return {name: TensorSpec(FLOAT32, spec.shape)}

    def whole(self, name: str, spec: TensorSpec, bits: Bits) -> dict[str, Bits]:
        """See ``Plane``."""
        return {name: _widened(spec, bits)}

    def shifts(self, name: str, spec: TensorSpec, old: Bits, patch: Sparse) -> dict[str, Shift]:
        """See ``Plane``."""
        before, after = _widened(spec, old[patch.indices]), _widened(spec, patch.values)
        return {name: Shift(patch.indices, before, after)}


@dataclass(frozen=True)
class Quantised:
    """Eight-bit codes; groups of ``group`` elements of a row, 0 for whole rows."""

    id: str
    dtype: str
    code: Code
    group: int

    def specs(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """See ``Plane``."""
        if not _is_quantised(spec):
            return {name: spec}
        of_scales = (*spec.shape[:-1], self._per_row(spec))
        return {
            name: TensorSpec(self.dtype, spec.shape),
            f"{name}:scale": TensorSpec("float8_e8m0", of_scales),
        }

    def whole(self, name: str, spec: TensorSpec, bits: Bits) -> dict[str, Bits]:
        """See ``Plane``."""
        if not _is_quantised(spec):
            return {name: bits}
        row, group, per_row = spec.shape[-1], self._size(spec), self._per_row(spec)
        groups = bits.reshape(-1, row)
        if row % group:  # zeros change neither a scale nor a code
            groups = np.pad(groups, ((0, 0), (0, per_row * group - row)))
        groups = groups.reshape(-1, group)
        stored = scales(self.code, groups)
        codes = quantise(self.code, groups, stored).reshape(-1, per_row * group)[:, :row]
        return {name: np.ascontiguousarray(codes).reshape(-1), f"{name}:scale": stored}

    def shifts(self, name: str, spec: TensorSpec, old: Bits, patch: Sparse) -> dict[str, Shift]:
        """See ``Plane``."""
        if not _is_quantised(spec):
            return {name: Shift(patch.indices, old[patch.indices], patch.values)}
        row, group, per_row = spec.shape[-1], self._size(spec), self._per_row(spec)
        number = patch.indices // row * per_row + patch.indices % row // group
        touched, of_patch = np.unique(number, return_inverse=True)
        column = (touched % per_row * group)[:, None] + np.arange(group)
        at = (touched // per_row * row)[:, None] + column
        is_there = column < row
        before = np.where(is_there, old[np.where(is_there, at, 0)], old.dtype.type(0))
        after = before.copy()
        after[of_patch, patch.indices % row % group] = patch.values
        old_scales, new_scales = scales(self.code, before), scales(self.code, after)
        old_codes = quantise(self.code, before, old_scales)
        new_codes = quantise(self.code, after, new_scales)
        differ = old_codes != new_codes
        rescaled = old_scales != new_scales
        return {
            name: Shift(at[differ], old_codes[differ], new_codes[differ]),
            f"{name}:scale": Shift(touched[rescaled], old_scales[rescaled], new_scales[rescaled]),
        }

    def _size(self, spec: TensorSpec) -> int:
        return min(self.group or spec.shape[-1], spec.shape[-1])

    def _per_row(self, spec: TensorSpec) -> int:
        return -(-spec.shape[-1] // self._size(spec))


BF16 = Same()
FP32 = Widened()
INT8_ROWS = Quantised("int8.row.pow2.rne.v1", "int8", INT8, 0)
FP8_BLOCKS = Quantised("fp8e4m3.b128.pow2.rne.v1", "float8_e4m3fn", FP8, 128)
PLANES: dict[str, Plane] = {p.id: p for p in (BF16, FP32, INT8_ROWS, FP8_BLOCKS)}


def plane(plane_id: str) -> Plane:
    """The plane of that id; InvalidRequest names those there are."""
    if (found := PLANES.get(plane_id)) is None:
        raise InvalidRequest(
            f"plane: {plane_id!r} is not one of {', '.join(sorted(PLANES))}; choose one of them"
        )
    return found


def _is_quantised(spec: TensorSpec) -> bool:
    return spec.dtype == BFLOAT16 and len(spec.shape) > 1 and 0 not in spec.shape


def _widened(spec: TensorSpec, bits: Bits) -> Bits:
    if spec.dtype != BFLOAT16:
        return bits
    wide: Bits = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide
