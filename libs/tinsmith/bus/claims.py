"""Claim checks: a body too large for the broker travels as a blob and a reference to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.messages.base import BlobRef

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js.api import RawStreamMsg

    from tinsmith.blobs import BlobStore

INLINE_BYTES = 512 * 1024
"""Larger payloads go through the blob store; well under the broker's default of 1 MiB."""

HEADER = "Ts-Blob"


async def check_in(payload: bytes, blobs: BlobStore) -> tuple[bytes, dict[str, str]]:
    """What to publish in place of ``payload``: itself, or nothing and a header."""
    if len(payload) <= INLINE_BYTES:
        return payload, {}
    ref = await blobs.put(payload)
    return b"", {HEADER: f"{ref.blake3}:{ref.size}"}


async def resolve(msg: Msg | RawStreamMsg, blobs: BlobStore) -> tuple[BlobRef | None, bytes]:
    """The payload of ``msg`` and, if it came by reference, where it lies."""
    claim = (msg.headers or {}).get(HEADER)
    if claim is None:
        return None, msg.data or b""
    digest, _, size = claim.partition(":")
    ref = BlobRef(digest, int(size))
    return ref, await blobs.get(ref)
