"""Opening object stores: addresses, credentials, and how long a request is tried for."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.store import MemoryStore, S3Store, from_url

from tinsmith.blobs.objects import Objects

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

    from tinsmith.config import BlobsConfig

REQUEST_S = 60.0  # one request, of PART_BYTES or GET_BYTES at most
TRIES_S = 60.0  # after this nothing is tried again
PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between tries: twice as long each time
RETRIES = 12


def objects(url: str, settings: BlobsConfig | None) -> Objects:
    """The object store at ``url``; raises ValueError or obstore's errors for a wrong one."""
    store = _opened(url, settings, retries=RETRIES)
    if isinstance(store, MemoryStore):  # another one would be empty
        return Objects(store, once=store)
    return Objects(store, once=_opened(url, settings, retries=0))


def _opened(url: str, settings: BlobsConfig | None, *, retries: int) -> ObjectStore:
    if not url.startswith(("s3://", "s3a://")):
        return from_url(url)
    given = _given(settings)
    client: ClientConfig = {
        "timeout": timedelta(seconds=REQUEST_S),
        "allow_http": _endpoint(given).startswith("http://"),
    }
    retry: RetryConfig = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=TRIES_S),
        "backoff": {
            "init_backoff": timedelta(seconds=PAUSE_S),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
            "base": 2,
        },
    }
    return S3Store.from_url(url, config=given, client_options=client, retry_config=retry)


def _endpoint(given: S3Config) -> str:
    """Where the server is; empty: Amazon's."""
    named = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"))
    return given.get("endpoint") or next(filter(None, named), "")


def _given(settings: BlobsConfig | None) -> S3Config:
    """What is set of it; the rest comes from ``AWS_...`` variables or the machine's role."""
    given: S3Config = {}
    if settings is None:
        return given
    if settings.endpoint:
        given["endpoint"] = settings.endpoint
    if settings.region:
        given["region"] = settings.region
    if settings.access_key_id:
        given["access_key_id"] = settings.access_key_id
    if settings.secret_access_key:
        given["secret_access_key"] = settings.secret_access_key
    return given
