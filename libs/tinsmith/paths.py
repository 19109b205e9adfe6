"""Where things lie on this machine: the data folder, the cache, models."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith import __version__
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 1
"""Version of the data folder's layout; it rises when an older Tinsmith could misread a newer
folder, and not with every release."""
MIN_FREE_BYTES = 256 << 20


@dataclass(frozen=True)
class DataDir:
    """The one folder that holds the state of an installation."""

    root: Path

    @property
    def nats(self) -> Path:
        """JetStream's store: the logs, queues and the registry."""
        return self.root / "nats"

    @property
    def blobs(self) -> Path:
        """The default blob store."""
        return self.root / "blobs"

    @property
    def run(self) -> Path:
        """Files that matter only while ``tinsmith up`` is running."""
        return self.root / "run"

    @property
    def up_file(self) -> Path:
        """Addresses and process ids of the ``tinsmith up`` that runs here; absent otherwise."""
        return self.run / "up.json"

    @property
    def scrape_file(self) -> Path:
        """Where that one's processes tell their metrics, as Prometheus reads it; else absent."""
        return self.run / "prometheus.json"

    @property
    def lock(self) -> Path:
        """Locked by the ``tinsmith up`` that uses this folder; holds its process id."""
        return self.root / "lock"

    @property
    def version(self) -> Path:
        """Layout version, and the release that first wrote the folder."""
        return self.root / "VERSION"

    @property
    def api_key(self) -> Path:
        """The key that ``tinsmith up`` makes when none is configured; mode 0600."""
        return self.root / "api-key"

    @property
    def master_key(self) -> Path:
        """The key that wraps the keys of runs, unless a command gives it; mode 0600."""
        return self.root / "master.key"

    def prepare(self) -> None:
        """Creates the folder, or checks that this release can read it (StartupError)."""
        try:
            for folder in (self.root, self.run):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.version.exists():
                self._check_version(self.version.read_text())
            else:
                self.version.write_text(json.dumps(_VERSION) + "\n")
        except OSError as error:
            raise StartupError(
                f"data_dir: {self.root} cannot be used: {error.strerror or error}; "
                "free space or fix its permissions, or choose another folder with --data-dir"
            ) from error

    def _check_version(self, text: str) -> None:
        try:
            found = json.loads(text)
            written, release = int(found["format"]), str(found["tinsmith"])
        except (ValueError, TypeError, KeyError):
            raise StartupError(
                f"data_dir: {self.version} is not a version file of Tinsmith; "
                "choose another folder with --data-dir, or restore the file"
            ) from None
        if written > FORMAT:
            raise StartupError(
                f"data_dir: {self.root} has format {written}, written by tinsmith {release}, but "
                f"this is tinsmith {__version__}, which reads up to format {FORMAT}; install "
                f"tinsmith {release} or newer, or choose another folder with --data-dir"
            )

    def check(self) -> None:
        """As ``prepare``, but a folder that is not there is left that way."""
        if self.version.exists():
            self.prepare()

    def require_space(self, wanted_bytes: int = MIN_FREE_BYTES) -> None:
        """StartupError when the disk of the folder is as good as full."""
        free = shutil.disk_usage(self.root).free
        if free < wanted_bytes:
            raise StartupError(
                f"data_dir: {self.root} has {free >> 20} MiB of disk space left, at least "
                f"{wanted_bytes >> 20} MiB are needed; free some, or choose another folder with "
                "--data-dir"
            )


_VERSION = {"format": FORMAT, "tinsmith": __version__}


def default_data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_DATA_HOME/tinsmith``, by default ``~/.local/share/tinsmith``."""
    base = environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "tinsmith"


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """``$TINSMITH_CACHE``, by default ``~/.cache/tinsmith``: nothing in it is irreplaceable."""
    named = environ.get("TINSMITH_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tinsmith"


def model_dir(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The cache's folder for a model, there or not: ``org/model`` is ``org--model``."""
    return cache_dir(environ) / "models" / name.replace("/", "--")


def check_model(name: str, path: str) -> None:
    """StartupError when ``path`` means a local folder, but no model lies there.

    A hub id ("org/model") passes: only the hub, or its cache, can tell.
    """
    folder = Path(path).expanduser()
    is_local = folder.exists() or path.startswith(("/", ".", "~"))
    if is_local and not (folder / "config.json").is_file():
        raise StartupError(
            f"model {name!r}: {folder} holds no config.json; set path in [[models]] to a folder "
            "in Hugging Face format or to a hub id"
        )
    if not is_local and path.count("/") != 1:
        raise StartupError(
            f"model {name!r}: {path!r} is neither a folder nor a hub id (organisation/model); "
            "correct path in [[models]]"
        )
