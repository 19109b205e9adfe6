"""How much memory is free, in and out of containers, and the refusal when it is too little."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tinsmith import memory
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  4000 kB\nMemFree:  100 kB\nMemAvailable:   2000 kB\n")
    return file


def container(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("600000\n")
    (folder / "memory.stat").write_text("anon 100000\ninactive_file 150000\nactive_file 50000\n")
    return folder


def test_memory_is_what_the_machine_has_available(meminfo: Path, tmp_path: Path):
    assert memory.available_bytes(meminfo, tmp_path) == 2000 * 1024


def test_a_container_has_no_more_than_its_limit_leaves(meminfo: Path, tmp_path: Path):
    assert memory.available_bytes(meminfo, container(tmp_path, "1000000")) == 600_000


def test_a_container_without_a_limit_has_what_the_machine_has(meminfo: Path, tmp_path: Path):
    assert memory.available_bytes(meminfo, container(tmp_path, "max")) == 2000 * 1024


def test_what_no_system_tells_is_not_known(tmp_path: Path):
    assert memory.available_bytes(tmp_path / "none", tmp_path) is None


def test_this_machine_tells():
    assert memory.available_bytes() > 1 << 20


@pytest.mark.parametrize("available", [None, 3 * memory.GIB])
def test_what_fits_or_cannot_be_known_passes(available: int | None):
    memory.check_room("m", {"a": 3 * memory.GIB}, available, place="cpu", remedy="none")


def test_what_does_not_fit_is_refused_with_every_figure():
    needs = {"for weights": 2 * memory.GIB, "for the cache": memory.GIB}

    with pytest.raises(StartupError) as refusal:
        memory.check_room("org/m", needs, memory.GIB // 2, place="cuda", remedy="buy more")

    assert str(refusal.value) == (
        "model: org/m needs about 3.00 GiB (2.00 GiB for weights, 1.00 GiB for the cache), and "
        "cuda has 0.50 GiB free; buy more"
    )
