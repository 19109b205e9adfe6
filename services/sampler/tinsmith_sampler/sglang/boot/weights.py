"""The weight loader that SGLang is started with: changes of a model's weights, written in place.

A tensor that SGLang passes to it has but the name of a file; what was written, and digests of the
memory, are told by a socket beside that file (``witness``). The loader never fails, since an error
in it would end the server: what is wrong is told instead, and nothing was written then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import digesting, places, staged, witness

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .places import Place
    from .staged import Part

FOLDER_VARIABLE = "TINSMITH_SGLANG_FOLDER"


def apply(model: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Take the changes in the files that are named; what the names of the tensors are is nothing.

    A tensor is uint8 [n], the file's name in the folder; an empty one only opens the socket.
    """
    global _weights  # noqa: PLW0603 - SGLang knows a function, and one process has one model
    folder = Path(os.environ[FOLDER_VARIABLE])
    if _weights is None:
        _weights = Weights(model)
        witness.start(folder, _weights.answer)
    for _, tensor in named:
        if name := bytes(tensor.tolist()).decode(errors="replace"):
            _weights.take(folder, name)


class Weights:
    """Those of the model in this process."""

    def __init__(self, model: Any) -> None:
        self._places = places.find(model)
        self._ranks = torch.distributed.get_world_size()
        self._taken: dict[str, Any] = {}  # of the file that was taken last

    def take(self, folder: Path, name: str) -> None:
        """Write what a file says."""
        try:
            parts = staged.read(folder / Path(name).name)
            with torch.inference_mode():
                for part in parts:
                    self._check(part)
                found = [self._write(part) for part in parts]
        except Exception as exc:  # noqa: BLE001 - see the module
            self._taken = {"file": name, "error": f"{type(exc).__name__}: {exc}"}
        else:
            self._taken = {"file": name, "sums": found}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """See ``witness``."""
        if question["ask"] == "taken":
            return self._taken
        if question["ask"] == "arrays":
            sizes = {name: places[0].size for name, places in self._places.items()}
            return {"ranks": self._ranks, "arrays": sizes}
        with torch.inference_mode():
            each = [
                digesting.digest(place.bits(), question["salt"])
                for place in self._places[question["name"]]
            ]
        return {"digests": each}

    def _check(self, part: Part) -> None:
        for place in self._found(part.name):
            bits, values, indices = place.bits(), part.values, part.indices
            if bits.dtype != values.dtype:
                msg = f"{part.name} has {bits.dtype} here, {values.dtype} in the change"
                raise ValueError(msg)
            if indices is None and len(values) != place.size:
                msg = f"{part.name} has {place.size} elements here, {len(values)} in the change"
                raise ValueError(msg)
            if indices is not None and len(indices):
                least, most = (int(one) for one in indices.aminmax())
                if least < 0 or most >= place.size:
                    msg = f"{part.name} has {place.size} elements, the change {least} to {most}"
                    raise ValueError(msg)

    def _write(self, part: Part) -> list[int]:
        """The digests of what was written, read back from each place."""
        return [_written(place, part) for place in self._found(part.name)]

    def _found(self, name: str) -> tuple[Place, ...]:
        if name not in self._places:
            msg = f"there is no {name} here"
            raise ValueError(msg)
        return self._places[name]


def _written(place: Place, part: Part) -> int:
    bits = place.bits()
    values = part.values.to(bits.device)
    if part.indices is None:
        bits.copy_(values)
        return digesting.digest(bits, part.salt)
    at = part.indices.to(bits.device)
    bits[at] = values
    return digesting.digest_at(at, bits[at], part.salt)


_weights: Weights | None = None
