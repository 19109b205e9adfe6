"""A PEFT adapter's folder from elsewhere: what of it is read, and what is refused unread.

Two files are opened, JSON and safetensors. No name in them ever becomes a path.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

from tinsmith.adapters import CONFIG_FILE, WEIGHTS_FILE
from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = {CONFIG_FILE: 1 << 20, WEIGHTS_FILE: 8 << 30}
MAX_HEADER_BYTES = 16 << 20
"""Of the weights' file: the names and shapes of its tensors."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
    }
)
"""Fields of PEFT's configuration that do not change what a trained adapter computes."""
CHECKED = frozenset(
    {
        "alpha_pattern",
        "bias",
        "lora_alpha",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "use_dora",
        "use_rslora",
    }
)
"""Fields that whoever reads the adapter checks, beside those of ``HARMLESS``."""
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Of ``init_lora_weights``: others change the base as well."""


def read_adapter(folder: Path) -> dict[str, bytes]:
    """The configuration and the weights in ``folder``.

    Raises:
        InvalidRequest: one is missing, a link, or too large; or the configuration is of a kind of
            LoRA that is not known here.
    """
    if not folder.is_dir():
        raise InvalidRequest(f"folder: there is no folder {folder}")
    files = {CONFIG_FILE: _read(folder, CONFIG_FILE)}
    _check_fields(config_of(files))
    return {**files, WEIGHTS_FILE: _read(folder, WEIGHTS_FILE)}


def config_of(files: dict[str, bytes]) -> dict[str, Any]:
    """``adapter_config.json``; InvalidRequest when it is no JSON object."""
    try:
        config = json.loads(files[CONFIG_FILE])
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{CONFIG_FILE}: it is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise InvalidRequest(f"{CONFIG_FILE}: it is not a JSON object")
    return config


def check_base(config: dict[str, Any], names: tuple[str, ...]) -> None:
    """InvalidRequest when the adapter says that it was trained on another base than ``names``."""
    told = config.get("base_model_name_or_path")
    if isinstance(told, str) and told and _last(told) not in map(_last, names):
        raise InvalidRequest(
            f"{CONFIG_FILE}: the adapter was trained on {told[:120]!r}, not on {names[0]!r}; name "
            "that one with --base, or give --any-base if it is the same model"
        )


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        # A link could lead anywhere, and a pipe nowhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLES)
        hint = f"; {pickles[0]} is a pickle, which is never read" if pickles else ""
        problem = "it is a link" if path.is_symlink() else exc.strerror
        raise InvalidRequest(
            f"{name}: {problem}{hint}; save the adapter with PEFT's save_pretrained, which writes "
            "safetensors"
        ) from exc
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise InvalidRequest(f"{name}: it is no regular file")
    with os.fdopen(descriptor, "rb") as stream:
        if found.st_size > MAX_BYTES[name]:
            raise InvalidRequest(
                f"{name}: {found.st_size} bytes are over the limit of {MAX_BYTES[name]}"
            )
        if name == WEIGHTS_FILE:
            _check_header(stream, found.st_size)
        return stream.read(MAX_BYTES[name])


def _check_header(stream: BinaryIO, size: int) -> None:
    """Before the rest of ``size`` bytes is read: what the header says must be all of it.

    A length in 8 bytes, that many bytes of JSON, and the tensors' bytes.
    """
    start = stream.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise InvalidRequest(
            f"{WEIGHTS_FILE}: not a valid safetensors file: a header of {length} bytes in "
            f"{size}, the limit being {MAX_HEADER_BYTES}"
        )
    try:
        entries = dict(json.loads(stream.read(length)))
        entries.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as exc:
        raise InvalidRequest(
            f"{WEIGHTS_FILE}: not a valid safetensors file: its header cannot be read ({exc!r:.80})"
        ) from exc
    if end != size - 8 - length:
        raise InvalidRequest(
            f"{WEIGHTS_FILE}: not a valid safetensors file: {size - 8 - length} bytes of tensors, "
            f"and its header tells of {end}"
        )
    stream.seek(0)


def _check_fields(config: dict[str, Any]) -> None:
    for field, value in config.items():
        if field in HARMLESS | CHECKED:
            continue
        is_plain = not value
        if field == "init_lora_weights":
            is_plain = any(value is one or value == one for one in PLAIN_STARTS)
        if not is_plain:
            raise InvalidRequest(
                f"{CONFIG_FILE}: {field[:60]} is {str(value)[:60]!r}, which this server does not "
                "support; use a plain LoRA adapter"
            )
