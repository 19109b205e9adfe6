"""A tenant's whole state as the next owner finds it: named tensors in chunks, as in a lineage.

    trainer_state.json         as of a checkpoint (``training_files``), with the tensors' root
    manifest-00001 and so on   what the chunks hold (``tinsmith.weights.body``)
    chunk-00001 and so on      the tensors, one after the other

The tensors are float32 and have the names of the layout's parts, moments with ``exp_avg.`` or
``exp_avg_sq.`` before them. Equal states give equal bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tinsmith.errors import InvalidRequest
from tinsmith.weights.body import decode_manifest
from tinsmith.weights.specs import TensorSpec
from tinsmith.weights.state import WeightState, WrongBits
from tinsmith.weights.wholes import WholeReader
from tinsmith_trainer.optim import Moments
from tinsmith_trainer.tensor_files import file
from tinsmith_trainer.trainable import Snapshot
from tinsmith_trainer.training_files import STATE, check_base, moment_tensors, read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.ops import LoraShape
    from tinsmith.weights.bits import Bits
    from tinsmith.weights.sending import Sent
    from tinsmith_trainer.layout import Layout
    from tinsmith_trainer.training_files import TrainerState

MANIFEST, CHUNK = "manifest", "chunk"

_ALL = "the saved state is not whole"


def state_of(snapshot: Snapshot) -> WeightState:
    """All tensors of ``snapshot``, digested; views of it, not copies."""
    views = _tensors(snapshot)
    return WeightState(_specs(views), _bits(views))


def parts(about: BlobRef, sent: Sent) -> dict[str, BlobRef]:
    """What a log says of it; ``about`` is its ``trainer_state.json``."""
    manifest = zip(_names(MANIFEST), sent.manifest, strict=False)
    chunks = zip(_names(CHUNK), sent.chunks, strict=False)
    return {STATE: about} | dict(manifest) | dict(chunks)


def holds(files: Iterable[str]) -> bool:
    """Whether files of these names are a saved state; else they are a checkpoint's."""
    return next(_names(MANIFEST)) in files


def blank(
    state: TrainerState,
    lora: LoraShape,
    layout: Layout,
    config: Mapping[str, object] | None = None,
) -> Snapshot:
    """Of the shape that ``state`` tells, its tensors still to be read."""
    weights = torch.empty(layout.size)
    moments = Moments.fresh(state.optimizer, weights, layout)
    moments.steps = state.steps
    return Snapshot(state.base_model, lora, layout, weights, moments, config)


def read(
    files: Mapping[str, bytes], *, base_model: str, blank: Callable[[TrainerState], Snapshot]
) -> Snapshot:
    """What ``files`` hold, proven, in the arrays of ``blank``.

    Chunks are dropped from ``files``, if it is a dict, as they are read: they would be a second
    copy of it all.

    Raises:
        InvalidRequest: something is missing, damaged, or of another base model or shape.
    """
    state = read_state(files)
    check_base(state, base_model)
    snapshot = blank(state)
    views = _tensors(snapshot)
    pieces = [name for name, _ in zip(_names(MANIFEST), files, strict=False) if name in files]
    manifest = decode_manifest([files[name] for name in pieces])
    if odd := manifest.specs.items() ^ _specs(views).items():
        raise InvalidRequest(
            f"{MANIFEST}: {min(name for name, _ in odd)} is missing, or another tensor than this "
            "base model and the state's shape make it"
        )
    try:
        reader = WholeReader(manifest, _bits(views))
        for _, name in zip(manifest.chunks, _names(CHUNK), strict=False):
            data = file(files, name, _ALL)
            if isinstance(files, dict):
                del files[name]
            reader.feed(data)
        reader.finish(state.root)
    except WrongBits as exc:
        raise InvalidRequest(f"{_ALL}: {exc}") from exc
    for name, view in views.items():
        if not torch.isfinite(view).all():
            raise InvalidRequest(f"{name} holds numbers that are not finite")
    return snapshot


def _names(kind: str) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"{kind}-{number:05}"


def _tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    layout = snapshot.layout
    names = {part.name: part.name for part in layout.parts}
    return layout.named(snapshot.weights) | moment_tensors(layout, snapshot.optimizer, names)


def _specs(views: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec("float32", tuple(view.shape)) for name, view in views.items()}


def _bits(views: Mapping[str, Tensor]) -> dict[str, Bits]:
    """Views of them, flat."""
    return {name: view.numpy().reshape(-1).view(np.uint32) for name, view in views.items()}
