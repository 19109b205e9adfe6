"""Encrypts the parts of a checkpoint to its recipients, one part at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec import structs

from tinsmith import age

if TYPE_CHECKING:
    from tinsmith.blobs import BlobStore
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import CommitCheckpoint


async def encrypted(blobs: BlobStore, request: CommitCheckpoint) -> CommitCheckpoint:
    """``request`` with the ciphertexts as its parts; itself when it has no recipients.

    Every call makes other ciphertexts. Holds one part and its ciphertext in memory.

    Raises:
        BlobMissing: a part is not in the blob store.
        ServerError: the store cannot be read or written.
    """
    if not request.recipients:
        return request
    parts: dict[str, BlobRef] = {}
    for name, ref in request.parts.items():
        data = await blobs.get(ref)
        sealed = await asyncio.to_thread(age.encrypt, data, request.recipients)
        parts[name + age.SUFFIX] = await blobs.put(sealed)
    return structs.replace(request, parts=parts)
