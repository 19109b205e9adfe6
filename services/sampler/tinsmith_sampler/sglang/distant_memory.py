"""The memory of an SGLang server of ours, as a receiver writes it and has it proven.

What changes lies in a file beside the server before the pause, and the server's loader
(``boot/weights.py``) has read and summed it; in the pause it writes it and reads it back. What it
found is asked for on a socket of its own, and so are digests, while the server answers requests.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from tinsmith.errors import StorageFull
from tinsmith.weights.digest import part, salt
from tinsmith.weights.state import WrongBits
from tinsmith_sampler.sglang.failures import SglangError, SglangGone
from tinsmith_sampler.sglang.launching import LOADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from tinsmith.weights.held import Write
    from tinsmith_sampler.sglang.client import SglangClient

SOCKET = "weights.sock"
_WORD = 8  # bytes
_ASK_S = 600.0  # all of a large embedding is digested beside the service


class Opened(NamedTuple):
    """The weights of one start of a server."""

    client: SglangClient
    folder: Path
    sizes: dict[str, int]  # elements


async def opened(client: SglangClient) -> Opened:
    """Have the server's loader open its socket; SglangError when it cannot serve so."""
    folder = client.folder
    if folder is None:
        raise SglangGone("it is no server of ours, and its memory cannot be reached")
    await _load(client, "")
    told = await asyncio.to_thread(_asked, folder, {"ask": "arrays"})
    if told["ranks"] != 1:
        raise SglangGone(f"it computes on {told['ranks']} ranks; whole models take one")
    return Opened(client, folder, told["arrays"])


class _Staged(NamedTuple):
    there: Opened
    file: str  # its name
    sums: dict[str, int]  # what each tensor that is written must add to its digest then


class ServerMemory:
    """``tinsmith.weights.memory.StagedMemory`` of the server that an engine has now."""

    def __init__(
        self,
        first: Opened,
        current: Callable[[], Awaitable[Opened]],
        written: Callable[[SglangClient], None],
        pause: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        """``current`` finds the server of the moment; ``written`` is told whose memory is proven.

        All four belong to the loop in which this is made.
        """
        self._sizes = first.sizes
        self._current = current
        self._written = written
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._staged: _Staged | None = None
        self.pause = pause
        """While it is entered, nothing is computed and no answer leaves."""

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._sizes)

    def stage(self, writes: Sequence[Write], digests: Mapping[str, int]) -> None:
        """Put them into a file beside the server, and have its loader read and sum them."""
        self._staged = None
        there: Opened = self._wait(self._current())
        self._count += 1
        file = there.folder / f"change-{self._count}"
        sums = {write.name: _sum(write, digests) for write in writes}
        try:
            _write_file(file, writes)
            told = _asked(there.folder, {"ask": "stage", "file": file.name})
        except OSError as exc:
            raise StorageFull(
                f"the change cannot be written to {there.folder}: {exc.strerror}; free space there"
            ) from exc
        except SglangError as exc:
            raise WrongBits(f"the server did not stage {file.name}: {exc}") from exc
        finally:
            file.unlink(missing_ok=True)  # the server has what it needs of it
        _prove(sums, told["sums"], "is not what was staged for it")
        self._staged = _Staged(there, file.name, sums)

    def swap(self) -> None:
        """Have the server write it, and prove each element that was written."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise WrongBits("nothing is staged")
        there, name, wanted = staged
        try:
            self._wait(_load(there.client, name))
            told = _asked(there.folder, {"ask": "taken"})
        except SglangError as exc:
            raise WrongBits(f"the server failed while its weights were written: {exc}") from exc
        if told.get("file") != name or "sums" not in told:
            raise WrongBits(f"the server did not take {name}: {told.get('error', told)}")
        _prove(wanted, told["sums"], "does not hold what was written to it")
        self._loop.call_soon_threadsafe(self._written, there.client)

    def digest(self, name: str) -> int:
        """Of the whole tensor; WrongBits where tied tensors differ, or when the server is gone."""
        there = self._wait(self._current())
        try:
            told = _asked(there.folder, {"ask": "digest", "name": name, "salt": salt(name)})
        except SglangError as exc:
            raise WrongBits(f"the server does not tell what {name!r} holds: {exc}") from exc
        first, *others = told["digests"]
        if any(other != first for other in others):
            raise WrongBits(f"the engine's {name!r} is tied, and its places hold different bits")
        return int(first)

    def _wait(self, work: Awaitable[Any]) -> Any:  # noqa: ANN401 - what the work gives
        async def awaited() -> Any:  # noqa: ANN401
            return await work

        try:
            return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()
        except SglangError as exc:
            raise WrongBits(f"the server cannot be reached: {exc}") from exc


async def _load(client: SglangClient, name: str) -> None:
    """One update of the weights with the file of that name; none: nothing changes."""
    tensor = torch.tensor(list(name.encode()), dtype=torch.uint8)
    await client.begin_update()
    try:
        await client.update_tensors([("change", tensor)], load_format=LOADER)
    finally:
        await client.end_update()


def _asked(folder: Path, question: dict[str, Any]) -> dict[str, Any]:
    """One question, one answer; SglangGone when there is none."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(_ASK_S)
            line.connect(str(folder / SOCKET))
            line.sendall(msgspec.json.encode(question) + b"\n")
            with line.makefile("rb") as answer:
                told: dict[str, Any] = msgspec.json.decode(answer.readline(), type=dict)
    except (OSError, msgspec.MsgspecError) as exc:
        raise SglangGone(f"its memory does not answer: {exc}") from exc
    if "error" in told and question["ask"] != "taken":
        raise SglangGone(f"its memory cannot be looked at: {told['error']}")
    return told


def _prove(wanted: Mapping[str, int], told: Sequence[Sequence[int]], problem: str) -> None:
    """Compare the sums of each tensor at each of its places."""
    for (name, one), sums in zip(wanted.items(), told, strict=True):
        if not sums or any(found != one for found in sums):
            raise WrongBits(f"the engine's {name!r} {problem}")


def _sum(write: Write, digests: Mapping[str, int]) -> int:
    """The part of the digest that what is written adds to it."""
    if write.indices is None:
        return digests[write.name]
    return part(write.name, write.indices, write.values)


def _write_file(file: Path, writes: Sequence[Write]) -> None:
    """See ``boot/staged.py``: the arrays lie behind the header, which says where."""
    arrays: list[NDArray[Any]] = []
    header, end = [], 0
    for write in writes:
        told: dict[str, Any] = {"name": write.name, "salt": salt(write.name)}
        told |= {"width": write.values.itemsize, "count": write.values.size}
        header.append(told | {"values": end, "indices": None})
        arrays.append(np.ascontiguousarray(write.values))
        end += _aligned(write.values.nbytes)
        if write.indices is not None:
            header[-1]["indices"] = end
            arrays.append(np.ascontiguousarray(write.indices))
            end += _aligned(write.indices.nbytes)
    text = msgspec.json.encode(header)
    with file.open("xb") as out:
        out.write(len(text).to_bytes(_WORD, "little") + text)
        out.write(bytes(_aligned(out.tell()) - out.tell()))
        for array in arrays:
            out.write(array.data)
            out.write(bytes(_aligned(array.nbytes) - array.nbytes))


def _aligned(size: int) -> int:
    return -(-size // _WORD) * _WORD
