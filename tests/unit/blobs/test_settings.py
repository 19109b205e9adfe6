"""Credentials of object stores: taken from where they are, shown nowhere."""

from __future__ import annotations

import io

import pytest
import structlog
from obstore.exceptions import GenericError

from tinsmith import logs
from tinsmith.blobs.errors import told
from tinsmith.config import LogsConfig, load
from tinsmith.config_docs import render

SECRET = "wJalrXUtnFEMI/K7MDENG"


@pytest.fixture
def environ():
    return {
        "TINSMITH_BLOBS__URL": "s3://bucket/prefix",
        "TINSMITH_BLOBS__SECRET_ACCESS_KEY": SECRET,
    }


def test_the_secret_is_read_and_not_shown(environ):
    config = load(None, environ)

    assert config.blobs.secret_access_key == SECRET
    assert SECRET not in render(config, has_docs=True)


def test_the_secret_is_not_logged():
    written = io.StringIO()
    logs.configure(LogsConfig(format="json"), service="x", instance="x", stream=written)
    structlog.get_logger("x").info("opened", secret_access_key=SECRET, where={"secret": SECRET})

    assert "opened" in written.getvalue()
    assert SECRET not in written.getvalue()


def test_what_a_server_said_is_cut_to_its_code():
    """Its answer may hold the access key, and what was signed with the secret."""
    answer = (
        "Generic S3 error: Error performing PUT http://s3/b in 1ms - Server returned non-2xx "
        'status code: 403 Forbidden: <?xml version="1.0"?>\n<Error><Code>InvalidAccessKeyId</Code>'
        "<AWSAccessKeyId>AKIA123</AWSAccessKeyId></Error>\n\nDebug source:\nGeneric {}"
    )

    assert told(GenericError(answer)) == (
        "Error performing PUT http://s3/b in 1ms - Server returned non-2xx status code: "
        "403 Forbidden: InvalidAccessKeyId"
    )
