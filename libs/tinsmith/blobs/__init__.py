"""Content-addressed bytes, shared by all services: a folder, or an object store by URL."""

from __future__ import annotations

from tinsmith.blobs.place import Stored
from tinsmith.blobs.store import BlobStore

__all__ = ["BlobStore", "Stored"]
