"""Whether a configured model's files are all on this machine, told without loading or fetching."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith import model_files
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.config import ModelConfig
    from tinsmith.model_files import ModelFiles

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Each of them makes a tokenizer."""
_LENGTH_BYTES = 8  # before the header of a safetensors file


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """What lies on this machine of one model."""

    folder: Path | None = None
    """None: it is not here, and the hub would be asked for it."""
    wrong: str = ""
    """Why it cannot be loaded; empty: it can."""
    files: ModelFiles | None = None
    stored_bytes: int = 0
    """Of the weights, on disk."""
    has_tokenizer: bool = False

    @property
    def context_length(self) -> int | None:
        """That of the model's own configuration."""
        return self._number("max_position_embeddings")

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding."""
        return self._number("vocab_size")

    def _number(self, key: str) -> int | None:
        found = None if self.files is None else self.files.config.get(key)
        return found if isinstance(found, int) else None


def state_of(model: ModelConfig, environ: Mapping[str, str] = os.environ) -> ModelState:
    """Reads headers and file sizes only."""
    folder = folder_of(model.source, environ)
    if folder is None:
        wrong = f"{model.source} is not on this machine; it is fetched from the hub at the start"
        return ModelState(wrong=wrong)
    try:
        files = model_files.find(str(folder))
        weights = sorted(folder.glob("model*.safetensors"))
        cut = [file.name for file in weights if not _is_whole(file)]
    except (StartupError, OSError, ValueError, KeyError) as error:
        return ModelState(folder=folder, wrong=str(error))
    if cut:
        wrong = f"{folder}: {', '.join(cut[:3])} is cut off or damaged; get a complete copy"
        return ModelState(folder=folder, wrong=wrong, files=files)
    return ModelState(
        folder=folder,
        files=files,
        stored_bytes=sum(file.stat().st_size for file in weights),
        has_tokenizer=any((folder / name).is_file() for name in TOKENIZERS),
    )


def folder_of(source: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder itself, or the newest copy in the hub's cache."""
    folder = Path(source).expanduser()
    if folder.is_dir() or source.startswith(("/", ".", "~")):
        return folder
    kept = hub_cache(environ) / f"models--{source.replace('/', '--')}"
    copies = sorted(kept.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
    return copies[-1].parent if copies else None


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where huggingface_hub keeps what it has fetched."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := environ.get(variable):
            return Path(named).expanduser()
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    return Path(environ.get("HF_HOME") or cache).expanduser() / "hub"


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(_LENGTH_BYTES))
        header: dict[str, Any] = json.loads(stream.read(min(length, size)))
    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    return bool(size == _LENGTH_BYTES + length + max(ends, default=0))
