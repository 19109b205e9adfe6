"""The file in which a change of weights comes: what is written where, elements as they are.

8 bytes, little-endian: the length of the header. The header, JSON: a list of tensors, each with its
name, salt, width of an element in bytes, count, and where its values and its indices (or null: it
is all of the tensor) begin. From the next multiple of 8 bytes on, the arrays, counted from there,
each at a multiple of 8 bytes too: integers of that width, and int64.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path

_WORD = 8  # bytes


class Part(NamedTuple):
    """What becomes of one tensor."""

    name: str
    salt: int  # of its digest
    values: torch.Tensor  # int16 or int32 [n]
    indices: torch.Tensor | None  # int64 [n]; None: all elements, in their order


def read(file: Path) -> list[Part]:
    """Nothing is copied: the arrays are the file."""
    held = np.memmap(file, np.uint8, mode="c")
    length = int.from_bytes(held[:_WORD].tobytes(), "little")
    header = json.loads(held[_WORD : _WORD + length].tobytes())
    arrays = held[-(-(_WORD + length) // _WORD) * _WORD :]

    def array(begin: int, count: int, dtype: str) -> torch.Tensor:
        size = count * np.dtype(dtype).itemsize
        return torch.from_numpy(arrays[begin : begin + size].view(dtype))

    return [
        Part(
            each["name"],
            each["salt"],
            array(each["values"], each["count"], f"i{each['width']}"),
            None if each["indices"] is None else array(each["indices"], each["count"], "i8"),
        )
        for each in header
    ]
