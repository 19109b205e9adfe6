"""The bits of a whole model as its lineage has them: what its passes compute with, not the masters.

Where a model computes in bfloat16 they are its masters rounded to nearest, ties to even, which is
how the model itself gets them. Equal masters give an equal root on any machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinsmith.weights.specs import TensorSpec
from tinsmith.weights.state import WeightState, bits_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.weights.bits import Bits
    from tinsmith_trainer.trainable import Snapshot


def specs(snapshot: Snapshot) -> dict[str, TensorSpec]:
    """What its tensors are, by the names of the checkpoint's files."""
    dtypes = _dtypes(snapshot)
    return {part.name: TensorSpec(dtypes[part.name], part.shape) for part in snapshot.layout.parts}


def bits(snapshot: Snapshot) -> dict[str, Bits]:
    """Its tensors, flat: views of the snapshot where they are float32, else rounded copies."""
    dtypes, found = _dtypes(snapshot), {}
    for name, view in snapshot.layout.named(snapshot.weights).items():
        values = view.numpy().reshape(-1)
        found[name] = values.view(np.uint32) if dtypes[name] == "float32" else bits_of(values)
    return found


def root(snapshot: Snapshot) -> str:
    """The root by which every machine knows these bits."""
    return WeightState(specs(snapshot), bits(snapshot)).root


def size_bytes(snapshot: Snapshot) -> int:
    """Of all tensors."""
    dtypes = _dtypes(snapshot)
    return sum(
        part.size * (4 if dtypes[part.name] == "float32" else 2) for part in snapshot.layout.parts
    )


def _dtypes(snapshot: Snapshot) -> Mapping[str, str]:
    if snapshot.dtypes is None:
        msg = f"a snapshot of {snapshot.base_model} is none of a model that is trained whole"
        raise TypeError(msg)
    return snapshot.dtypes
