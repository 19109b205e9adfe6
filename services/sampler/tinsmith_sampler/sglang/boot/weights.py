"""The weight loader that SGLang is started with: changes of a model's weights, written in place.

A change is a file. It is staged, which is asked for on a socket beside it (``witness``), while the
server serves. A tensor that SGLang passes to the loader has but the file's name; what was written,
and digests of the memory, are told by the socket. The loader never fails, since an error in it
would end the server: what is wrong is told instead.
"""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import digesting, places, staged, witness
from .prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER_VARIABLE = "TINSMITH_SGLANG_FOLDER"


def apply(model: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write the changes that were staged from the files named; the tensors' names are nothing.

    A tensor is uint8 [n], the file's name in the folder; an empty one only opens the socket.
    """
    global _weights  # noqa: PLW0603 - SGLang knows a function, and one process has one model
    folder = Path(os.environ[FOLDER_VARIABLE])
    if _weights is None:
        _weights = Weights(model)
        witness.start(folder, partial(_weights.answer, folder))
        # On a CPU SGLang collects garbage whenever it drops its cache, which is in each pause. What
        # a start has made stays, and to look through all of it takes longer than the writing.
        gc.freeze()
    for _, tensor in named:
        if name := bytes(tensor.tolist()).decode(errors="replace"):
            _weights.take(name)


class Weights:
    """Those of the model in this process."""

    def __init__(self, model: Any) -> None:
        self._places = places.find(model)
        self._ranks = torch.distributed.get_world_size()
        self._prepared: tuple[str, Prepared] | None = None  # of the file that was staged last
        self._taken: dict[str, Any] = {}  # of the file that was taken last

    def take(self, name: str) -> None:
        """Write what was staged from a file."""
        staged, self._prepared = self._prepared, None
        try:
            if staged is None or staged[0] != name:
                self._taken = {"file": name, "error": "it was not staged"}
                return
            with torch.inference_mode():
                self._taken = {"file": name, "sums": staged[1].write()}
        except Exception as exc:  # noqa: BLE001 - see the module
            self._taken = {"file": name, "error": f"{type(exc).__name__}: {exc}"}

    def answer(self, folder: Path, question: dict[str, Any]) -> dict[str, Any]:
        """See ``witness``."""
        match question["ask"]:
            case "taken":
                return self._taken
            case "arrays":
                sizes = {name: places[0].size for name, places in self._places.items()}
                return {"ranks": self._ranks, "arrays": sizes}
            case "stage":
                return {"sums": self._stage(folder, question["file"])}
            case _:
                return {"digests": self._digests(question["name"], question["salt"])}

    def _stage(self, folder: Path, name: str) -> list[list[int]]:
        """Read a file, so that it can be taken."""
        self._prepared = None
        with torch.inference_mode():
            prepared = Prepared(staged.read(folder / Path(name).name), self._places)
            sums = prepared.staged()
        self._prepared = name, prepared
        return sums

    def _digests(self, name: str, salt: int) -> list[int]:
        with torch.inference_mode():
            return [digesting.digest(place.bits(), salt) for place in self._places[name]]


_weights: Weights | None = None
