"""Dimuon: orthogonal steps for the matrices of hidden layers, AdamW for everything else.

The hosted service has published its parameters (learning rate, ``beta1``, clipping) and no
formula. Here it is Muon (K. Jordan et al., https://kellerjordan.github.io/posts/muon), in the form
of ``torch.optim.Muon``, with the scale of Moonlight (arXiv 2502.16982, section 2.2), by which one
learning rate serves both halves:

    m = beta1 m + (1 - beta1) g
    w = w - learning_rate 0.2 sqrt(max(rows, columns)) orthogonal((1 - beta1) g + beta1 m)

The rest takes an AdamW step of the same learning rate and ``beta1``, with beta2 0.95 and eps 1e-12.
Nothing decays. All is computed in float32, matrix by matrix.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tinsmith_trainer.adamw import Stepped, adamw

if TYPE_CHECKING:
    from torch import Tensor

    from tinsmith.messages.ops import OptimStep
    from tinsmith_trainer.layout import Layout
    from tinsmith_trainer.optim import Moments

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
_SMALLEST_NORM = 1e-7
_SCALE = 0.2  # of an AdamW step's usual root mean square


def step(weights: Tensor, gradient: Tensor, state: Moments, op: OptimStep, layout: Layout) -> None:
    """One step in place, from a gradient that is clipped already; ``gradient`` is spent."""
    momenta = layout.matrices(state.exp_avg)
    gradients = layout.matrices(gradient)
    for name, w_NRC in layout.matrices(weights).items():
        g_NRC, m_NRC = gradients[name], momenta[name]
        m_NRC.lerp_(g_NRC, 1 - op.beta1)
        update_NRC = orthogonal(g_NRC.lerp(m_NRC, op.beta1))
        scale = _SCALE * math.sqrt(max(w_NRC.shape[1:]))
        w_NRC.sub_(update_NRC, alpha=op.learning_rate * scale)
    w, g, m = (layout.named(flat) for flat in (weights, gradient, state.exp_avg))
    second = layout.rest().named(state.exp_avg_sq)
    rest = [Stepped(w[name], g[name], m[name], v) for name, v in second.items()]
    if rest:
        adamw(rest, op, steps=state.steps)


def orthogonal(update_NRC: Tensor) -> Tensor:
    """About U V^T of each matrix's singular values U S V^T, float32 [n, rows, columns].

    Newton and Schulz's iteration with the quintic of Muon: singular values come out between about
    0.7 and 1.2, but for those that are tiny beside the largest. A zero matrix stays zero.
    """
    is_tall = update_NRC.shape[1] > update_NRC.shape[2]
    x = update_NRC.mT if is_tall else update_NRC
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x
