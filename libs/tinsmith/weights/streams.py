"""Several byte strings as one, each compressed; lengths are checked before memory is given.

Layout: one little-endian uint32 per stream (its compressed length, 0 for an empty one), then the
streams. What a stream holds when decoded is known to the reader, never taken from the data.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import InvalidRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith.weights.bits import Bits, Bytes

LEVEL = 1  # higher levels search for repetitions that weights do not have
WINDOW_LOG_MAX = 27  # 128 MiB: what a decoder must be willing to hold


class DamagedStream(InvalidRequest):
    """Bytes that are not what the writer of this format would have written."""


def pack(streams: Sequence[Bytes]) -> bytes:
    """The streams as one byte string."""
    compressed = [
        zstd.compress(stream.data, level=LEVEL) if stream.size else b"" for stream in streams
    ]
    lengths = np.array([len(part) for part in compressed], "<u4")
    return b"".join([lengths.tobytes(), *compressed])


class Unpacker:
    """Reads the streams of one packed byte string in order, each of a length the caller names."""

    def __init__(self, data: bytes, count: int) -> None:
        """``count`` is the number of streams."""
        start = 4 * count
        if len(data) < start:
            raise DamagedStream(f"{len(data)} bytes cannot hold the lengths of {count} streams")
        self._lengths = [int(length) for length in np.frombuffer(data, "<u4", count)]
        if start + sum(self._lengths) != len(data):
            raise DamagedStream(f"{len(data)} bytes are not the {sum(self._lengths)} announced")
        self._data = memoryview(data)
        self._at = start

    def next(self, length: int) -> Bytes:
        """The next stream, decoded; DamagedStream when it does not decode to ``length`` bytes."""
        part = self._data[self._at : self._at + self._lengths.pop(0)]
        self._at += len(part)
        if not part and not length:
            return np.empty(0, np.uint8)
        options = {int(zstd.DecompressionParameter.window_log_max): WINDOW_LOG_MAX}
        decoder = zstd.ZstdDecompressor(options=options)
        try:
            # One byte more than announced shows a stream that is too long.
            decoded = decoder.decompress(part, max_length=length + 1)
        except zstd.ZstdError as exc:
            raise DamagedStream(f"a stream cannot be decompressed: {exc}") from exc
        if len(decoded) != length or not decoder.eof or decoder.unused_data:
            raise DamagedStream(f"a stream does not decode to the {length} bytes expected")
        return np.frombuffer(decoded, np.uint8)


def planes(values: Bits) -> list[Bytes]:
    """``values`` as one stream per byte of an element, lowest first: each compresses better."""
    size = values.itemsize
    table = values.astype(f"<u{size}", copy=False).view(np.uint8).reshape(-1, size)
    return [np.ascontiguousarray(table[:, byte]) for byte in range(size)]


def join_planes(parts: Sequence[Bytes]) -> Bits:
    """The inverse of ``planes``."""
    joined: Bits = np.stack(parts, axis=1).reshape(-1).view(f"<u{len(parts)}")
    return joined
