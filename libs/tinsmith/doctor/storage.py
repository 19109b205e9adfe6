"""Checks of what is kept: the blob store and the master key."""

from __future__ import annotations

import asyncio
import stat
from typing import TYPE_CHECKING

from tinsmith.blobs import BlobStore
from tinsmith.doctor.finding import fail, ok
from tinsmith.errors import TinsmithError
from tinsmith.sealing.config import SealingConfig
from tinsmith.sealing.master import KeySource

if TYPE_CHECKING:
    from tinsmith.doctor.finding import Finding, Subject

PROBE = b"tinsmith doctor was here"
"""Stored once, however often it is put; nothing refers to it, so that it is freed in time."""


def blob_store(subject: Subject) -> Finding:
    """Whether it can be written and read."""
    settings, default = subject.config.blobs, subject.data.blobs
    if not settings.url and not default.exists():
        return ok("blob store", f"{default} is made at the first start")
    remedy = "fix blobs.url, the store's permissions or its credentials"
    try:
        store = BlobStore.configured(settings, default=default)
        asyncio.run(_used(store))
    except TinsmithError as error:
        return fail("blob store", str(error), remedy)
    return ok("blob store", f"{store.where} can be written and read")


async def _used(store: BlobStore) -> None:
    await store.get(await store.put(PROBE))


def master_key(subject: Subject) -> Finding:
    """Whether it can be had, and by nobody else."""
    settings = subject.config.section(SealingConfig)
    file = subject.data.master_key
    if not settings.master_key_command and file.exists():
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & 0o077:
            return fail("master key", f"{file} has mode {mode:04o}", f"chmod 600 {file}")
    try:
        found = KeySource(settings.master_key_command, file).find()
    except TinsmithError as error:
        return fail("master key", str(error), "docs/running.md, 'Sealed data', tells of it")
    if found is None:
        return ok("master key", f"{file} is made at the first start")
    return ok("master key", f"fingerprint {found.fingerprint}, the same for all services")
