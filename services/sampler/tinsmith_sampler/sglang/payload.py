"""Tensors as SGLang's server takes them: a pickle, in base64.

The only pickles in Tinsmith, and it only writes them: of plain tensors under plain names, with the
ordinary pickler, so that the bytes are inside. The server unpickles with an allow-list, and dies of
what is not on it, so nothing else is ever passed here.
"""

from __future__ import annotations

import base64
import pickle
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def of_adapter(tensors: Mapping[str, torch.Tensor]) -> str:
    """What an adapter is loaded from: a dict by PEFT's names."""
    return _encoded({_name(name): _plain(tensor) for name, tensor in tensors.items()})


def of_weights(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """What weights are replaced with: a list, by the names of the model's checkpoint."""
    return _encoded([(_name(name), _plain(tensor)) for name, tensor in named])


def _encoded(value: object) -> str:
    return base64.b64encode(pickle.dumps(value, protocol=4)).decode()


def _name(name: str) -> str:
    if type(name) is not str:
        msg = f"{name!r} is not a plain string"
        raise TypeError(msg)
    return name


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A pickled view brings all of its storage with it, so it is a copy unless it is all of it."""
    if tensor.is_quantized or tensor.layout != torch.strided:
        msg = f"a tensor of layout {tensor.layout} cannot be sent; make it dense"
        raise TypeError(msg)
    tensor = tensor.detach().to("cpu").contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes or type(tensor) is not torch.Tensor:
        tensor = torch.empty_like(tensor, device="cpu").copy_(tensor)
    return tensor
