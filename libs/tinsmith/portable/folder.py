"""A new folder that appears when all of it is there, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` to be filled, which becomes it at the end of the block.

    Raises:
        InvalidRequest: there is something at ``path`` already, or it cannot be made.
    """
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise InvalidRequest(f"folder: {path} exists and is no empty folder; name another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent)
    except OSError as exc:
        raise InvalidRequest(f"folder: {path} cannot be made: {exc.strerror}") from exc
    filling = path.parent / made
    try:
        yield filling
        filling.chmod(0o755)
        filling.replace(path)
    except OSError as exc:
        raise InvalidRequest(f"folder: {path} cannot be written: {exc}") from exc
    finally:
        shutil.rmtree(filling, ignore_errors=True)
