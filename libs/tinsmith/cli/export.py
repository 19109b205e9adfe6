"""What ``tinsmith export`` does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith import age, whole
from tinsmith.adapters import CONFIG_FILE, WEIGHTS_FILE
from tinsmith.cli import service_commands
from tinsmith.errors import InvalidRequest
from tinsmith.logbook.installation import connect
from tinsmith.logbook.text import size
from tinsmith.parts import check_manifest
from tinsmith.portable.checkpoints import find
from tinsmith.portable.folder import new_folder
from tinsmith.portable.unembedding import without_unembedding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tinsmith.config import Config
    from tinsmith.messages.checkpoints import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    checkpoint: str
    folder: Path
    is_merged: bool = False
    has_unembed: bool = True


def export(options: Options, config: Config) -> str:
    """Write the folder; what was written, in words.

    Raises:
        TinsmithError: there is no such checkpoint, or it cannot be had in this form.
    """
    if options.is_merged:
        service_commands.load("merge", extra="trainer")  # said before anything is fetched
    with new_folder(options.folder) as folder:
        checkpoint = asyncio.run(_fetch(options, config, folder))
        if whole.holds_whole(checkpoint.parts):
            form = _whole(options, config, checkpoint, folder)
        else:
            form = _adapter(options, config, checkpoint, folder)
        written = sum(file.stat().st_size for file in folder.iterdir())
    return f"{checkpoint.path}: {form}, {size(written)} in {options.folder}"


async def _fetch(options: Options, config: Config, folder: Path) -> Checkpoint:
    """The files of the weights, one after the other."""
    async with connect(config, name="export") as (bus, blobs):
        found = await find(bus, options.checkpoint)
        check_manifest(found)
        for name in _names(found):
            data = await blobs.get(found.parts[name])
            await asyncio.to_thread((folder / name).write_bytes, data)
    return found


def _names(checkpoint: Checkpoint) -> tuple[str, ...]:
    if any(name.endswith(age.SUFFIX) for name in checkpoint.parts):
        raise InvalidRequest(
            f"checkpoint: {checkpoint.path} is encrypted to its recipients; download it with the "
            "client and decrypt it, or export the checkpoint that it was made of"
        )
    if whole.holds_whole(checkpoint.parts):
        return whole.weight_files(checkpoint.parts)
    return (WEIGHTS_FILE, CONFIG_FILE)


def _whole(options: Options, config: Config, checkpoint: Checkpoint, folder: Path) -> str:
    if not options.has_unembed:
        raise InvalidRequest("--no-unembed: all weights were trained; leave the option out")
    if options.is_merged:  # it is one model already, and lacks only this
        copy = service_commands.load("copy-tokenizer", extra="trainer")
        copy(config.model(whole.base_of(checkpoint.base_model)).source, folder)
    return "all weights, float32"


def _adapter(options: Options, config: Config, checkpoint: Checkpoint, folder: Path) -> str:
    files: Mapping[str, bytes] = {name: (folder / name).read_bytes() for name in _names(checkpoint)}
    if not options.has_unembed and checkpoint.lora.train_unembed:
        files = without_unembedding(files)
    for name, data in files.items():
        if options.is_merged:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(data)
    if not options.is_merged:
        return f"PEFT adapter of rank {checkpoint.lora.rank}"
    merge = service_commands.load("merge", extra="trainer")
    merge(files, config.model(checkpoint.base_model), folder)
    return f"{checkpoint.base_model} with the adapter merged"
