"""What a loss function is: the inputs and settings that it takes, and its terms.

The output layer forms the gradient of a chunk of tokens while its logits are at hand (see
``head``). All that it needs of a loss is therefore, for each token, the value that it adds and
the slope in the token's log-probability. Where these depend on the whole datum, ``prepare`` sees
the datum's log-probabilities first and turns them into inputs per token; the logits are then
computed twice. There is no averaging anywhere: sums over tokens and datums are the protocol's
semantics.

Shapes: C tokens of a chunk, K targets per token, n tokens of one datum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tinsmith.errors import InvalidRequest

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
SAMPLED = "sampled"
"""The input that provenance spans become: 1 where a datum's targets were sampled, else 0."""


class Terms(NamedTuple):
    """What tokens add to the loss; both float32 of the log-probabilities' shape."""

    value: Tensor
    slope: Tensor  # d value / d logprob


Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]
Formula = Callable[[Tensor, Inputs, Settings], Terms]
Preparation = Callable[[Tensor, Inputs], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function.

    ``inputs`` are float32 of the targets' shape, each with what stands for an absent one: a
    number, the name of an input before it or of a setting, or None where it must be given.
    ``settings`` are the keys of the loss configuration with their defaults.
    """

    name: str
    inputs: Mapping[str, float | str | None]
    settings: Mapping[str, float]
    terms: Formula
    """Of log-probabilities and inputs [C, K]; elementwise."""
    prepare: Preparation | None = None
    """One datum's log-probabilities and inputs [n] to further inputs [n]; None for elementwise
    losses."""
    clipped: Callable[[Tensor, Inputs], Tensor] | None = None
    """Where the loss limits a token's influence, bool [n]; None if it never does."""
    measure: Callable[[Tensor, Inputs], dict[str, float]] | None = None
    """One datum's metrics by ``name:sum`` or ``name:mean``, of log-probabilities and inputs [n]."""
    ranks: Mapping[str, int] | None = None
    """Of a loss that clients define: the dimensions of what it reads, log-probabilities included.
    Its inputs may have any type and size, there are no others, and what it does not read may be
    there too."""
    takes_rows: bool = False
    """Whether there may be several targets per position."""
    needs_provenance: bool = False
    """Whether it reads ``SAMPLED``."""
    texts: tuple[str, ...] = ()
    """Keys of the loss configuration that may come with a text, and change nothing here."""

    @property
    def compares_policies(self) -> bool:
        """Whether its inputs bring the log-probabilities of the policy that sampled."""
        return "logprobs" in self.inputs

    def configure(self, given: Mapping[str, float | str]) -> dict[str, float]:
        """The settings with ``given`` applied; InvalidRequest for a wrong key or value."""
        numbers = {key: value for key, value in given.items() if not self._is_text(key, value)}
        for key, value in numbers.items():
            if key not in self.settings:
                raise InvalidRequest(
                    f"loss_fn_config[{key!r}]: {self.name} does not take it; "
                    f"it takes {listed([*self.settings, *self.texts])}"
                )
            if isinstance(value, str):
                raise InvalidRequest(f"loss_fn_config[{key!r}]: {value!r} is not a number")
            if not 0 <= value < math.inf:
                raise InvalidRequest(
                    f"loss_fn_config[{key!r}]: {value:g} is out of range; "
                    "use a finite number of at least 0"
                )
        settings = {**self.settings, **{key: float(value) for key, value in numbers.items()}}
        if settings.get(LOW, 0.0) > settings.get(HIGH, math.inf):
            raise InvalidRequest(
                f"loss_fn_config[{LOW!r}]: {settings[LOW]:g} is above {HIGH} {settings[HIGH]:g}; "
                "they bound the ratio itself, e.g. 0.8 and 1.2"
            )
        return settings

    def _is_text(self, key: str, value: float | str) -> bool:
        if key in self.texts and not isinstance(value, str):
            raise InvalidRequest(f"loss_fn_config[{key!r}]: {value:g} is not a text")
        return key in self.texts


def listed(names: Iterable[str]) -> str:
    """The names for an error message."""
    return ", ".join(sorted(names)) or "none"
