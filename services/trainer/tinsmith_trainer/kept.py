"""What autograd keeps of a pass for its way back."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, UntypedStorage


@contextmanager
def kept_storages() -> Iterator[dict[int, int]]:
    """Bytes of each storage that is kept of what is computed meanwhile, by its address."""
    kept: dict[int, int] = {}
    storages: dict[int, UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        # Not the tensor itself: the graph would then hold itself, and never be freed.
        return tensor.detach()

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
    # Only now: weights that were gathered for a layer have been let go again since.
    kept.update((address, storage.nbytes()) for address, storage in storages.items())


def addresses(parameters: Iterable[Tensor]) -> set[int]:
    """Where they lie, as the keys of ``kept_storages``; those in shards are kept by nobody."""
    whole = (one for one in parameters if not hasattr(one, "device_mesh"))
    return {one.untyped_storage().data_ptr() for one in whole}
