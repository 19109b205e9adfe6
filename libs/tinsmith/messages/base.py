"""What every bus message is made of: the tagged base, tensors, blob references, failures.

Rules that keep old logs readable: messages are map-encoded msgpack with an explicit tag in
``t``; fields are only ever added, with defaults; a tag never changes its meaning.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from tinsmith.errors import Category

DType = Literal["float32", "int64", "int32", "bfloat16"]

ITEM_SIZE: dict[str, int] = {"float32": 4, "int64": 8, "int32": 4, "bfloat16": 2}
"""Bytes per element."""


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=_tag):
    """Base of everything on the bus; the tag is the class name in snake case."""


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Little-endian, row-major values as the bytes they already are.

    ``array_like``: the field order is the wire format; only ever append fields.
    """

    dtype: DType
    shape: tuple[int, ...]
    data: bytes


class BlobRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Content-addressed bytes in the blob store: blake3 in hex, size in bytes."""

    blake3: str
    size: int


GENESIS = "0" * 64
"""What a hash chain's first entry has in the place of the digest of the one before it."""


class Failed(Message, frozen=True, kw_only=True):
    """The outcome of any request that could not be served; ``message`` is for its sender."""

    category: Category
    message: str
    code: str = ""  # the error's class, so that a caller on the bus raises the same one


encode = msgspec.msgpack.Encoder().encode
"""Encode one message; equal messages give equal bytes (dicts keep their insertion order).

Every field is written: msgspec's ``omit_defaults`` compares by identity for most types, so that
a value that was decoded would be encoded differently from the default that it equals.
"""


def decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:  # noqa: ANN401 - a type or a union
    """A reusable msgpack decoder for ``type_`` (a struct or a union of tagged structs)."""
    return msgspec.msgpack.Decoder(type_)
