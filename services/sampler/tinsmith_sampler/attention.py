"""Attention of a pass over sequences of different lengths, on the keys in the KV cache.

A pass is a flat list of tokens from several sequences. Each sequence is attended on its own, over
exactly its keys: no padding, no mask between sequences, so what a token sees is computed by the
same call alone and in company.

T = tokens of the pass, Q = query heads, H = key heads, D = head size, n = tokens of a segment,
C = tokens of its context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith_sampler.kv_cache import KvCache

NAME = "tinsmith"
"""What a model's ``attn_implementation`` must be for its passes to come here."""


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Adjacent tokens of one sequence: the pass's tokens ``first`` to ``first + count``.

    Their context is the slots from ``start`` to ``end``, the last ``count`` of them their own.
    """

    first: int
    count: int
    start: int
    end: int
    mask: torch.Tensor | None  # bool [n, C]; None: all is seen, or causal from the first token

    def within(self, window: int | None, device: torch.device) -> Segment:
        """The same tokens where each sees at most the last ``window`` tokens of its context."""
        length = self.end - self.start
        if window is None or length <= window:
            return self
        if self.count == 1:
            return replace(self, start=self.end - window)
        seen = self.mask
        if seen is None:
            seen = torch.ones(self.count, length, dtype=torch.bool, device=device).tril_()
        return replace(self, mask=seen.triu(length - self.count - window + 1))


@dataclass(frozen=True, eq=False, slots=True)
class _Kind:
    """How scores are made, and what else shares the softmax."""

    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None


def causal_mask(count: int, position: int, device: str) -> torch.Tensor | None:
    """What ``count`` tokens see that follow ``position`` earlier ones; None needs no mask."""
    if count == 1 or position == 0:
        return None
    return torch.ones(count, position + count, dtype=torch.bool, device=device).tril_(position)


@dataclass(frozen=True, eq=False, slots=True)
class PassPlan:
    """Where a pass's keys and values go, and what each of its tokens may see."""

    cache: KvCache
    slots: torch.Tensor  # int64 [T]
    segments: Sequence[Segment]


def attend(  # noqa: PLR0913 - the signature is that of Hugging Face
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    plan: PassPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function of a Hugging Face model: query [1, Q, T, D], key [1, H, T, D].

    Some families see only ``sliding_window`` tokens, their own among them, or cap the scores, or
    have attention sinks ``s_aux`` [Q] that take a share of the softmax.
    Returns [1, T, Q, D]; rows that no segment covers are zero.
    """
    if attention_mask is not None:
        raise ValueError("a pass has no attention mask: its segments say what is seen")
    keys, values = plan.cache.layers[module.layer_idx]  # type: ignore[index]
    keys.index_copy_(2, plan.slots, key)
    values.index_copy_(2, plan.slots, value)
    kind = _Kind(scaling, softcap, s_aux)
    outputs = [
        _attend_one(
            query.narrow(2, segment.first, segment.count),
            keys,
            values,
            segment.within(sliding_window, query.device),
            kind,
        )
        for segment in plan.segments
    ]
    padding = query.shape[2] - sum(segment.count for segment in plan.segments)
    if padding:
        outputs.append(query.new_zeros(1, padding, query.shape[1], query.shape[3]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    kind: _Kind,
) -> torch.Tensor:
    """One sequence: query [1, Q, n, D] over its slots; returns [1, n, Q, D]."""
    _, heads, n, dim = query.shape
    length = segment.end - segment.start
    keys_HCD = keys.narrow(2, segment.start, length)
    values_HCD = values.narrow(2, segment.start, length)
    scaling = kind.scaling
    if kind.softcap is not None or kind.sinks is not None:
        return _attend_plainly(query, keys_HCD, values_HCD, segment, kind)
    if n == 1:
        # The query heads that share a key head are its rows: each key is then read once.
        grouped = query.reshape(1, keys.shape[1], -1, dim)
        out = functional.scaled_dot_product_attention(grouped, keys_HCD, values_HCD, scale=scaling)
        return out.reshape(1, 1, heads, -1)
    out = functional.scaled_dot_product_attention(
        query,
        keys_HCD,
        values_HCD,
        attn_mask=segment.mask,
        is_causal=segment.mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2)


def _attend_plainly(
    query: torch.Tensor,
    keys_HCD: torch.Tensor,
    values_HCD: torch.Tensor,
    segment: Segment,
    kind: _Kind,
) -> torch.Tensor:
    """Like ``_attend_one``, score by score, for what torch's function does not know."""
    _, heads, n, dim = query.shape
    shared = heads // keys_HCD.shape[1]
    keys_QCD = keys_HCD.repeat_interleave(shared, dim=1)
    scale = dim**-0.5 if kind.scaling is None else kind.scaling
    scores = (query @ keys_QCD.transpose(2, 3) * scale).float()
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    mask = segment.mask
    if mask is None and n > 1:
        mask = torch.ones(n, n, dtype=torch.bool, device=query.device).tril_()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if kind.sinks is not None:
        sinks = kind.sinks.float().view(1, -1, 1, 1).expand(1, heads, n, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = torch.softmax(scores, dim=-1)[..., : keys_QCD.shape[2]].to(query.dtype)
    return (shares @ values_HCD.repeat_interleave(shared, dim=1)).transpose(1, 2)


def register() -> None:
    """Make ``attn_implementation=NAME`` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
