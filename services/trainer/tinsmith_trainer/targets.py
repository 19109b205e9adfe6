"""Which matrices of a model can be adapted: attention, MLP (or experts), and the unembedding.

The choice is that of the hosted service: ``train_attn`` is q, k, v and o of every layer,
``train_mlp`` gate, up and down of every layer or of every expert (the router stays frozen), and
``train_unembed`` the output layer alone, whether or not it shares its weight with the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from tinsmith.errors import StartupError
from tinsmith_trainer import experts
from tinsmith_trainer.lora import LoraLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from tinsmith.messages.ops import LoraShape
    from tinsmith_trainer.lora import ActiveAdapter

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix that can be adapted: its name in the causal model, and its size."""

    name: str
    in_features: int
    out_features: int
    experts: int = 0
    """How many matrices of this size a parameter of experts holds; 0 for a linear layer."""
    is_unembedding: bool = False

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Targets:
    """Every matrix that can be adapted, in the order that fixes initialisation and layout."""

    attn: tuple[Target, ...]
    mlp: tuple[Target, ...]
    unembed: Target

    def of(self, shape: LoraShape) -> tuple[Target, ...]:
        """The matrices that an adapter of this shape adapts."""
        return (
            *(self.attn if shape.train_attn else ()),
            *(self.mlp if shape.train_mlp else ()),
            *((self.unembed,) if shape.train_unembed else ()),
        )


def inject(model: PreTrainedModel, active: ActiveAdapter) -> Targets:
    """Replace the attention and MLP matrices of ``model`` by layers that take adapters.

    The unembedding stays as it is: its product is formed by ``head``, on the output side only,
    so tied input embeddings never change.

    Raises:
        StartupError: a layer lacks one of the matrices, as in architectures that fuse them.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    modules = dict(model.named_modules())
    unembed = next(name for name, module in modules.items() if module is head)
    groups: dict[tuple[str, ...], list[Target]] = {ATTENTION: [], MLP: []}
    for name, module in modules.items():
        leaf = name.rpartition(".")[2]
        for suffixes, group in groups.items():
            if isinstance(module, nn.Linear) and leaf in suffixes:
                group.append(_linear(name, module))
                model.set_submodule(name, LoraLinear(name, module, active))
        if experts.is_experts(module):
            adapted = experts.LoraExperts(name, module, active)
            groups[MLP].extend(_experts(adapted))
            model.set_submodule(name, adapted)
    _check_complete(model, groups)
    output = replace(_linear(unembed, head), is_unembedding=True)
    return Targets(tuple(groups[ATTENTION]), tuple(groups[MLP]), output)


def _check_complete(model: PreTrainedModel, groups: dict[tuple[str, ...], list[Target]]) -> None:
    """Every decoder layer has each matrix of a group, or its experts do."""
    layers = model.config.get_text_config().num_hidden_layers
    for suffixes, group in groups.items():
        sparse = sum(target.experts > 0 and target.leaf == experts.DOWN for target in group)
        for suffix in suffixes:
            found = sum(target.leaf == suffix and not target.experts for target in group)
            if found + sparse != layers:
                raise StartupError(
                    f"model: {type(model).__name__} is not an architecture that adapters are "
                    f"known for: its {layers} layers have {found} linear modules called {suffix}; "
                    "serve a model of one of the families in docs/models.md"
                )


def _linear(name: str, module: nn.Module) -> Target:
    if not isinstance(module, nn.Linear):
        raise StartupError(f"model: {name} is a {type(module).__name__}, not a linear layer")
    return Target(name, module.in_features, module.out_features)


def _experts(adapted: experts.LoraExperts) -> Iterator[Target]:
    for matrix in (experts.GATE_UP, experts.DOWN):
        count, out_features, in_features = adapted.bank(matrix).size
        yield Target(f"{adapted.name}.{matrix}", in_features, out_features, count)
