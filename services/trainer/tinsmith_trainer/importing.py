"""``tinsmith import``: an adapter from elsewhere, checked against its base and written anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith import model_files
from tinsmith_trainer import checkpoint_files
from tinsmith_trainer.skeleton import targets_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.config import ModelConfig
    from tinsmith.messages.ops import LoraShape


def main(files: Mapping[str, bytes], model: ModelConfig) -> tuple[dict[str, bytes], LoraShape]:
    """The files of the checkpoint that the adapter in ``files`` makes, and its shape.

    Raises:
        StartupError: the base is not there, or none that adapters are known for.
        InvalidRequest: the adapter is damaged, of another base, or of a shape that ours cannot be.
    """
    targets = targets_of(model_files.find(model.source))
    snapshot = checkpoint_files.from_files(
        files, base_model=model.name, targets=targets, with_optimizer=False
    )
    return dict(checkpoint_files.to_files(snapshot, with_optimizer=False)), snapshot.lora
