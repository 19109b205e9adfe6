"""How far the policy that is trained has moved from the one that sampled: figures per call.

Compared are the tokens that were sampled: by the provenance spans of a datum, or else those with
a log-probability or an advantage other than zero. With d = lp - q of such a token and r = exp(d):

    kl_k1    -d                             its mean estimates KL(sampler || trainer)
    kl_k3    r - 1 - d                      the same, never negative, with less noise
    dlogp    |d|
    outside  1 if r is outside [0.5, 2]
    ess      (sum r)^2 / (n sum r^2)        the share of the tokens that importance sampling keeps
    clipped  1 if the loss limits the token's influence

Clients combine the results of a call's chunks by the part of the key after the colon, and weight
``mean`` by the number of datums. So ``:mean`` keys are means over datums of each datum's own
figure (the best possible one for datums without such tokens), and ``:sum`` keys are sums over
tokens, from which figures per token follow exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tinsmith_trainer.provenance import inferred_targets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.loss import Loss
    from tinsmith_trainer.microbatch import Scored

FAR = 2.0  # a ratio of more than this, or less than one over it, is outside
_LARGEST_DRIFT = 80.0  # of which the ratio and its square are still numbers in float64


class _Compared(NamedTuple):
    """The sampled tokens of one datum, all [m]."""

    drift: NDArray[np.float64]
    is_clipped: NDArray[np.bool_] | None


def figures(loss: Loss, examples: Sequence[Example], results: Sequence[Scored]) -> dict[str, float]:
    """The figures by ``name:reduction``; empty for a loss without sampling log-probabilities."""
    if not loss.compares_policies:
        return {}
    compared = [
        _compare(loss, example, scored) for example, scored in zip(examples, results, strict=True)
    ]
    by_datum = [_of_datum(datum) for datum in compared]
    means = {f"{key}:mean": _mean(row[key] for row in by_datum) for key in by_datum[0]}
    return means | _of_tokens(compared)


def sums(drift: NDArray[np.float64]) -> dict[str, float]:
    """The figures over tokens of ``drift``, lp - q of each, [m]."""
    return _of_tokens([_Compared(drift, None)])


def _compare(loss: Loss, example: Example, scored: Scored) -> _Compared:
    logprobs = example.inputs["logprobs"]
    chosen = example.sampled
    if chosen is None:
        chosen = inferred_targets(logprobs, example.inputs["advantages"])
    drift = scored.logprobs[chosen].astype(np.float64) - logprobs[chosen]
    is_clipped = None
    if loss.clipped is not None:
        inputs = {key: torch.from_numpy(values) for key, values in example.inputs.items()}
        is_clipped = loss.clipped(torch.from_numpy(scored.logprobs), inputs).numpy()[chosen]
    return _Compared(drift, is_clipped)


def _of_datum(datum: _Compared) -> dict[str, float]:
    ratio = _ratio(datum.drift)
    found = {
        "kl_k1": _mean(-datum.drift),
        "kl_k3": _mean(ratio - 1 - datum.drift),
        "dlogp": _mean(np.abs(datum.drift)),
        "outside": _mean(_is_outside(ratio)),
        "ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())) if len(ratio) else 1.0,
    }
    if datum.is_clipped is not None:
        found["clipped"] = _mean(datum.is_clipped)
    return found


def _of_tokens(compared: Sequence[_Compared]) -> dict[str, float]:
    drift = np.concatenate([datum.drift for datum in compared])
    ratio = _ratio(drift)
    found = {
        "compared:sum": float(len(drift)),
        "kl_k1:sum": float(-drift.sum()) + 0.0,
        "kl_k3:sum": float((ratio - 1 - drift).sum()),
        "dlogp:sum": float(np.abs(drift).sum()),
        "dlogp:max": float(np.abs(drift).max(initial=0.0)),
        "outside:sum": float(_is_outside(ratio).sum()),
        "ratio:sum": float(ratio.sum()),
        "ratio_squared:sum": float((ratio**2).sum()),
    }
    flags = [datum.is_clipped for datum in compared if datum.is_clipped is not None]
    if flags:
        found["clipped:sum"] = float(np.concatenate(flags).sum())
    return found


def _ratio(drift: NDArray[np.float64]) -> NDArray[np.float64]:
    ratio: NDArray[np.float64] = np.exp(np.clip(drift, -_LARGEST_DRIFT, _LARGEST_DRIFT))
    return ratio


def _is_outside(ratio: NDArray[np.float64]) -> NDArray[np.bool_]:
    return (ratio > FAR) | (ratio < 1 / FAR)


def _mean(values: Iterable[float] | NDArray[np.generic]) -> float:
    """Of nothing: zero."""
    array = np.asarray(list(values) if not isinstance(values, np.ndarray) else values, np.float64)
    return float(array.mean()) + 0.0 if array.size else 0.0
