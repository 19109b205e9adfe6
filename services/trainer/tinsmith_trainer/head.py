"""The output layer: log-probabilities of target tokens and their gradient, chunk by chunk.

A vocabulary is so wide that logits of all tokens at once outweigh everything else. Here they exist
for one chunk of tokens only, in one reused buffer. Where the loss is elementwise, the gradient
of a chunk is formed while its logits are at hand: nothing is kept and nothing is computed twice,
and tokens whose gradient is zero (prompts, as a rule) skip their half of the work. A loss that
must see all log-probabilities first has the logits computed a second time.

    lp[t, k] = logit[t, target[t, k]] - log(sum over v of exp(logit[t, v]))
    d loss / d logit[t, v] = sum over k: slope[t, k] * (1[v = target[t, k]] - softmax(logit[t])[v])

Shapes: N tokens, K targets per token, C tokens of a chunk, G those of them with a gradient,
H hidden, V vocabulary, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from tinsmith_trainer.lora import add_product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinsmith_trainer.lora import LoraPair
    from tinsmith_trainer.loss import Terms

_CHUNK_LOGITS = {"cpu": 6 << 20, "cuda": 1 << 27}
"""Most logits of a chunk: what stays near a CPU's caches, and what keeps a GPU busy."""
_CHUNK_TOKENS = 64
"""Fewest tokens of a chunk: matrix products lose their efficiency below it."""


class Scores(NamedTuple):
    """What the output layer made of N tokens."""

    logprobs: Tensor  # float32 [N, K]
    values: Tensor  # float32 [N, K], the terms of the loss
    grad_hidden: Tensor | None  # d loss / d hidden, [N, H] in its dtype; None without gradients


class OutputHead:
    """The frozen unembedding of the base, and the product that an adapter adds to it."""

    def __init__(self, linear: nn.Linear, *, softcap: float | None = None) -> None:
        """``softcap``: logits z become softcap * tanh(z / softcap), as in the Gemma family."""
        self._softcap = softcap
        self._linear = linear  # and not its weight, which is another one when it was in shards
        fitting = _CHUNK_LOGITS[linear.weight.device.type] // linear.out_features
        self._chunk = max(_CHUNK_TOKENS, fitting)

    @torch.no_grad()
    def score(
        self,
        hidden_NH: Tensor,
        targets_NK: Tensor,
        terms: Callable[[slice, Tensor], Terms],
        pair: LoraPair | None,
        *,
        with_gradient: bool,
        prepare: Callable[[Tensor], None] | None = None,
    ) -> Scores:
        """Score ``targets_NK`` (int64), each by the hidden state of the token before it.

        ``terms`` makes the loss of a range of tokens out of their log-probabilities; ``prepare``
        is given all of them before that. With ``with_gradient``, the gradient of the adapter's
        factors is added to their float32 ``grad``.
        """
        scores = Scores(
            torch.empty(targets_NK.shape, dtype=torch.float32, device=hidden_NH.device),
            torch.empty(targets_NK.shape, dtype=torch.float32, device=hidden_NH.device),
            torch.zeros_like(hidden_NH) if with_gradient else None,
        )
        low_rank = None if pair is None else _LowRank(pair, hidden_NH.dtype)
        if prepare is not None:
            for rows, logits_CV in self._chunks(hidden_NH, low_rank):
                scores.logprobs[rows], _ = _exponentiate(logits_CV, targets_NK[rows])
            prepare(scores.logprobs)
        for rows, logits_CV in self._chunks(hidden_NH, low_rank):
            h_CH, targets_CK = hidden_NH[rows], targets_NK[rows]
            steepness_CV = self._steepness(logits_CV) if with_gradient else None
            scores.logprobs[rows], sums_C = _exponentiate(logits_CV, targets_CK)
            scores.values[rows], slope_CK = terms(rows, scores.logprobs[rows])
            if scores.grad_hidden is not None:
                rows_G, grad_GV = _logit_gradient(logits_CV, sums_C, slope_CK, targets_CK)
                if steepness_CV is not None:
                    grad_GV *= steepness_CV[rows_G]
                grad_GH = self._backward(h_CH[rows_G], low_rank, grad_GV.to(h_CH.dtype))
                scores.grad_hidden[rows][rows_G] = grad_GH
        return scores

    def _chunks(
        self, hidden_NH: Tensor, low_rank: _LowRank | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of tokens and their logits, float32 [C, V], each valid until the next."""
        tokens = len(hidden_NH)
        buffer = hidden_NH.new_empty(min(self._chunk, tokens), self._linear.out_features)
        for start in range(0, tokens, self._chunk):
            rows = slice(start, min(start + self._chunk, tokens))
            h_CH = hidden_NH[rows]
            yield rows, self._logits(h_CH, low_rank, buffer[: len(h_CH)])

    def _logits(self, h_CH: Tensor, low_rank: _LowRank | None, out: Tensor) -> Tensor:
        """float32 [C, V]; in ``out`` itself if that is float32."""
        torch.mm(h_CH, self._linear.weight.T, out=out)
        if self._linear.bias is not None:
            out += self._linear.bias
        if low_rank is not None:
            low_rank.add_product(h_CH, out)
        logits_CV = out.float()
        if self._softcap is not None:
            logits_CV.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits_CV

    def _steepness(self, logits_CV: Tensor) -> Tensor | None:
        """How logits change with those before the cap, [C, V]; None without a cap."""
        if self._softcap is None:
            return None
        return 1 - (logits_CV / self._softcap).square()

    def _backward(self, h_GH: Tensor, low_rank: _LowRank | None, grad_GV: Tensor) -> Tensor:
        grad_GH = grad_GV @ self._linear.weight
        if low_rank is not None:
            low_rank.backward(h_GH, grad_GV, grad_GH)
        return grad_GH


class _LowRank:
    """An adapter's factors of the unembedding in the dtype of the pass."""

    def __init__(self, pair: LoraPair, dtype: torch.dtype) -> None:
        self._pair = pair
        self._A_RH = pair.A_RI.to(dtype)
        self._B_VR = pair.B_OR.to(dtype)

    def add_product(self, h_CH: Tensor, logits_CV: Tensor) -> None:
        logits_CV.addmm_(self._inner(h_CH), self._B_VR.T)

    def backward(self, h_GH: Tensor, grad_GV: Tensor, grad_GH: Tensor) -> None:
        """Add this product's share to ``grad_GH`` and to the gradients of the factors."""
        grad_GR = (grad_GV @ self._B_VR).mul_(self._pair.scale)
        grad_GH.addmm_(grad_GR, self._A_RH)
        add_product(self._pair.B_OR, grad_GV.T, self._inner(h_GH))
        add_product(self._pair.A_RI, grad_GR.T, h_GH)

    def _inner(self, h_NH: Tensor) -> Tensor:
        return (h_NH @ self._A_RH.T).mul_(self._pair.scale)


def _exponentiate(logits_CV: Tensor, targets_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into exp(logit - max) in place; log-probabilities [C, K] and row sums [C]."""
    logits_CV -= logits_CV.amax(dim=1, keepdim=True)
    picked_CK = logits_CV.gather(1, targets_CK)
    sums_C = logits_CV.exp_().sum(dim=1)
    return picked_CK - sums_C.log()[:, None], sums_C


def _logit_gradient(
    exp_CV: Tensor, sums_C: Tensor, slope_CK: Tensor, targets_CK: Tensor
) -> tuple[slice | Tensor, Tensor]:
    """The rows G that have a gradient, and it: [G, V]. ``exp_CV`` is spent on it."""
    nonzero_G = slope_CK.any(dim=1).nonzero().squeeze(1)
    rows_G: slice | Tensor = slice(None)
    if len(nonzero_G) < len(slope_CK):
        rows_G = nonzero_G
        exp_CV, sums_C, slope_CK = exp_CV[rows_G], sums_C[rows_G], slope_CK[rows_G]
        targets_CK = targets_CK[rows_G]
    exp_CV *= (-slope_CK.sum(dim=1) / sums_C)[:, None]
    range_G = torch.arange(len(slope_CK), device=slope_CK.device)
    # One column at a time: a token may be a target twice, and GPUs would add in no fixed order.
    for targets_G, slope_G in zip(targets_CK.unbind(1), slope_CK.unbind(1), strict=True):
        exp_CV[range_G, targets_G] += slope_G
    return rows_G, exp_CV
