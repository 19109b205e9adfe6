"""Where SGLang holds each tensor of a model, by the names that transformers has for them.

Query, key and value are rows of one parameter, gate and up of another; the embedding is padded, and
the head may be the embedding itself or a copy of it. So a tensor is a stretch of a parameter that
is contiguous, or one in each of several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OF_EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
_INTEGERS = {2: torch.int16, 4: torch.int32}
"""By bytes of an element: torch has few operations on unsigned numbers."""


class Place(NamedTuple):
    """Elements [first, first + size) of a parameter, which SGLang may bind anew at any update."""

    module: torch.nn.Module
    attribute: str
    first: int
    size: int

    def bits(self) -> torch.Tensor:
        """As integers [size]: the memory itself, and no copy."""
        parameter = getattr(self.module, self.attribute).detach()
        if parameter.element_size() not in _INTEGERS:
            msg = f"it is held in {parameter.dtype}, which no version has"
            raise ValueError(msg)
        # Not ``reshape``, which would copy what is not contiguous: ``view`` refuses it.
        flat = parameter.view(-1).view(_INTEGERS[parameter.element_size()])
        bits: torch.Tensor = flat.narrow(0, self.first, self.size)
        return bits


def find(model: Any) -> dict[str, tuple[Place, ...]]:
    """All of them, each with the places that have to hold the same."""
    found: dict[str, tuple[Place, ...]] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            first = 0
            for name, rows in _parts(path, module, attribute, len(parameter)):
                size = rows * parameter[0].numel()
                found[name] = (Place(module, attribute, first, size),)
                first += size
    if getattr(model.config, "tie_word_embeddings", False) and _HEAD in found:
        found[_EMBEDDING] += found.pop(_HEAD)
    return found


def _parts(path: str, module: Any, attribute: str, rows: int) -> Iterator[tuple[str, int]]:
    """Names of the tensors in a parameter, and how many rows each has."""
    owner, _, layer = path.rpartition(".")
    if layer == "qkv_proj" and hasattr(module, "q_proj_shard_size"):
        yield f"{owner}.q_proj.{attribute}", module.q_proj_shard_size
        yield f"{owner}.k_proj.{attribute}", module.kv_proj_shard_size
        yield f"{owner}.v_proj.{attribute}", module.kv_proj_shard_size
    elif layer == "gate_up_proj" and hasattr(module, "output_partition_sizes"):
        gate, up = module.output_partition_sizes
        yield f"{owner}.gate_proj.{attribute}", gate
        yield f"{owner}.up_proj.{attribute}", up
    elif attribute in _OF_EXPERTS:
        yield f"{path}.{_OF_EXPERTS[attribute]}", rows
    else:
        yield f"{path}.{attribute}", getattr(module, "org_vocab_size", rows)
