"""A file is there whole or not at all."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from tests.unit.logbook.made import MODEL, a_run

from tinsmith.errors import InvalidRequest, StorageFull, TooLarge
from tinsmith.logbook import LogDamaged, draft, transfer


def write(path, data, *, overwrite=False, then=lambda: None):
    """Write a draft; ``then`` happens before it is whole."""
    with draft.create(path, overwrite=overwrite) as file:
        file.write(data)
        then()


def fail():
    raise RuntimeError


def test_the_file_appears_at_the_end_for_its_owner_only(tmp_path):
    path = tmp_path / "file"
    with draft.create(path, overwrite=False) as file:
        file.write(b"all of it")
        assert not path.exists()

    assert path.read_bytes() == b"all of it"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_nothing_is_left_of_what_failed(tmp_path):
    with pytest.raises(RuntimeError):
        write(tmp_path / "file", b"half", then=fail)

    assert os.listdir(tmp_path) == []


def test_a_file_that_exists_is_not_overwritten(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(InvalidRequest, match=r"exists already; .* --force"):
        write(path, b"ours")

    assert path.read_text() == "mine"


def test_nor_is_one_that_came_meanwhile(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(InvalidRequest, match="exists already"):
        write(path, b"ours", then=lambda: path.write_text("theirs"))

    assert path.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["file"]


def test_it_is_when_asked_for(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    write(path, b"new", overwrite=True)

    assert path.read_text() == "new"


def test_a_failed_overwrite_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError):
        write(path, b"half", overwrite=True, then=fail)

    assert path.read_text() == "old"


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFull, match=r"file: No space left .*; free some space"):
        write(tmp_path / "file", b"x")

    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be written: No such file"):
        write(tmp_path / "none" / "file", b"x")


async def test_a_log_that_does_not_verify_is_not_exported(tmp_path):
    made = a_run()
    made.stored.popitem()
    with pytest.raises(LogDamaged, match=r"entry 14 .*is not there"):
        await transfer.export(
            made, MODEL, tmp_path / "run.tslog", overwrite=False, on_entry=lambda: None
        )

    assert os.listdir(tmp_path) == []


async def test_more_parts_than_a_reader_takes_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "MAX_PARTS", 9)
    with pytest.raises(TooLarge, match="over 9 parts"):
        await transfer.export(
            a_run(), MODEL, tmp_path / "run.tslog", overwrite=False, on_entry=lambda: None
        )
