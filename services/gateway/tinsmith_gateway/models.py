"""Base models: which are served, under which names, and within which limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinsmith import whole
from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from tinsmith.bus.views import View
    from tinsmith.messages.registry import ServedModel
    from tinsmith_gateway.liveness import Role

MAX_NAME = 500  # characters
_USES = {"trainer": "training", "sampler": "sampling"}


class Models:
    """The base models that trainers and samplers have announced."""

    def __init__(self, served: View[ServedModel]) -> None:
        self._served = served

    def resolve(self, name: str) -> str:
        """The name that services know: without the variant after a colon, as in ``x:peft:4096``.

        ``x:full`` is a model of its own, and never means adapters on ``x``.
        """
        is_known = whole.is_whole(name) or self._served.group(name)
        return name if is_known else name.partition(":")[0]

    def resolve_sampled(self, name: str) -> str:
        """The name that samplers know: they serve ``x:full`` beside ``x``."""
        return self.resolve(whole.base_of(name))

    def get(self, name: str, role: Role) -> ServedModel | None:
        """What the services of ``role`` have announced about the model."""
        named = self.resolve_sampled(name) if role == "sampler" else self.resolve(name)
        served = [model for model in self._served.group(named) if model.role == role]
        return min(served, key=lambda model: model.pool, default=None)  # the default pool's first

    def require(self, name: str, role: Role) -> ServedModel:
        """As ``get``; InvalidRequest naming the models there are when there is none."""
        if len(name) <= MAX_NAME and (found := self.get(name, role)) is not None:
            return found
        names = sorted({model.name for model in self._served if model.role == role})
        there_are = ", ".join(map(repr, names)) or f"none: no {role} has started yet"
        raise InvalidRequest(
            f"base_model: {name[:200]!r} is not served for {_USES[role]}; served are {there_are}"
        )

    def describe(self, name: str) -> ServedModel | None:
        """The model in any role, a trainer's word first."""
        return self.get(name, "trainer") or self.get(name, "sampler")

    def capabilities(self) -> list[dict[str, Any]]:
        """``supported_models`` of get_server_capabilities."""
        return [self._capability(name) for name in sorted({m.name for m in self._served})]

    def _capability(self, name: str) -> dict[str, Any]:
        trained, sampled = self.get(name, "trainer"), self.get(name, "sampler")
        served = [model for model in (trained, sampled) if model is not None]
        return {
            "model_name": name,
            "max_context_length": min(model.context_length for model in served),
            "trainable": trained is not None,
            "sampleable": sampled is not None,
        }
