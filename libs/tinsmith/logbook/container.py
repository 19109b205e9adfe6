"""The file format of exported logs: a sequence of parts, each found and checked on its own.

    part    a zstd skippable frame of ``HEADER.size`` bytes, then one zstd frame
    header  tag, version, kind; sizes raw and packed; blake3 of the raw bytes; two checks

So a file is an ordinary zstd file: ``zstd -t`` tests it, ``zstd -dc`` prints the parts' bytes.
Sizes in headers let a reader skip parts, and bound what it unpacks. Every byte is covered by a
check of its own part, so that damage is found where it is.
"""

from __future__ import annotations

import os
import struct
import sys
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from blake3 import blake3

from tinsmith.errors import TooLarge

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = 1
CHUNK_BYTES = 1 << 20
CHECK_BYTES = 8
_TAG = b"TSLG"
_SKIPPABLE = 0x184D2A54  # zstd leaves frames with this magic to applications
_FRAME = struct.Struct("<II")  # magic, size of what follows
HEADER = struct.Struct("<4sBB2xQQ32s8s8s")
_OPTIONS = {int(zstd.CompressionParameter.checksum_flag): 1}


class Kind(IntEnum):
    """What a part is."""

    COVER = 1  # what the file is; the first part
    ENTRY = 2  # one entry of the log, as it was stored
    BLOB = 3  # bytes that a later entry refers to
    END = 4  # what the file must have held; the last part
    SAMPLE = 5  # a logged sample, as it was stored; after the entries
    ANCHORS = 6  # where the log ended at some moments, as was told elsewhere; after the cover


LIMITS = {
    Kind.COVER: 1 << 16,
    Kind.ENTRY: 1 << 23,
    Kind.BLOB: 1 << 32,
    Kind.END: 1 << 16,
    Kind.SAMPLE: 1 << 30,
    Kind.ANCHORS: 1 << 30,
}
"""Most raw bytes of a part."""


class PartDamaged(Exception):
    """A part is not as it was written, or not there; the message says how."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a part lies, and what its bytes must be."""

    kind: Kind
    raw_size: int
    packed_size: int
    blake3: bytes  # of the raw bytes
    packed_check: bytes
    offset: int  # of the zstd frame

    @property
    def end(self) -> int:
        """Where the next part begins."""
        return self.offset + self.packed_size


def pack_part(kind: Kind, data: bytes) -> tuple[bytes, bytes]:
    """Header and zstd frame of one part, to be written one after the other.

    Raises:
        TooLarge: ``data`` is over the limit of its kind.
    """
    if len(data) > LIMITS[kind]:
        msg = f"{kind.name.lower()}: {len(data)} bytes are over the format's limit, {LIMITS[kind]}"
        raise TooLarge(msg)
    packed = zstd.compress(data, options=_OPTIONS)
    fields = (_TAG, VERSION, kind, len(data), len(packed), blake3(data).digest(), _check(packed))
    header = HEADER.pack(*fields, bytes(CHECK_BYTES))[:-CHECK_BYTES]
    return _FRAME.pack(_SKIPPABLE, HEADER.size) + header + _check(header), packed


def scan(fd: int) -> Iterator[Part]:
    """The parts of the file in order, by their headers alone.

    Raises:
        PartDamaged: where the next part should begin, there is no header of one.
    """
    size = os.fstat(fd).st_size
    offset = 0
    while offset < size:
        part = _parse(os.pread(fd, _FRAME.size + HEADER.size, offset), offset)
        if part.end > size:
            msg = f"the file is cut off: {part.end - size} bytes of a part are missing"
            raise PartDamaged(msg)
        yield part
        offset = part.end


def read_part(fd: int, part: Part) -> Iterator[bytes]:
    """The raw bytes of ``part`` in pieces; whether they are right is known after the last.

    Raises:
        PartDamaged: they are not what was written.
    """
    hasher, size = blake3(), 0
    for piece in _unpack(fd, part):
        size += len(piece)
        if size > part.raw_size:
            msg = f"it has more than the {part.raw_size} bytes that its header says"
            raise PartDamaged(msg)
        hasher.update(piece)
        yield piece
    if size != part.raw_size or hasher.digest() != part.blake3:
        msg = f"its bytes have the digest {hasher.hexdigest()}, not {part.blake3.hex()}"
        raise PartDamaged(msg)


def _parse(data: bytes, offset: int) -> Part:
    """The part whose header is ``data``."""
    if len(data) < _FRAME.size + HEADER.size:
        msg = "the file is cut off inside a header"
        raise PartDamaged(msg)
    magic, size = _FRAME.unpack_from(data)
    tag, version, kind, raw, packed, *digests, check = HEADER.unpack_from(data, _FRAME.size)
    if (magic, size, tag) != (_SKIPPABLE, HEADER.size, _TAG):
        msg = f"there is no header of a part at byte {offset}"
        raise PartDamaged(msg)
    if check != _check(data[_FRAME.size : -CHECK_BYTES]):
        msg = f"the header at byte {offset} does not have the digest that it says"
        raise PartDamaged(msg)
    if version != VERSION or kind not in iter(Kind):
        msg = f"format {version}, part of kind {kind}: written by a newer version of Tinsmith"
        raise PartDamaged(msg)
    _check_sizes(Kind(kind), raw, packed)
    return Part(Kind(kind), raw, packed, digests[0], digests[1], offset + len(data))


def _check_sizes(kind: Kind, raw: int, packed: int) -> None:
    if raw > LIMITS[kind]:
        msg = f"{raw} bytes are over the format's limit of {LIMITS[kind]} for its kind"
        raise PartDamaged(msg)
    if packed > raw + (raw >> 7) + 1024:
        msg = f"{packed} packed bytes are more than {raw} bytes can become"
        raise PartDamaged(msg)


def _unpack(fd: int, part: Part) -> Iterator[bytes]:
    """Unpacks at most ``CHUNK_BYTES`` at a time, whatever the frame says."""
    unpacker, hasher, offset = zstd.ZstdDecompressor(), blake3(), part.offset
    try:
        while not unpacker.eof:
            packed = b""
            if unpacker.needs_input:
                packed = os.pread(fd, min(part.end - offset, CHUNK_BYTES), offset)
                if not packed:
                    raise PartDamaged("its zstd frame has no end")
                offset += len(packed)
                hasher.update(packed)
            yield unpacker.decompress(packed, CHUNK_BYTES)
    except zstd.ZstdError as exc:
        raise PartDamaged(f"it cannot be unpacked ({exc})") from exc
    if offset < part.end or unpacker.unused_data or hasher.digest(CHECK_BYTES) != part.packed_check:
        msg = "its packed bytes are not those that were written"
        raise PartDamaged(msg)


def _check(data: bytes) -> bytes:
    return blake3(data).digest(CHECK_BYTES)
