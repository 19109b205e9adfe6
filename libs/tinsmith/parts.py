"""What a checkpoint may consist of: files by plain names, and blobs by digests that are such.

A manifest comes from the broker. Its names become entries of archives and files in folders, its
digests places in the blob store, so each reader of one checks them before it follows them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import Checkpoint

FORMAT = 1
"""Of manifests; it rises when an older version could misread a newer one."""
MAX_NAME = 120
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_SHOWN = 80


def check_manifest(checkpoint: Checkpoint) -> None:
    """Raises InvalidRequest for a manifest of a later format, or with parts as ``check_parts``."""
    if checkpoint.format > FORMAT:
        raise InvalidRequest(
            f"format: the manifest of {checkpoint.path} is of format {checkpoint.format}, and this "
            f"version reads up to {FORMAT}; use the version of Tinsmith that wrote it"
        )
    check_parts(checkpoint.parts)


def check_parts(parts: Mapping[str, BlobRef]) -> None:
    """Raises InvalidRequest when a name could lead anywhere, or a reference names no blob."""
    for name, ref in parts.items():
        if len(name) > MAX_NAME or _NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"parts: {name[:_MAX_SHOWN]!r} cannot name a file of a checkpoint; use up to "
                f"{MAX_NAME} letters, digits, dots, dashes and underscores, and no dot first"
            )
        if _DIGEST.fullmatch(ref.blake3) is None or ref.size < 0:
            raise InvalidRequest(
                f"parts: {name} refers to {ref.blake3[:_MAX_SHOWN]!r} of {ref.size} bytes, which "
                "is no blob; a blake3 has 64 hexadecimal digits"
            )
