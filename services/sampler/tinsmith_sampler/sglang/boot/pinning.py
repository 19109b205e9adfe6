"""Pinned memory, which torch refuses to allocate where there is no accelerator.

SGLang asks for it in many places, and its scheduler ends at the first of them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _device

if TYPE_CHECKING:
    from collections.abc import Callable

_CONSTRUCTORS = (
    "tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
)


def remove() -> None:
    """Allocate ordinary memory where pinned memory is asked for."""
    # ``with torch.device("meta")`` knows constructors by identity, from a list that is made at its
    # first use. Made after the lines below, it would hold the wrappers and miss the originals:
    # transformers would then leave rotary frequencies uninitialised, and logits are noise.
    _device._device_constructors()  # noqa: SLF001
    for name in _CONSTRUCTORS:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args, **_named: self  # type: ignore[method-assign]


def _unpinned(construct: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(construct)
    def wrapped(*args: Any, **named: Any) -> torch.Tensor:
        named.pop("pin_memory", None)
        return construct(*args, **named)

    return wrapped
