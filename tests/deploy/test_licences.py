"""Nothing that is run with Tinsmith asks for more than attribution."""

from __future__ import annotations

import importlib.util

import pytest
from tests.deploy.shipped import ROOT

_spec = importlib.util.spec_from_file_location("licences", ROOT / ".ci" / "licences.py")
licences = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(licences)


def test_every_package_has_a_licence_that_is_allowed():
    found = {one.metadata["Name"]: licences.licence_of(one) for one in licences.packages()}
    assert {"torch", "aiohttp", "nats-py", "cryptography"} <= set(found)
    assert {name: told for name, told in found.items() if not licences.is_allowed(told)} == {}


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("MIT AND Apache-2.0", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("AGPL-3.0", False),
        ("", False),
        ("see LICENSE", False),
    ],
)
def test_what_is_allowed(expression, allowed):
    assert licences.is_allowed(expression) is allowed


def test_the_page_is_of_today():
    assert (ROOT / "docs" / "licences.md").read_text() == licences.page()
