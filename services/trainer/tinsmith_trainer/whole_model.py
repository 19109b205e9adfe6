"""The tenant that trains every weight: the base model itself, one tenant at a time.

Its masters are one flat float32 array. Where the model computes in float32 its parameters are views
of them, so that a step changes the model itself; in bfloat16 they are copies that are rounded anew
after each step, and what backward passes find is added up in float32. Weights that are tied in the
model are one part, and stay tied.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tinsmith import memory
from tinsmith.errors import NoRoom
from tinsmith.messages.ops import WHOLE
from tinsmith_trainer.layout import Layout, Part
from tinsmith_trainer.trainable import Trainable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from tinsmith.messages.ops import OptimStep
    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.optim import Moments
    from tinsmith_trainer.trainable import Snapshot

_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "quantization_config")
"""Of a configuration: what says where it came from, or how its files were held."""


class Parameters:
    """The parameters of a loaded model: as they were loaded, or those of a tenant."""

    def __init__(self, base: BaseModel) -> None:
        """What was loaded is kept for the next tenant, in the CPU's memory after ``release``."""
        self._device = base.device
        self._parameters = dict(base.model.named_parameters())
        self._originals = {name: one.data.cpu() for name, one in self._parameters.items()}
        output: tuple[Tensor | None, ...] = (base.unembedding.weight, base.unembedding.bias)
        apart = {base.unembedding.weight, base.model.get_input_embeddings().weight}
        self.layout = Layout(
            _part(name, one, is_hidden=one not in apart) for name, one in self._parameters.items()
        )
        self.config = _config(base.model)
        self.dtypes = {
            name: str(one.dtype).removeprefix("torch.") for name, one in self._parameters.items()
        }
        """What each is computed in."""
        self._output = [self.name_of(one) for one in output if one is not None]
        self._is_rounded = any(one.dtype != torch.float32 for one in self._parameters.values())

    def loaded(self) -> Tensor:
        """What was loaded, float32 [layout.size] on the model's device; a copy."""
        flat = torch.empty(self.layout.size, device=self._device)
        for name, view in self.layout.named(flat).items():
            view.copy_(self._originals[name])
        return flat

    def become(self, flat: Tensor) -> None:
        """Take over the values of ``flat``, float32 [layout.size], and be trained from now on."""
        for name, view in self.layout.named(flat).items():
            parameter = self._parameters[name]
            dtype = self._originals[name].dtype
            parameter.data = view if dtype == torch.float32 else view.to(dtype)
            parameter.requires_grad_(True)  # noqa: FBT003 - torch's signature

    def follow(self, flat: Tensor) -> None:
        """Round the values of ``flat`` anew, where parameters are not views of it."""
        if not self._is_rounded:
            return
        for name, view in self.layout.named(flat).items():
            self._parameters[name].data.copy_(view)

    def release(self) -> None:
        """Be as loaded again, and let go of a tenant's memory."""
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's signature
            parameter.data = self._originals[name]

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Passes with gradients in the block find what was loaded, on the model's device."""
        for name, parameter in self._parameters.items():
            parameter.data = self._originals[name].to(self._device)
            parameter.requires_grad_(True)  # noqa: FBT003 - torch's signature
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def adding_to(self, gradients: Mapping[str, Tensor]) -> Iterator[None]:
        """Let backward passes in the block add to ``gradients``, float32, by parameter.

        Of a parameter that is not among them the gradient stays with it, up to the block's end.
        """
        with ExitStack() as hooks:
            for name, view in gradients.items():
                parameter = self._parameters[name]
                if parameter.dtype == torch.float32:
                    parameter.grad = view
                else:
                    hook = parameter.register_post_accumulate_grad_hook(_moving_to(view))  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            try:
                yield
            finally:
                for parameter in self._parameters.values():
                    parameter.grad = None

    def name_of(self, parameter: Tensor) -> str:
        """What ``parameter`` is called in the layout."""
        return next(name for name, one in self._parameters.items() if one is parameter)

    def zeros_of_output(self) -> dict[str, Tensor]:
        """For the gradient of the output layer, which is made by hand: float32, by parameter."""
        layers = {name: self._parameters[name] for name in self._output}
        return {name: torch.zeros(one.shape, device=self._device) for name, one in layers.items()}

    def pass_gradient_bytes(self) -> int:
        """What the gradient of a pass takes: in its dtype, and of the output layer in float32."""
        return sum(
            one.numel() * (4 if name in self._output else one.element_size())
            for name, one in self._parameters.items()
        )

    def present(self) -> Iterable[Tensor]:
        """What is computed with."""
        return [one.data for one in self._parameters.values()]

    def stand_alone(self) -> None:
        """Be trained from now on, in memory of their own; values come by ``take``."""
        for parameter in self._parameters.values():
            shape, dtype = parameter.shape, parameter.dtype
            parameter.data = torch.empty(shape, dtype=dtype, device=self._device)
            parameter.requires_grad_(True)  # noqa: FBT003 - torch's signature

    def take(self, start: int, values: Tensor) -> None:
        """Become ``values``, float32, which stand in a flat array from ``start`` on."""
        for name, inside, where in self.layout.between(start, start + len(values)):
            self._parameters[name].data.view(-1)[inside] = values[where]

    def give_loaded(self, start: int, values: Tensor) -> None:
        """Fill ``values``, float32, with what was loaded, from ``start`` on."""
        for name, inside, where in self.layout.between(start, start + len(values)):
            values[where] = self._originals[name].reshape(-1)[inside]

    def give_gradients(self, start: int, values: Tensor, apart: Mapping[str, Tensor]) -> None:
        """Fill ``values``, which are 0, with the gradients that there are, from ``start`` on.

        Some of them lie ``apart``.
        """
        for name, inside, where in self.layout.between(start, start + len(values)):
            gradient = apart.get(name, self._parameters[name].grad)
            if gradient is not None:
                values[where] = gradient.reshape(-1)[inside]

    def forget_gradients(self, apart: Mapping[str, Tensor]) -> None:
        """The next pass begins from 0."""
        for name, parameter in self._parameters.items():
            if name in apart:
                apart[name].zero_()
            else:
                parameter.grad = None


class WholeModel(Trainable):
    """All weights of the base, taken over by one model."""

    def __init__(self, parameters: Parameters, weights: Tensor, optimizer: Moments) -> None:
        """Takes over ``weights`` and ``optimizer``; the base computes with them from now on."""
        super().__init__(WHOLE, parameters.layout, weights, optimizer)
        self._parameters = parameters
        self.collected: Mapping[str, Tensor] | None = None
        """Where the gradients of the present block go, by parameter."""
        self._become()

    @contextmanager
    def adding_to(self, gradient: Tensor) -> Iterator[None]:
        """Also by hand: the output layer is no part of the backward pass."""
        with self._collecting_in(self.layout.named(gradient)):
            yield

    @contextmanager
    def _collecting_in(self, gradients: Mapping[str, Tensor]) -> Iterator[None]:
        self.collected = gradients
        try:
            with self._parameters.adding_to(gradients):
                yield
        finally:
            self.collected = None

    def _become(self) -> None:
        self._parameters.become(self.weights)

    def _follow(self) -> None:
        self._parameters.follow(self.weights)

    def step(self, op: OptimStep, norm_block: int) -> float:
        """As every tenant's; the model computes with the new weights afterwards."""
        norm = super().step(op, norm_block)
        self._follow()
        return norm

    def snapshot(self, base_model: str, over: Snapshot | None = None) -> Snapshot:
        """Copies of everything.

        Raises:
            NoRoom: there is not that much memory.
        """
        state = (self.weights, self.optimizer.exp_avg, self.optimizer.exp_avg_sq)
        check_room("a copy of", sum(one.nbytes for one in state))
        copied, parameters = super().snapshot(base_model, over), self._parameters
        return replace(copied, config=parameters.config, dtypes=parameters.dtypes)


def check_room(what: str, need: int) -> None:
    """Raises NoRoom when main memory has less than ``need`` bytes free."""
    free = memory.available_bytes()
    if free is not None and need > free:
        raise NoRoom(
            f"weights: {what} all weights and the optimizer's state takes "
            f"{need / memory.GIB:.2f} GiB, and {free / memory.GIB:.2f} GiB of main memory are "
            "free; ask the operator for a larger machine, or train an adapter"
        )


def _part(name: str, parameter: nn.Parameter, *, is_hidden: bool) -> Part:
    shape = tuple(parameter.shape)
    matrices: Callable[[Tensor], Tensor] | None = None
    if is_hidden and not name.endswith("bias"):
        matrices = {2: _alone, 3: _as_they_are}.get(len(shape))
    return Part(name, shape, matrices)


def _alone(view: Tensor) -> Tensor:
    return view[None]


def _as_they_are(view: Tensor) -> Tensor:
    """Of a mixture's experts."""
    return view


def _moving_to(view: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        if parameter.grad is not None:
            view.add_(parameter.grad)
            parameter.grad = None

    return move


def _config(model: PreTrainedModel) -> Mapping[str, object]:
    """``config.json`` of what is saved, the same whatever the weights were loaded from."""
    fields: dict[str, object] = json.loads(model.config.to_json_string())
    for name in _NOT_THE_MODEL:
        fields.pop(name, None)
    return fields | {"dtype": "float32"}
