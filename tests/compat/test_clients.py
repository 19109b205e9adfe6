"""Every public method and command of the tinker client, in each version, against one server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.compat import expectations, table
from tests.compat.conftest import OUTSIDE, VERSIONS

from tinsmith_gateway.versions import RANGE

DOCUMENT = Path(__file__).parents[2] / "docs/compatibility.md"
PARTS = ("methods", "commands", "lower")

pytestmark = [
    pytest.mark.timeout(900),  # the first one runs all clients
    pytest.mark.integration,
]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_environment_has_the_version_that_it_is_named_for(reports, version):
    assert reports[version]["version"] == version


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_succeeds_or_is_refused_as_documented(reports, version):
    wrong = {
        name: call["detail"]
        for part in PARTS
        for name, call in reports[version][part].items()
        if call["outcome"] == "raised"
        and (
            (expected := expectations.refusal(name, version)) is None
            or expected.text not in call["detail"]
        )
    }

    assert wrong == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_documented_as_refused_is_refused(reports, version):
    served = [
        name
        for part in PARTS
        for name, call in reports[version][part].items()
        if call["outcome"] == "ok" and expectations.refusal(name, version) is not None
    ]

    assert served == []


def test_nothing_is_expected_of_what_no_version_has(reports):
    there = {name for report in reports.values() for part in PARTS for name in report[part]}
    named = {name for refusal in expectations.REFUSALS for name in refusal.names}

    assert named | set(expectations.NOT_CALLED) <= there


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_all_versions_are_told_the_same_numbers(reports, version):
    assert reports[version]["figures"] == reports[VERSIONS[-1]]["figures"]


def test_the_document_is_up_to_date(reports):
    made = table.render(reports)
    if os.environ.get("TINSMITH_WRITE_TABLE"):
        DOCUMENT.write_text(made)

    assert DOCUMENT.exists(), f"make it with '{table.COMMAND}'"
    assert DOCUMENT.read_text() == made, f"make it anew with '{table.COMMAND}'"


@pytest.mark.parametrize("version", OUTSIDE)
def test_a_client_outside_the_range_is_told_so(run, version):
    _, done = run(version, "-c", "import tinker; tinker.ServiceClient()")

    assert done.returncode != 0
    assert f"tinker '{version}'" in done.stderr
    assert f"from {RANGE['oldest']} to {RANGE['newest']}" in done.stderr
