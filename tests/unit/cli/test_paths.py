from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinsmith import __version__, paths
from tinsmith.errors import StartupError


@pytest.fixture
def data(tmp_path):
    return paths.DataDir(tmp_path / "data")


def test_a_new_folder_is_private_and_says_who_made_it(data):
    data.prepare()

    assert data.root.stat().st_mode & 0o777 == 0o700
    assert json.loads(data.version.read_text()) == {"format": 1, "tinsmith": __version__}


def test_a_folder_of_this_version_is_used_again(data):
    data.prepare()
    (data.root / "kept").touch()

    data.prepare()

    assert (data.root / "kept").exists()


def test_a_folder_of_a_newer_version_is_refused_by_name(data):
    data.prepare()
    data.version.write_text('{"format": 2, "tinsmith": "9.1.0"}')

    with pytest.raises(StartupError, match=r"format 2, written by tinsmith 9\.1\.0, but .* 0\."):
        data.prepare()


def test_a_damaged_version_file_is_refused(data):
    data.prepare()
    data.version.write_text("??")

    with pytest.raises(StartupError, match="not a version file"):
        data.prepare()


def test_a_file_in_the_place_of_the_folder_is_refused(data):
    data.root.write_text("")

    with pytest.raises(StartupError, match="--data-dir"):
        data.prepare()


def test_checking_does_not_create_the_folder(data):
    data.check()

    assert not data.root.exists()


def test_a_full_disk_is_refused_before_anything_is_written(data):
    data.prepare()

    with pytest.raises(StartupError, match=r"MiB of disk space left, at least \d+ MiB"):
        data.require_space(1 << 60)


def test_the_cache_follows_its_variable():
    environ = {"TINSMITH_CACHE": "/cache"}

    assert paths.model_dir("org/name", environ) == Path("/cache/models/org--name")


def test_the_default_data_folder_follows_the_desktop_standard():
    assert paths.default_data_dir({"XDG_DATA_HOME": "/share"}) == Path("/share/tinsmith")


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere"])
def test_a_model_folder_without_a_model_is_refused(path):
    with pytest.raises(StartupError, match=r"model 'm': .*nowhere.* config\.json"):
        paths.check_model("m", path)


def test_a_folder_with_a_model_passes(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    paths.check_model("m", str(tmp_path))


def test_a_hub_id_passes():
    paths.check_model("m", "org/model")


def test_what_is_neither_folder_nor_hub_id_is_refused():
    with pytest.raises(StartupError, match="neither a folder nor a hub id"):
        paths.check_model("m", "model")
