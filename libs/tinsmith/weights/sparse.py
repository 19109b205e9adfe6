"""Some elements of a tensor: where they are, and a small number at each.

Few positions are gaps to the one before: their low bytes, all but random, in one stream, what is
above in another. Many are a bit per element. Both lose little to a coder of bytes. Small numbers
are nibbles, two to a byte: a coder of bytes cannot spend less than one bit on each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tinsmith.weights.streams import DamagedStream, join_planes, planes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tinsmith.weights.bits import Bits, Bytes, Indices
    from tinsmith.weights.streams import Unpacker

MASK_FROM = 16  # from one changed element in so many, a mask is smaller than gaps
ESCAPE = 15
POSITION_STREAMS = 3


class Sparse(NamedTuple):
    """``values[k]`` stands at ``indices[k]``; indices ascend."""

    indices: Indices
    values: Bits


def write_positions(indices: Indices, size: int) -> list[Bytes]:
    """The positions, all below ``size`` (at most 2**40), in ``POSITION_STREAMS`` streams."""
    if _is_mask(indices.size, size):
        mask = np.zeros(size, np.bool_)
        mask[indices] = True
        empty = np.empty(0, np.uint8)
        return [np.packbits(mask), *[empty] * (POSITION_STREAMS - 1)]
    gaps = (np.diff(indices, prepend=-1) - 1).astype(np.uint64)
    pages = (gaps >> np.uint64(8)).astype("<u4")
    return [gaps.astype(np.uint8), _nibbles(pages), pages[pages >= ESCAPE].view(np.uint8)]


def read_positions(streams: Unpacker, count: int, size: int) -> Indices:
    """``count`` ascending positions below ``size``.

    Raises:
        DamagedStream: they are not.
    """
    if _is_mask(count, size):
        return _read_mask(streams, count, size)
    low = streams.next(count)
    pages, is_far = _read_nibbles(streams, count, np.dtype("<u8"))
    pages[is_far] = streams.next(4 * int(is_far.sum())).view("<u4")
    gaps = (pages << np.uint64(8)) | low
    # In floating point first: the exact sum of hostile gaps could wrap around.
    if float(gaps.sum(dtype=np.float64)) > 2.0 * size:
        raise DamagedStream(f"positions run beyond the tensor's {size} elements")
    indices: Indices = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and int(indices[-1]) >= size:
        raise DamagedStream(f"position {int(indices[-1])} is not below {size}")
    return indices


def write_small(values: Bits) -> list[Bytes]:
    """Numbers that are mostly below 15: a nibble each, and the others again in full."""
    return [_nibbles(values), *planes(values[values >= ESCAPE])]


def read_small(streams: Unpacker, count: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    """The inverse of ``write_small``."""
    values, is_large = _read_nibbles(streams, count, dtype)
    large = int(is_large.sum())
    values[is_large] = join_planes([streams.next(large) for _ in range(dtype.itemsize)])
    return values


def _nibbles(values: Bits) -> Bytes:
    small = np.minimum(values, values.dtype.type(ESCAPE)).astype(np.uint8)
    if small.size % 2:
        small = np.append(small, np.uint8(0))
    pairs: Bytes = small[0::2] | (small[1::2] << np.uint8(4))
    return pairs


def _read_nibbles(
    streams: Unpacker, count: int, dtype: np.dtype[np.unsignedinteger]
) -> tuple[Bits, NDArray[np.bool_]]:
    """The numbers, and which of them are to be read in full."""
    pairs = streams.next((count + 1) // 2)
    small = np.stack([pairs & 0xF, pairs >> 4], axis=1).reshape(-1)[:count]
    return small.astype(dtype), small == ESCAPE


def _is_mask(count: int, size: int) -> bool:
    return count * MASK_FROM >= size


def _read_mask(streams: Unpacker, count: int, size: int) -> Indices:
    mask = np.unpackbits(streams.next((size + 7) // 8), count=size)
    for _ in range(POSITION_STREAMS - 1):
        streams.next(0)
    indices: Indices = np.flatnonzero(mask)
    if indices.size != count:
        raise DamagedStream(f"{indices.size} positions are marked, {count} are announced")
    return indices
