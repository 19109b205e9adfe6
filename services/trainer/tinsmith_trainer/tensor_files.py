"""Checkpoint files as tensors and JSON: packed, read, and checked before anything is believed.

Nothing is ever pickled or unpickled.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

import msgspec
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

S = TypeVar("S")


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file; equal tensors give equal bytes."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return safetensors.numpy.save(arrays, {"format": "pt"})


def unpack(files: Mapping[str, bytes], name: str, remedy: str) -> dict[str, Tensor]:
    """The tensors of a file; InvalidRequest with ``remedy`` when it is not there, or is damaged."""
    try:
        return safetensors.torch.load(file(files, name, remedy))
    except SafetensorError as exc:
        raise InvalidRequest(f"{name}: not a valid safetensors file: {exc}") from exc


def decode(files: Mapping[str, bytes], name: str, type_: type[S], remedy: str) -> S:
    """A JSON file as ``type_``; InvalidRequest likewise."""
    try:
        return msgspec.json.decode(file(files, name, remedy), type=type_)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise InvalidRequest(f"{name}: {exc}") from exc


def file(files: Mapping[str, bytes], name: str, remedy: str) -> bytes:
    """The bytes of a file; InvalidRequest when it is not there."""
    if name not in files:
        raise InvalidRequest(f"{name}: the checkpoint does not have it; {remedy}")
    return files[name]


def fill(
    names: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str, whose: str
) -> None:
    """Copy ``tensors`` into the views called as they are; each must fit and none be left."""
    if names.keys() != tensors.keys():
        odd = min(names.keys() ^ tensors.keys())
        raise InvalidRequest(
            f"{where}: tensor {odd} is {'missing' if odd in names else 'not expected'}; {whose} "
            "does not fit this base model, or has only some of its matrices"
        )
    for name, view in names.items():
        tensor = tensors[name]
        if tensor.shape != view.shape or not tensor.is_floating_point():
            raise InvalidRequest(
                f"{where}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, not floats of "
                f"shape {list(view.shape)}; {whose} does not fit this base model"
            )
        view.copy_(tensor)
        if not torch.isfinite(view).all():
            raise InvalidRequest(f"{where}: {name} holds numbers that are not finite")


def as_json(value: object) -> bytes:
    """A JSON file that reads well; equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
