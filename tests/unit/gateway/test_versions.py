"""Which clients are served, by the version that they say they are of."""

from __future__ import annotations

import pytest

from tinsmith_gateway.versions import HEADER, RANGE


@pytest.mark.parametrize("version", ["0.18.0", "0.18.1", "0.30.4", "0.38.0", "0.38.9", "odd", ""])
async def test_clients_in_the_range_are_served(rig, version):
    answer = await rig.get("get_server_capabilities", headers={HEADER: version})

    assert answer.status == 200


@pytest.mark.parametrize("version", ["0.3.8", "0.17.9", "0.39.0", "1.0.0", "0.180.0"])
@pytest.mark.parametrize("path", ["client/config", "create_session", "no_such_thing"])
async def test_others_are_told_their_version_and_the_range(rig, version, path):
    answer = await rig.post(path, {}, headers={HEADER: version})

    assert answer.status == 400
    assert f"'{version}'" in answer.detail
    assert f"from {RANGE['oldest']} to {RANGE['newest']}" in answer.detail


async def test_a_program_without_a_version_is_served(rig):
    assert (await rig.get("get_server_capabilities")).json["client_versions"] == RANGE


async def test_clients_of_other_apis_have_versions_of_their_own(rig):
    assert (await rig.call("GET", "/v1/models", headers={HEADER: "3.50.0"})).status == 200
