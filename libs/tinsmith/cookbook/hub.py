"""Where recipes load data sets: the hub and its cache, or a stand-in where there is neither."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
from huggingface_hub import constants

from tinsmith.cookbook.standins import STAND_INS

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


def prepare() -> None:
    """Give ``datasets.load_dataset`` its stand-ins, unless the hub is to be used."""
    if constants.HF_HUB_OFFLINE:
        datasets.load_dataset = partial(_load, datasets.load_dataset)


def _load(real: Callable[..., Any], path: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
    """A cached data set, or else its stand-in; the hub's error when there is none."""
    try:
        return real(path, *args, **options)
    except (ConnectionError, FileNotFoundError):
        if path not in STAND_INS:
            raise
    made = {split: datasets.Dataset.from_list(rows) for split, rows in STAND_INS[path]().items()}
    sizes = ", ".join(f"{len(rows)} rows of {split}" for split, rows in made.items())
    _log.warning("%s is not in the cache and the hub is off: a stand-in, %s", path, sizes)
    split = options.get("split")
    if split is None:
        return datasets.DatasetDict(made)
    if split not in made:
        raise ValueError(
            f"split: the stand-in of {path} has no {split!r}; it has {', '.join(made)}"
        )
    return made[split]
