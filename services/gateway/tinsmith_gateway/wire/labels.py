"""Names that users give to things and that mean nothing to the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tinsmith import ids
from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_METADATA_BYTES = 64 << 10  # it is kept in the memory of every gateway
MAX_METADATA_LEVELS = 16


def check_project(text: str, field: str = "project_id") -> str:
    """``text`` itself when it can name a project; InvalidRequest otherwise."""
    if not ids.is_project(text):
        raise InvalidRequest(
            f"{field}: {text[:80]!r} cannot name a project; use 1 to 128 letters, digits or "
            "'_.:@-', starting with a letter or digit (TINKER_PROJECT_ID sets it)"
        )
    return text


def check_metadata(metadata: Mapping[str, Any], field: str = "user_metadata") -> Mapping[str, Any]:
    """``metadata`` itself when it can be kept; InvalidRequest when it is too large or too deep."""
    if _levels(metadata) > MAX_METADATA_LEVELS:
        raise InvalidRequest(
            f"{field}: it has more than {MAX_METADATA_LEVELS} levels; send it flatter, or as text"
        )
    try:
        size = len(msgspec.msgpack.encode(metadata))
    except OverflowError:
        raise InvalidRequest(
            f"{field}: a number in it has more than 64 bits; send it as text"
        ) from None
    if size > MAX_METADATA_BYTES:
        raise InvalidRequest(
            f"{field}: {size} bytes are over the limit of {MAX_METADATA_BYTES}; keep less in it"
        )
    return metadata


def _levels(value: object) -> int:
    """How deep it is nested; looks no deeper than one level over the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_METADATA_LEVELS:
        depth += 1
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [x for each in inner for x in (each.values() if isinstance(each, dict) else each)]
    return depth
