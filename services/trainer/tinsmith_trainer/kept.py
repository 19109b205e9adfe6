"""What autograd keeps of a pass for its way back."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@contextmanager
def kept_storages() -> Iterator[dict[int, int]]:
    """Bytes of each storage that is kept of what is computed meanwhile, by its address."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        # Not the tensor itself: the graph would then hold itself, and never be freed.
        return tensor.detach()

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
