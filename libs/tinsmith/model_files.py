"""A base model's files, and what they tell before anything of them is loaded.

Pure reading of JSON and of the headers of safetensors files: a wrong path, an unknown
architecture or a model that is too large is reported in a second, and without torch.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

Quantization = Literal["none", "nf4", "int8"]

FAMILIES = {
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gpt_oss": "gpt-oss",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
}
"""``model_type`` of the architectures whose numbers are tested, and their names."""

_HUB_ID_RE = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_BYTES = {"float32": 4.0, "bfloat16": 2.0}
_QUANTISED_BYTES = {
    "nf4": 0.5 + (1 + 4 / 256) / 64,  # a byte of scale for 64 weights, itself scaled by 256
    "int8": 1.01,  # a float32 of scale for each row
}
_FLOATS = {"embed_tokens", "lm_head", "gate", "router"}
"""Modules whose weights stay floats in a quantised base."""
_PACKED = {"_blocks": 2, "_scales": 0}
"""Weights in one stored byte of the 4-bit form in which gpt-oss is published."""

_STATE_COPIES = 5


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A complete folder in Hugging Face format."""

    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Of every stored tensor."""

    @property
    def family(self) -> str:
        """``model_type`` of the configuration."""
        return str(self.config["model_type"])

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return bool(self.config.get("num_experts") or self.config.get("num_local_experts"))

    @property
    def stored_form(self) -> str | None:
        """The method by which the stored weights are quantised; None: they are plain floats."""
        quantised = self.config.get("quantization_config")
        return None if quantised is None else str(quantised.get("quant_method", "unknown"))

    def loader_form(self, dtype: str, quantization: Quantization) -> dict[str, object] | None:
        """What transformers calls ``quantization_config`` for weights held so; None: plain.

        Raises:
            StartupError: the stored weights are quantised in a way that cannot be undone here.
        """
        if self.stored_form == "mxfp4":  # of gpt-oss; matrix products need it back in floats
            return {"quant_method": "mxfp4", "dequantize": True}
        if self.stored_form is not None:
            raise StartupError(
                f"model: {self.folder} is stored in the form {self.stored_form!r}, which Tinsmith "
                "does not read; get the weights in bfloat16, and set quantization if need be"
            )
        if quantization == "none":
            return None
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": quantization == "nf4",
            "load_in_8bit": quantization == "int8",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        }

    def weight_bytes(self, dtype: str, quantization: Quantization = "none") -> int:
        """The size of the loaded weights."""
        total = 0.0
        for name, shape in self.shapes.items():
            packed = [count for suffix, count in _PACKED.items() if name.endswith(suffix)]
            each = _BYTES[dtype]
            if _is_quantised(name, shape):
                each = _QUANTISED_BYTES.get(quantization, each)
            total += prod(shape) * each * (packed[0] if packed else 1)
        return int(total)

    def state_bytes(self, shards: int = 1) -> int:
        """What training all weights takes beside them, on each of ``shards`` ranks; in float32.

        Masters, the accumulated gradient and the one that is being added to it, two moments.
        """
        return _STATE_COPIES * self.weight_bytes("float32") // shards


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a quantised base holds this tensor in codes: a linear layer's, or all experts'."""
    parts = set(name.split("."))
    if len(shape) == 3:
        return "experts" in parts
    return len(shape) == 2 and not name.endswith("bias") and not parts & _FLOATS


def find(source: str) -> ModelFiles:
    """The files of ``source``: a folder, or a hub id, which is downloaded unless it is cached.

    Raises:
        StartupError: there is no such model, a file is missing or damaged, or the architecture
            is none of ``FAMILIES``. Of a hub id, the architecture is checked before the weights
            are downloaded.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if not _HUB_ID_RE.fullmatch(source):
            raise StartupError(
                f"model: there is no folder {source}; set path to a folder in Hugging Face "
                "format, or to a hub id"
            )
        folder = _from_hub(source)
    missing = _missing_files(folder)
    if missing:
        raise StartupError(
            f"model: {source} lacks {', '.join(missing[:3])}; set path to a folder made by "
            "save_pretrained, with config.json and safetensors weights"
        )
    config = _config(folder / "config.json", source)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        shapes |= _shapes(folder / file)
    return ModelFiles(folder, config, shapes)


def check_quantization(files: ModelFiles, quantization: Quantization, *, device: str) -> None:
    """Raises StartupError when the model cannot be held in this form."""
    if quantization == "none":
        return
    if files.stored_form == "mxfp4":
        raise StartupError(
            f"quantization: {quantization!r} would round what {files.folder} stores in mxfp4 once "
            "more; set quantization to none, or get the weights in bfloat16"
        )
    try:
        import bitsandbytes  # noqa: F401  # type: ignore[import-untyped,unused-ignore]
    except ImportError as problem:
        raise StartupError(
            f"quantization: {quantization!r} on {device} needs bitsandbytes, which is not there "
            f"({problem}); install tinsmith[quantised], or set quantization to none"
        ) from None


def _from_hub(hub_id: str) -> Path:
    """The folder in the hub's cache; downloads what is missing there, unless offline."""
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub import try_to_load_from_cache as cached

    if constants.HF_HUB_OFFLINE:
        config = cached(hub_id, "config.json")
        if not isinstance(config, str):
            raise StartupError(
                f"model: {hub_id} is neither a folder nor in the hub cache "
                f"{constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; set path to a folder, or "
                "unset it to download"
            )
        return Path(config).parent
    try:
        _config(Path(hf_hub_download(hub_id, "config.json")), hub_id)
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except OSError as problem:  # the hub's own errors are of this kind
        raise StartupError(
            f"model: {hub_id} is not a folder and cannot be had from the hub: {problem}; set path "
            "to a folder"
        ) from problem


def _config(file: Path, source: str) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_bytes())
        family = config["model_type"]
    except (ValueError, KeyError, TypeError) as problem:
        raise StartupError(
            f"model: config.json of {source} names no model_type ({problem}); get a complete copy"
        ) from None
    if family not in FAMILIES:
        raise StartupError(
            f"model: {source} is of an unknown architecture, {family!r}; Tinsmith serves "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return dict(config)


def _missing_files(folder: Path) -> list[str]:
    names = ["config.json", *_weight_files(folder)]
    return [name for name in names if not (folder / name).is_file()]


def _weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    return ["model.safetensors"]


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """From the header: its length in 8 bytes, then JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, file.stat().st_size)))
        return {
            name: tuple(map(int, entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as problem:
        raise StartupError(
            f"model: {file} cannot be loaded, as it is no safetensors file: {problem}; get a "
            "complete copy"
        ) from None
