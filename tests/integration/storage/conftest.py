"""An S3 server for the tests of this folder."""

from __future__ import annotations

import pytest
from tests.integration.storage import s3_server

from tinsmith.blobs import BlobStore


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    with s3_server.running(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def s3_settings(s3_endpoint, request):
    """Of a store of the test's own."""
    return s3_server.settings(s3_endpoint, prefix=request.node.name.partition("[")[0])


@pytest.fixture
def objects(s3_settings):
    return BlobStore.configured(s3_settings, default=None)


@pytest.fixture
def link(s3_endpoint):
    made = s3_server.Link(s3_endpoint)
    yield made
    made.close()
