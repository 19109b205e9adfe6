"""Names of models that are trained whole, every weight of them, and of the files that hold them.

A base model ``x`` is trained whole under the name ``x:full``. A checkpoint of that is a model in
Hugging Face format: its configuration, and safetensors in one piece or several with an index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SUFFIX = ":full"

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"


def name_of(base_model: str) -> str:
    """What ``base_model`` is called where it is trained whole."""
    return base_model + SUFFIX


def is_whole(name: str) -> bool:
    """Whether a model of this name has all of its weights trained."""
    return name.endswith(SUFFIX)


def base_of(name: str) -> str:
    """The base model behind ``name``, which may be that name already."""
    return name.removesuffix(SUFFIX)


def weight_files(names: Iterable[str]) -> tuple[str, ...]:
    """Which of a checkpoint's files make the model, in order: what a sampler needs."""
    weights = {name for name in names if name.startswith("model") and ".safetensors" in name}
    return (CONFIG_FILE, *sorted(weights))


def holds_whole(names: Iterable[str]) -> bool:
    """Whether files of these names are those of a whole model, not of an adapter."""
    return CONFIG_FILE in names
