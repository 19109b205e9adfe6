"""Where logs are read from: the interface, and choosing what is behind it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tinsmith.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tinsmith.config import Config
    from tinsmith.logbook.anchors import Chain
    from tinsmith.logbook.entry import Entry
    from tinsmith.messages.anchors import PrunedLog
    from tinsmith.messages.base import BlobRef
    from tinsmith.sealing import Seal

SUFFIX = ".tslog"
SHOWN_CANDIDATES = 8


class Logbook(Protocol):
    """The logs of some runs, and the blobs that they refer to. Only for reading."""

    async def runs(self) -> list[str]:
        """The ids of the models that have a log, sorted."""

    async def pruned(self) -> dict[str, PrunedLog]:
        """What is left of the logs that a policy had taken away, by run; it may be under way."""

    async def length(self, model_id: str) -> int:
        """How many entries the model's log has now."""

    def entries(self, model_id: str) -> AsyncIterator[Entry]:
        """Every entry of the model in order, up to the present last.

        Raises:
            LogDamaged: the next entry cannot be read.
        """

    async def newest(self, model_id: str) -> list[Entry]:
        """The model's newest entry of each kind, oldest first, so that the last is the log's.

        Raises:
            LogDamaged: one of them cannot be read.
        """

    async def anchors(self, *, is_fresh: bool = False) -> Chain:
        """What was anchored of its runs, as it is when this is first asked, or now."""

    async def seal(self, model_id: str) -> Seal:
        """What the model's sealed ops and results are opened with; see ``Seal.why_closed``."""

    async def blob(self, ref: BlobRef) -> bytes:
        """The bytes that ``ref`` names, verified. BlobMissing when they are absent or damaged."""

    async def check_blob(self, ref: BlobRef) -> None:
        """As ``blob``, without handing out what may be large."""


@asynccontextmanager
async def open_logbook(source: str | None, config: Config) -> AsyncIterator[Logbook]:
    """The logbook in the file ``source``, or the running installation's.

    Raises:
        BrokerUnavailable: no broker answers.
        NotFound: there is no such file.
        LogDamaged: the file's first bytes are not those of an exported log.
    """
    if source is not None:
        from tinsmith.logbook.file import FileLogbook

        with FileLogbook.open(Path(source)) as book:
            yield book
    else:
        from tinsmith.logbook.installation import connect

        async with connect(config, name="logbook") as (bus, blobs):
            from tinsmith.logbook.broker import BrokerLogbook
            from tinsmith.sealing import Seals

            yield BrokerLogbook(bus, blobs, Seals(bus, config))


@asynccontextmanager
async def open_run(text: str, config: Config) -> AsyncIterator[tuple[Logbook, str]]:
    """The run that ``text`` on a command line means, and the logbook that has it.

    Raises:
        NotFound: there is no such run or file.
        InvalidRequest: several runs begin with ``text``.
        Gone: its log was pruned.
    """
    if is_file(text):
        async with open_logbook(text, config) as book:
            yield book, (await book.runs())[0]
    else:
        from tinsmith.logbook.pruned import present_run

        async with open_logbook(None, config) as book:
            yield book, present_run(await book.runs(), await book.pruned(), text)


def is_file(text: str) -> bool:
    """Whether ``text`` on a command line means a file rather than a run."""
    return text.endswith(SUFFIX) or "/" in text or Path(text).is_file()


def resolve_run(runs: Sequence[str], text: str) -> str:
    """The one of ``runs`` that is, or begins with, ``text``.

    Raises:
        NotFound: none does.
        InvalidRequest: several do.
    """
    if text in runs:
        return text
    found = [run for run in runs if run.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequest(f"run: {text!r} is short for {_listed(found)}; give more of it")
    there_are = f"there are {_listed(runs)}" if runs else "no run has a log"
    raise NotFound(f"run: no run begins with {text!r}; {there_are}")


def _listed(runs: Sequence[str]) -> str:
    more = len(runs) - SHOWN_CANDIDATES
    return ", ".join(runs[:SHOWN_CANDIDATES]) + (f" and {more} more" if more > 0 else "")
