"""Activation checkpointing: decoder layers that keep only their inputs for the backward pass.

transformers' own switch works in training mode only, which some families compute otherwise in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers that make up most of the model, the first one first; StartupError without."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise StartupError(
        f"model: {type(model).__name__} has no list of its {count} layers, which checkpointing "
        "needs; set trainer.checkpointing to false"
    )


def checkpoint_layers(model: PreTrainedModel) -> None:
    """From now on a layer computes its inner activations once more when their gradient is due."""
    for layer in decoder_layers(model):
        layer.forward = _Twice(layer.forward)


class _Twice:
    """A layer's forward pass, made again in the backward pass."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - each family has its own
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # There is no dropout, so there is no random state to keep.
        return checkpoint(
            self._forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )
