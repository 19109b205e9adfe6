"""How much memory a pass over one long datum takes, measured, and whether there is that much.

The measurement is of what autograd keeps for the backward pass, by far the most of it: counted
over two short passes of the base, and continued to any length by a n + b n^2. (b is zero unless
attention keeps its scores.) Adapters keep little beside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tinsmith import memory
from tinsmith.errors import NoRoom

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith_trainer.base_model import BaseModel

_PROBES = (16, 48)  # tokens
_WORKING_LAYERS = 3
"""Layers' worth of memory in use at once beside what is kept: inputs, outputs, gradients."""


class _Growth(NamedTuple):
    """Bytes kept of n tokens: ``linear`` n + ``square`` n^2."""

    linear: float
    square: float

    def at(self, tokens: int) -> float:
        return self.linear * tokens + self.square * tokens**2


class Room:
    """The memory of one base model's passes."""

    def __init__(
        self,
        base: BaseModel,
        kept_bytes: Callable[[int], int],
        *,
        checkpointing: bool,
        gradient_bytes: int = 0,
    ) -> None:
        """``kept_bytes`` tells what a pass over so many tokens keeps without checkpointing.

        ``gradient_bytes`` is what a pass with a gradient takes for it, however long it is.
        """
        self._base = base
        self._kept = _measured(kept_bytes)
        self._checkpointing = checkpointing
        self._gradient_bytes = gradient_bytes
        self._layers = base.model.config.get_text_config().num_hidden_layers

    def check(self, where: str, tokens: int, *, with_gradient: bool) -> None:
        """Raises NoRoom, with the figures, when a pass over ``tokens`` does not fit."""
        free = self.free_bytes()
        if free is None or self.bytes_of(tokens, with_gradient=with_gradient) <= free:
            return
        most = self._most_tokens(free, tokens, with_gradient=with_gradient)
        need = self.bytes_of(tokens, with_gradient=with_gradient)
        remedy = "shorten or split the datum"
        if with_gradient and not self._checkpointing:
            remedy += ", or ask the operator to set trainer.checkpointing"
        raise NoRoom(
            f"{where}.model_input: {tokens} tokens in one pass take about "
            f"{need / memory.GIB:.2f} GiB, and {self._base.device} has {free / memory.GIB:.2f} GiB "
            f"free, enough for about {most} tokens; {remedy}"
        )

    def check_whole(self, need: int) -> None:
        """Raises NoRoom when a whole gradient of ``need`` bytes does not fit."""
        free = self.free_bytes()
        if free is not None and need > free:
            raise NoRoom(
                "trainer.sharding: this request was made without slices, and to repeat it takes a "
                f"whole gradient of {need / memory.GIB:.2f} GiB; {self._base.device} has "
                f'{free / memory.GIB:.2f} GiB free; go on with trainer.sharding = "none" until '
                "the model's state is saved"
            )

    def bytes_of(self, tokens: int, *, with_gradient: bool) -> int:
        """About what a pass over ``tokens`` takes beside the weights."""
        kept = self._kept.at(tokens)
        working = kept * min(1.0, _WORKING_LAYERS / self._layers)
        if not with_gradient:
            return int(working)
        working += self._gradient_bytes
        if self._checkpointing:
            return int(working + self._layers * self._input_bytes() * tokens)
        return int(working + kept)

    def free_bytes(self) -> int | None:
        """Memory that a pass may take; None where nobody knows."""
        device = self._base.device
        if device.type != "cuda":
            return memory.available_bytes()
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + spare

    def _most_tokens(self, free: int, refused: int, *, with_gradient: bool) -> int:
        low, high = 0, refused
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.bytes_of(middle, with_gradient=with_gradient) <= free
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _input_bytes(self) -> int:
        """Of a layer's input, per token."""
        config = self._base.model.config.get_text_config()
        return int(config.hidden_size) * self._base.unembedding.weight.element_size()


def _measured(kept_bytes: Callable[[int], int]) -> _Growth:
    short, long = (kept_bytes(tokens) / tokens for tokens in _PROBES)
    square = max(0.0, (long - short) / (_PROBES[1] - _PROBES[0]))
    return _Growth(max(0.0, short - square * _PROBES[0]), square)
