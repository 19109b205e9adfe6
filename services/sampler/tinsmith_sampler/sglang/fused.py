"""Adapters of some of the layers that SGLang computes as one.

It holds query, key and value as one layer, and gate and up as another. An adapter that has not all
of them is refused, or parts of it are left out without a word: so the others get zeros, which
change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tinsmith_sampler.adapter_files import Pairs
    from tinsmith_sampler.lora_layers import LayerShape

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def completed(pairs: Pairs, layers: Mapping[str, LayerShape]) -> Pairs:
    """``pairs``, and zeros for what belongs to them; ``layers`` are those of the base model."""
    whole = dict(pairs)
    for name, pair in pairs.items():
        rank = len(pair["A"])
        for other in _companions(name):
            if other in layers and other not in whole:
                inputs, outputs = layers[other].inputs, layers[other].outputs
                whole[other] = {
                    "A": torch.zeros(rank, inputs, dtype=pair["A"].dtype),
                    "B": torch.zeros(outputs, rank, dtype=pair["B"].dtype),
                }
    return whole


def _companions(name: str) -> Iterator[str]:
    stem, _, last = name.rpartition(".")
    for group in _FUSED:
        if last in group:
            yield from (f"{stem}.{member}" for member in group if member != last)
