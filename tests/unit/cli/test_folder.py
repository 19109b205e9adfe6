from __future__ import annotations

import json
import os

import pytest

from tinsmith.cli import folder
from tinsmith.errors import StartupError
from tinsmith.paths import DataDir


@pytest.fixture
def data(tmp_path):
    made = DataDir(tmp_path / "data")
    made.prepare()
    return made


def test_a_second_claim_is_refused_with_pid_and_remedy(data):
    with folder.claim(data), pytest.raises(StartupError) as caught, folder.claim(data):
        pass

    for part in (str(data.root), f"pid {os.getpid()}", "--data-dir"):
        assert part in str(caught.value)


def test_a_claim_ends_with_its_block(data):
    with folder.claim(data):
        pass
    with folder.claim(data):
        assert data.lock.read_text() == f"{os.getpid()}\n"


def test_the_api_key_is_long_random_private_and_made_once(data):
    file = folder.api_key_file(data)
    key = file.read_text().strip()

    assert key.startswith("tml-")
    assert len(key) == 4 + 48
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.api_key_file(data).read_text().strip() == key


def test_two_folders_have_different_keys(tmp_path):
    keys = set()
    for name in ("a", "b"):
        data = DataDir(tmp_path / name)
        data.prepare()
        keys.add(folder.api_key_file(data).read_text())

    assert len(keys) == 2


def test_a_file_is_replaced_as_a_whole_and_for_its_owner_only(tmp_path):
    path = tmp_path / "up.json"
    path.write_text("old")

    folder.write_json(path, {"a": 1})

    assert json.loads(path.read_text()) == {"a": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StartupError, match=r"absent/up\.json cannot be written"):
        folder.write_json(tmp_path / "absent" / "up.json", {})
