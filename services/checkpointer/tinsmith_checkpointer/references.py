"""Which parts are still needed: by checkpoints, by samplers, and by logs that may be repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tinsmith.bus.views import View
from tinsmith.errors import Forgotten, ServerError
from tinsmith.messages import ops, table
from tinsmith.messages.base import Message, decoder
from tinsmith.messages.sampling import SampleRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.bus import Bus
    from tinsmith.bus.facts import Fact
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.registry import Sampler
    from tinsmith.sealing import Seals


M = TypeVar("M", bound=Message)

_SAMPLES = decoder(SampleRecord)


class References:
    """Finds out on demand; of the logs it remembers what it has read, since they only grow.

    Logs need the states saved in them, what was loaded, and what samples were drawn from that
    were logged in full. What was saved under a name is needed only for as long as it has the name:
    a replay makes it anew.
    """

    def __init__(self, bus: Bus, seals: Seals) -> None:
        self._bus = bus
        self._seals = seals
        self._in_logs: set[str] = set()
        self._ops_read = 0
        self._states_read = 0
        self._samples_read = 0

    async def now(self) -> set[str]:
        """The digests of all parts that are needed at a moment after this call has begun.

        Raises:
            ServerError: something could not be read, so that nothing can be said.
        """
        await self._read_logs()
        await self._read_samples()
        return self._in_logs | await self._of_checkpoints() | await self._of_samplers()

    async def _of_checkpoints(self) -> set[str]:
        checkpoints: View[Checkpoint] = View(self._bus.table(table.CHECKPOINTS), lambda _: "")
        return {d for entry in await _entries(checkpoints) for d in _digests(entry.parts.values())}

    async def _of_samplers(self) -> set[str]:
        samplers: View[Sampler] = View(self._bus.table(table.SAMPLERS), lambda _: "")
        adapters = [entry.adapter for entry in await _entries(samplers)]
        return {d for a in adapters if a is not None for d in _digests(a.files.values())}

    async def _read_logs(self) -> None:
        facts = self._bus.facts
        async for fact in facts.of_log(first=self._ops_read + 1):
            self._in_logs |= await self._loaded(fact)
            self._ops_read = fact.stream_seq
        async for stream_seq, saved in facts.states(first=self._states_read + 1):
            self._in_logs |= _digests(saved.parts.values())
            self._states_read = stream_seq

    async def _read_samples(self) -> None:
        """Samples that were logged in full can be drawn again, which takes their weights.

        Records that have left the log since they were read count until the process ends.
        """
        async for stream_seq, data in self._bus.samples.since(self._samples_read + 1):
            record = _SAMPLES.decode(data)
            if record.content is not None and (adapter := record.request.adapter) is not None:
                self._in_logs |= _digests(adapter.files.values())
            self._samples_read = stream_seq

    async def _loaded(self, fact: Fact) -> set[str]:
        if fact.costs is not None:
            return set(fact.costs.loaded)
        record = await self._bus.log.get(fact.target, fact.seq)  # imported: read it itself
        if record is None:
            return set()
        try:
            result = await self._bus.log.result(record, await self._seals.of(fact.target))
        except Forgotten:  # nothing of it is repeated any more
            return set()
        except ValueError as exc:
            msg = f"the result of {fact.target}:{fact.seq} cannot be read: {exc}"
            raise ServerError(msg) from exc
        if isinstance(result, ops.CreateModelDone | ops.LoadWeightsDone):
            return _digests(result.parts.values())
        return set()


async def _entries(view: View[M]) -> list[M]:
    """All present entries, read from the broker now: a view of long ago may lack some."""
    watch = await view.watch()
    await watch.close()
    return list(view)


def _digests(refs: Iterable[BlobRef]) -> set[str]:
    return {ref.blake3 for ref in refs}
