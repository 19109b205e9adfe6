"""Protobuf tensors as bus tensors: the bytes stay what they are, sparse ones are made dense."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import InvalidRequest, TooLarge
from tinsmith.messages.base import ITEM_SIZE, DType, Tensor
from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMES: dict[int, DType] = {
    pb.DTYPE_FLOAT32: "float32",
    pb.DTYPE_INT64: "int64",
    pb.DTYPE_INT32: "int32",
    pb.DTYPE_BFLOAT16: "bfloat16",
}
NUMBERS: dict[str, pb.DType] = {
    "float32": pb.DTYPE_FLOAT32,
    "int64": pb.DTYPE_INT64,
    "int32": pb.DTYPE_INT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
}


def from_proto(tensor: pb.Tensor, where: str, *, max_bytes: int) -> Tensor:
    """``tensor`` as a dense bus tensor; ``where`` names it in errors.

    Raises:
        InvalidRequest: dtype, shape and bytes do not fit together.
        TooLarge: a sparse tensor has more than ``max_bytes`` when dense.
    """
    if (dtype := NAMES.get(tensor.dtype)) is None:
        raise InvalidRequest(f"{where}: dtype {tensor.dtype} is unknown; use FLOAT32 or INT64")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise InvalidRequest(f"{where}: shape {shape} has a negative size")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _from_csr(tensor.sparse_csr, dtype, shape, where=where, max_bytes=max_bytes)
    return _from_dense(tensor.dense, dtype, shape, where=where)


def _from_dense(data: bytes, dtype: DType, shape: tuple[int, ...], *, where: str) -> Tensor:
    item = ITEM_SIZE[dtype]
    if not shape:
        shape = (len(data) // item,)
    if len(data) != math.prod(shape) * item:
        raise InvalidRequest(
            f"{where}: {len(data)} bytes do not fit shape {list(shape)} of {dtype}, "
            f"which has {math.prod(shape) * item}"
        )
    return Tensor(dtype, shape, data)


def _from_csr(
    csr: pb.SparseCsr, dtype: DType, shape: tuple[int, ...], *, where: str, max_bytes: int
) -> Tensor:
    if len(shape) != 2:
        raise InvalidRequest(f"{where}: a sparse tensor has two dimensions, not shape {shape}")
    item = ITEM_SIZE[dtype]
    if (size := math.prod(shape) * item) > max_bytes:
        raise TooLarge(
            f"{where}: shape {list(shape)} of {dtype} has {size} bytes when dense, "
            f"over the limit of {max_bytes}; send fewer datums or columns"
        )
    cells = _cells(csr, shape, where)
    dense = np.zeros(math.prod(shape), dtype=f"V{item}")
    values = _sized(csr.values, len(cells), item, f"{where}: values")
    dense[cells] = np.frombuffer(values, dense.dtype)
    return Tensor(dtype, shape, dense.tobytes())


def _cells(csr: pb.SparseCsr, shape: tuple[int, ...], where: str) -> NDArray[np.int64]:
    """Flat positions of the values; InvalidRequest unless they are distinct and inside."""
    rows, width = shape
    bounds = _indices(csr.crow_indices, rows + 1, f"{where}: crow_indices")
    count = int(bounds[-1])
    columns = _indices(csr.col_indices, count, f"{where}: col_indices")
    # Compared, not subtracted: differences of 64-bit numbers can wrap around.
    if bounds[0] != 0 or (bounds[1:] < bounds[:-1]).any():
        raise InvalidRequest(f"{where}: crow_indices do not rise from 0")
    counts = np.diff(bounds)
    if ((columns < 0) | (columns >= width)).any():
        raise InvalidRequest(f"{where}: col_indices are outside 0..{width - 1}")
    cells: NDArray[np.int64] = np.repeat(np.arange(rows, dtype=np.int64), counts) * width + columns
    if len(np.unique(cells)) != len(cells):
        raise InvalidRequest(f"{where}: a cell is given twice")
    return cells


def _indices(data: bytes, count: int, where: str) -> NDArray[np.int64]:
    return np.frombuffer(_sized(data, count, 8, where), dtype="<i8")


def _sized(data: bytes, count: int, item: int, where: str) -> bytes:
    if len(data) != count * item:
        raise InvalidRequest(f"{where}: {len(data)} bytes are not {count} items of {item} bytes")
    return data
