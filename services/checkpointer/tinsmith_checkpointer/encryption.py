"""Encrypts the parts of a checkpoint to its recipients, one part at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec import structs

from tinsmith import age

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinsmith.blobs import BlobStore
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import CommitCheckpoint


async def encrypted(
    blobs: BlobStore,
    request: CommitCheckpoint,
    note: Callable[[dict[str, BlobRef]], Awaitable[None]],
) -> CommitCheckpoint:
    """``request`` with the ciphertexts as its parts; itself when it has no recipients.

    Every call makes other ciphertexts, and lets ``note`` write down each one before it is stored:
    nobody will ever ask for it if this breaks off. Holds one part and its ciphertext in memory.

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
        named = {name + age.SUFFIX: await blobs.name(sealed)}
        await note(named)
        await blobs.put(sealed)
        parts |= named
    return structs.replace(request, parts=parts)
