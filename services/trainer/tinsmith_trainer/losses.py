"""The loss functions: per-token terms of a sum, and their slopes in the log-probability.

Every loss here is elementwise: token t adds ``value[t]`` to the loss, a function of its own
log-probability and of the datum's other inputs at t. The value and the slope are all that the
output layer needs to form gradients while a chunk of logits is at hand (see ``head``), so a new
loss is one function and one row of ``LOSSES``. There is no averaging anywhere: sums over tokens
and datums are the protocol's semantics.

Shapes: N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.errors import InvalidRequest, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


class Terms(NamedTuple):
    """What N tokens add to the loss; both float32 [N]."""

    value: Tensor
    slope: Tensor  # d value / d logprob


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function: the inputs and settings that it takes, and its formula.

    ``inputs`` are float32 [N] beside ``target_tokens``, each with the value that stands for an
    absent one, or None where it must be given. ``settings`` are the keys of the loss
    configuration with their defaults.
    """

    name: str
    inputs: Mapping[str, float | None]
    settings: Mapping[str, float]
    terms: Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Terms]

    def configure(self, given: Mapping[str, float | str]) -> dict[str, float]:
        """The settings with ``given`` applied; InvalidRequest for a key or type it lacks."""
        for key, value in given.items():
            if key not in self.settings:
                raise InvalidRequest(
                    f"loss_fn_config[{key!r}]: {self.name} does not take it; "
                    f"it takes {_listed(self.settings)}"
                )
            if isinstance(value, str):
                raise InvalidRequest(f"loss_fn_config[{key!r}]: {value!r} is not a number")
        return {**self.settings, **{key: float(value) for key, value in given.items()}}


def cross_entropy(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]
) -> Terms:
    """-sum(w * lp). Weights may be negative or fractional: custom losses arrive in this form."""
    del settings  # has none
    slope = -inputs["weights"]
    return Terms(slope * logprobs, slope)


LOSSES = {loss.name: loss for loss in (Loss("cross_entropy", {"weights": 1.0}, {}, cross_entropy),)}


def find(name: str) -> Loss:
    """The loss called ``name``; NotSupported, never another loss in its place."""
    if name not in LOSSES:
        raise NotSupported(
            f"loss_fn: {name!r} is not available on this server; use {_listed(LOSSES)}"
        )
    return LOSSES[name]


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"
