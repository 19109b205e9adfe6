"""How a token is drawn from logits: temperature, top_k, top_p, and where the chance comes from.

A row's draws depend on its seed and the position alone, never on its neighbours or on how often
the row was restarted: the uniform number is a pure function of both.
Suffixes: V = vocabulary, K = candidates, n = distributions, k = draws from each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from tinsmith.messages.sampling import SamplingParams

COLDEST = 1e-6
"""Below this temperature the draw is the argmax: the division would leave float32."""

_BLOCK = 64

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
        return _largest(logits_V)
    kept_K, ids_K = logits_V, None
    if 0 < params.top_k < len(logits_V):
        kept_K, ids_K = torch.topk(logits_V, params.top_k)
    weights_K = torch.exp((kept_K - kept_K.max()) / params.temperature)
    if params.top_p < 1.0:
        weights_K, places_K = _nucleus(weights_K, params.top_p)
        ids_K = places_K if ids_K is None else ids_K[places_K]
    place = _place(weights_K, chance)
    return place if ids_K is None else int(ids_K[place])


def _largest(logits_V: torch.Tensor) -> int:
    if logits_V.is_cuda:
        return int(logits_V.argmax())
    return int(logits_V.numpy().argmax())  # torch's takes many times as long on one thread


def _nucleus(
    weights_K: torch.Tensor, top_p: float, most: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest weights that hold ``top_p`` of the total, largest first, and their places.

    They are nearly always among the ``most`` largest; only if not, all of them are sorted.
    """
    largest, places = torch.topk(weights_K, min(most, len(weights_K)))
    needed = top_p * float(weights_K.sum(dtype=torch.float64))
    kept = int(torch.searchsorted(largest.cumsum(0, dtype=torch.float64), needed)) + 1
    if kept > most and most < len(weights_K):
        return _nucleus(weights_K, top_p, len(weights_K))
    return largest[:kept], places[:kept]


def draw_each(
    logits_nV: torch.Tensor, temperature: float, chances_nk: torch.Tensor
) -> torch.Tensor:
    """int64 [n, k]: k draws from each distribution, at float64 quantiles, by temperature alone."""
    if temperature < COLDEST:
        return logits_nV.argmax(1, keepdim=True).expand_as(chances_nk)
    weights_nV = torch.exp((logits_nV - logits_nV.amax(1, keepdim=True)) / temperature)
    return _places(weights_nV, chances_nk)


def _place(weights_K: torch.Tensor, chance: float) -> int:
    chances = torch.tensor([[chance]], dtype=torch.float64, device=weights_K.device)
    return int(_places(weights_K[None], chances))


def _places(weights_nK: torch.Tensor, chances_nk: torch.Tensor) -> torch.Tensor:
    """Where the running sum of each row of weights passes each ``chance`` of its total.

    First the block, then the place in it: a running sum over all is many times slower. The sums
    are float64, since in float32 the unlikely tokens of a large vocabulary would be lost.
    """
    n, size = weights_nK.shape
    blocks = functional.pad(weights_nK, (0, -size % _BLOCK)).view(n, -1, _BLOCK)
    mass = blocks.sum(2, dtype=torch.float64).cumsum(1)
    # right=True finds the first whose mass passes the point, so nothing without weight is found.
    points = chances_nk * mass[:, -1:]
    block = torch.searchsorted(mass, points, right=True)
    rest = points - functional.pad(mass, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(n, device=block.device)[:, None], block]  # [n, k, _BLOCK]
    sums = inside.cumsum(2, dtype=torch.float64)
    within = torch.searchsorted(sums, rest[..., None], right=True)[..., 0]
    # The two sums of a block may differ in the last bit, and the point lie between them.
    places = torch.arange(_BLOCK, device=block.device)
    last = torch.where(inside > 0, places, 0).amax(2)
    return block * _BLOCK + torch.minimum(within, last)
