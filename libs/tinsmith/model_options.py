"""What a ``[[models]]`` entry sets of the services that serve it: ``models.trainer.threads = 8``.

A trainer or sampler serves one model. The options of that model's entry stand in for those of
``[trainer]`` or ``[sampler]``; an environment variable stands above both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith import whole
from tinsmith.config_decode import Given, decode_section
from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.metadata import EntryPoint

    from tinsmith.config import ModelConfig

SERVICES = ("trainer", "sampler")

Tree = dict[str, dict[str, Given]]


def apply(
    tree: Tree, models: Sequence[ModelConfig], found: Mapping[str, EntryPoint], origin: str
) -> None:
    """Put the options of the served models into ``tree``, the sections as they were given.

    Every model's options are checked, served here or not; ConfigError on the first mistake.
    """
    for service in SERVICES:
        if service not in found or not any(_options(model, service) for model in models):
            continue
        section = found[service].load()
        for n, model in enumerate(models):
            options = {key: Given(v, origin) for key, v in _options(model, service).items()}
            key = f"models[{n}].{service}"
            if "model" in options:
                raise ConfigError(
                    f"{origin}: {key}.model: an entry's options are for its own model; set "
                    f"{service}.model instead"
                )
            decode_section(section, options, key)
            if model is _served(tree.get(service, {}), models):
                tree[service] = _merged(tree.get(service, {}), options)


def _options(model: ModelConfig, service: str) -> dict[str, object]:
    options: dict[str, object] = getattr(model, service)
    return options


def _served(given: Mapping[str, Given], models: Sequence[ModelConfig]) -> ModelConfig | None:
    """As ``Config.model`` chooses it; that a name is unknown is said there."""
    name = whole.base_of(str(given["model"].value)) if "model" in given else ""
    return next((model for model in models if name in (model.name, "")), None)


def _merged(given: Mapping[str, Given], options: Mapping[str, Given]) -> dict[str, Given]:
    from_environment = {key: one for key, one in given.items() if one.is_text}
    return {**given, **options, **from_environment}
