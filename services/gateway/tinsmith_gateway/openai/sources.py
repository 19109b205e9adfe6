"""What the model name of a request stands for: a base model, or weights saved for sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinsmith.adapters import adapter_ref
from tinsmith.errors import NotFound

if TYPE_CHECKING:
    from tinsmith.messages.registry import ServedModel
    from tinsmith.messages.sampling import AdapterRef
    from tinsmith_gateway.gateway import Gateway

PATH_SCHEME = "tinker://"


class Source(NamedTuple):
    """What to sample from."""

    name: str  # as the client wrote it
    base_model: str  # as services know it
    served: ServedModel
    path: str | None = None
    adapter: AdapterRef | None = None


async def source_of(gateway: Gateway, owner: str, name: str) -> Source:
    """NotFound when there is no such model, or none that ``owner`` may use."""
    if not name.startswith(PATH_SCHEME):
        return _base(gateway, name, name)
    checkpoint = await gateway.registry.checkpoint_of_kind(
        owner, name, "sampler_weights", "sampling"
    )
    base = _base(gateway, name, checkpoint.base_model)
    return base._replace(path=name, adapter=adapter_ref(checkpoint))


def base_models(gateway: Gateway) -> list[str]:
    """The names of the base models that can be sampled from."""
    return sorted({model.name for model in gateway.registry.served if model.role == "sampler"})


def _base(gateway: Gateway, name: str, base_model: str) -> Source:
    served = gateway.models.get(base_model, "sampler")
    if served is None:
        there_are = ", ".join(map(repr, base_models(gateway))) or "none: no sampler has started yet"
        raise NotFound(
            f"model: {name[:200]!r} is not served for sampling; served are {there_are}, and "
            "tinker:// paths of weights that save_weights_for_sampler has saved"
        )
    return Source(name, gateway.models.resolve_sampled(base_model), served)
