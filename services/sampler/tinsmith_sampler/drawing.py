"""How a token is drawn from logits: temperature, top_k, top_p, and where the chance comes from.

A row's draws depend on its seed and the position alone, never on its neighbours or on how often
the row was restarted: the uniform number is a pure function of both.
Suffix: V = vocabulary, K = candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tinsmith.messages.sampling import SamplingParams

COLDEST = 1e-6
"""Below this temperature the draw is the argmax: the division would leave float32."""

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for token ``position`` of the row with this seed.

    SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), which
    is a counter-based generator: output n hashes ``seed + n * gamma``. 52 bits are kept, so that
    the product with any float64 total stays below the total.
    """
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 12) * 2.0**-52


def draw(logits_V: torch.Tensor, params: SamplingParams, chance: float) -> int:
    """The token at quantile ``chance`` of the distribution that ``params`` make of the logits.

    Temperature first, then top_k, then top_p on what top_k left: the order of Hugging Face's
    ``generate``. ``logits_V`` is float32 and stays as it is.
    """
    if params.temperature < COLDEST or params.top_k == 1:
        return int(logits_V.argmax())
    kept_K, ids_K = _candidates(logits_V, params)
    # Float64 sums: a float32 running sum over 150,000 tokens drops the unlikely ones.
    mass_K = torch.exp((kept_K - kept_K.max()) / params.temperature).cumsum(0, dtype=torch.float64)
    if params.top_p < 1.0:
        last = torch.searchsorted(mass_K, params.top_p * mass_K[-1])
        mass_K = mass_K[: int(last) + 1]
    # right=True finds the first token whose mass passes the point, so one without mass never wins.
    place = torch.searchsorted(mass_K, chance * mass_K[-1], right=True)
    return int(place if ids_K is None else ids_K[place])


def _candidates(
    logits_V: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits that may be drawn, and their ids; None: all of them, in vocabulary order."""
    if 0 < params.top_k < logits_V.shape[0]:
        return torch.topk(logits_V, params.top_k)
    if params.top_p < 1.0:
        return torch.sort(logits_V, descending=True, stable=True)
    return logits_V, None
