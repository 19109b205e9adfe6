"""Weights as bits: what changed between two versions, coded small, and digests that prove it.

The codec is numpy alone; ``publisher`` and ``receiver`` work on the bus: ``docs/weights.md``.
Tensors are flat arrays of unsigned integers (``uint8``, ``uint16``, ``uint32``): the bit patterns
of the values, in the order of the checkpoint.
"""

from __future__ import annotations

from tinsmith.weights.change import Change, Kind, apply, between, fold, invert
from tinsmith.weights.digest import TensorEntry, digest, root, updated
from tinsmith.weights.streams import DamagedStream

__all__ = [
    "Change",
    "DamagedStream",
    "Kind",
    "TensorEntry",
    "apply",
    "between",
    "digest",
    "fold",
    "invert",
    "root",
    "updated",
]
