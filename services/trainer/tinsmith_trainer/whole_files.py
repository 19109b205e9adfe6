"""Whole models as files: Hugging Face's format, and beside it what training needs to go on.

    config.json                              the model's configuration
    model.safetensors                        all weights, float32, tied ones once
    model-00001-of-00003.safetensors, ...    or in pieces,
    model.safetensors.index.json             with an index

and of a training checkpoint also the files of ``training_files``. Equal states give equal bytes.
With a tokenizer beside them, ``from_pretrained`` reads them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from tinsmith import whole
from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import WHOLE
from tinsmith_trainer.optim import Moments
from tinsmith_trainer.tensor_files import as_json, fill, pack, unpack
from tinsmith_trainer.trainable import Snapshot
from tinsmith_trainer.training_files import (
    NO_OPTIMIZER,
    OPTIMIZER,
    STATE,
    check_base,
    moment_tensors,
    read_state,
    state_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tinsmith.messages.ops import OptimizerFamily
    from tinsmith_trainer.layout import Layout

WEIGHTS = "model.safetensors"

PIECE_BYTES = 512 << 20
"""About the largest piece: what a save needs of memory beside the copy of the state."""

_WHOLE_ONLY = "a model that is trained whole is read from a checkpoint of one"
_WHOSE = "the checkpoint"


class WholeFiles(Mapping[str, bytes]):
    """A checkpoint's files, each made when it is read and not kept."""

    def __init__(self, snapshot: Snapshot, *, with_optimizer: bool) -> None:
        layout = snapshot.layout
        config = as_json(dict(snapshot.config or {}))
        self._made: dict[str, Callable[[], bytes]] = {whole.CONFIG_FILE: lambda: config}
        pieces = _pieces(WEIGHTS, layout.named(snapshot.weights))
        if len(pieces) > 1:
            index = as_json(_index(pieces, layout))
            self._made[whole.INDEX_FILE] = lambda: index
        if with_optimizer:
            state = state_file(snapshot)
            self._made[STATE] = lambda: state
            names = {part.name: part.name for part in layout.parts}
            pieces |= _pieces(OPTIMIZER, moment_tensors(layout, snapshot.optimizer, names))
        for name, tensors in pieces.items():
            self._made[name] = _packing(tensors)

    def __getitem__(self, name: str) -> bytes:
        return self._made[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def _packing(tensors: Mapping[str, Tensor]) -> Callable[[], bytes]:
    return lambda: pack(tensors)


def _pieces(name: str, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors in one file or several, in their order; a piece has at least one tensor."""
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        size += tensor.nbytes
        if pieces[-1] and size > PIECE_BYTES:
            pieces.append({})
            size = tensor.nbytes
        pieces[-1][key] = tensor
    if len(pieces) == 1:
        return {name: pieces[0]}
    stem = name.removesuffix(".safetensors")
    return {
        f"{stem}-{n:05}-of-{len(pieces):05}.safetensors": piece
        for n, piece in enumerate(pieces, start=1)
    }


def _index(pieces: Mapping[str, Mapping[str, Tensor]], layout: Layout) -> dict[str, object]:
    where = {tensor: name for name, piece in pieces.items() for tensor in piece}
    return {"metadata": {"total_size": 4 * layout.size}, "weight_map": where}


def from_files(
    files: Mapping[str, bytes],
    *,
    base_model: str,
    layout: Layout,
    config: Mapping[str, object],
    with_optimizer: bool,
    optimizer: OptimizerFamily = "adamw",
) -> Snapshot:
    """What ``files`` hold, checked against the model that is to become it.

    Without ``with_optimizer`` the moments are zero and no steps are counted: a fresh ``optimizer``.

    Raises:
        InvalidRequest: a file is missing, damaged, or of another model or an adapter.
    """
    state = read_state(files) if STATE in files else None
    if state is not None:
        check_base(state, base_model)
    weights = torch.zeros(layout.size)
    fill(layout.named(weights), _read(files, WEIGHTS, _WHOLE_ONLY), WEIGHTS, _WHOSE)
    if not with_optimizer:
        moments = Moments.fresh(optimizer, weights, layout)
    else:
        state = state or read_state(files)
        moments = Moments.fresh(state.optimizer, weights, layout)
        moments.steps = state.steps
        names = {part.name: part.name for part in layout.parts}
        tensors = _read(files, OPTIMIZER, NO_OPTIMIZER)
        fill(moment_tensors(layout, moments, names), tensors, OPTIMIZER, _WHOSE)
    return Snapshot(base_model, WHOLE, layout, weights, moments, config)


def _read(files: Mapping[str, bytes], name: str, remedy: str) -> dict[str, Tensor]:
    """The tensors of a file or of all its pieces."""
    stem = name.removesuffix("safetensors").removesuffix(".")
    pieces = sorted(one for one in files if one.startswith(f"{stem}-") and "-of-" in one)
    tensors: dict[str, Tensor] = {}
    for piece in pieces or [name]:
        found = unpack(files, piece, remedy)
        if tensors.keys() & found.keys():
            raise InvalidRequest(f"{piece}: it has tensors that another piece has too")
        tensors |= found
    return tensors
