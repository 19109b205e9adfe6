"""Whether a base model is at hand, known before anything slow is started."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith import paths
from tinsmith.cli.reach import unreachable
from tinsmith.config import DEFAULT_MODEL
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from tinsmith.config import ModelConfig


def check(model: ModelConfig) -> None:
    """StartupError when the model is neither on this machine nor to be had from the hub.

    Loading it would say so too, but only after minutes of retries.
    """
    paths.check_model(model.name, model.source)
    if Path(model.source).expanduser().is_dir():
        return
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{model.source.replace('/', '--')}"
    if any(folder.glob("snapshots/*/config.json")):
        return
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _no_hub(constants.ENDPOINT)
    if reason:
        raise StartupError(
            f"model {model.name!r}: {model.source} is not on this machine, and {reason}; set path "
            f"in [[models]] to a folder in Hugging Face format, or {_other_way(model)}"
        )


def _other_way(model: ModelConfig) -> str:
    return "run 'tinsmith demo', which fetches it" if model.name == DEFAULT_MODEL else "go online"


def _no_hub(endpoint: str) -> str:
    if urllib.request.getproxies():
        return ""  # only a whole request could tell, and a proxy may be slow
    return unreachable(endpoint, default_port=443)
