"""What a tensor is, apart from its bits."""

from __future__ import annotations

import math

import msgspec


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor's type and shape; ``dtype`` by its common name, ``bfloat16`` say."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)
