"""Which blobs are needed, and by what: checkpoints, samplers, logs, and what is on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

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

Need = Literal["checkpoints", "samplers", "states", "loaded", "payloads", "samples", "in flight"]

_SAMPLES = decoder(SampleRecord)


class References:
    """Finds out on demand; of the logs it remembers what it has read, until one is pruned.

    Logs need their requests and results, the states saved in them, what was loaded, and what
    samples were drawn from that were logged in full. What was saved under a name is needed only
    for as long as it has the name: a replay makes it anew.
    """

    def __init__(self, bus: Bus, seals: Seals) -> None:
        self._bus = bus
        self._seals = seals
        self._pruned = 0  # logs
        self._start_over()

    def _start_over(self) -> None:
        self._in_logs: dict[str, Need] = {}
        self._payloads: dict[str, Need] = {}
        self._payloads_read = 0
        self._ops_read = 0
        self._states_read = 0
        self._samples_read = 0

    async def now(self) -> dict[str, Need]:
        """The digests of all blobs that are needed at a moment after this call has begun.

        Of several needs for a blob one is named. What is on its way is read before the logs, in
        which it may end meanwhile.

        Raises:
            ServerError: something could not be read, so that nothing can be said.
        """
        await self._drop_pruned()
        claims = self._bus.claims
        found: dict[str, Need] = {digest: "in flight" async for digest in claims.in_flight()}
        found |= {digest: "samples" async for digest in claims.of_samples()}
        await self._read_payloads()
        found |= self._payloads
        return found | await self._of_parts()

    async def of_parts(self) -> dict[str, Need]:
        """As ``now``, of files of weights and states alone: it reads less."""
        await self._drop_pruned()
        return await self._of_parts()

    async def _of_parts(self) -> dict[str, Need]:
        await self._read_logs()
        await self._read_samples()
        found = self._in_logs | await self._of_samplers()
        return found | await self._of_checkpoints()

    async def _drop_pruned(self) -> None:
        """Another service may have pruned logs whose needs are remembered: all are read again."""
        pruned = sum(mark.is_removed for mark in (await self._bus.pruning.marks()).values())
        if pruned != self._pruned:
            self._start_over()
            self._pruned = pruned

    async def _of_checkpoints(self) -> dict[str, Need]:
        checkpoints: View[Checkpoint] = View(self._bus.table(table.CHECKPOINTS), lambda _: "")
        parts = [ref for c in await entries(checkpoints) for ref in c.parts.values()]
        return _needed(parts, "checkpoints")

    async def _of_samplers(self) -> dict[str, Need]:
        samplers: View[Sampler] = View(self._bus.table(table.SAMPLERS), lambda _: "")
        adapters = [entry.adapter for entry in await entries(samplers)]
        return _needed([r for a in adapters if a for r in a.files.values()], "samplers")

    async def _read_logs(self) -> None:
        facts = self._bus.facts
        async for fact in facts.of_log(first=self._ops_read + 1):
            self._in_logs |= await self._loaded(fact)
            self._ops_read = fact.stream_seq
        async for stream_seq, saved in facts.states(first=self._states_read + 1):
            self._in_logs |= _needed(saved.parts.values(), "states")
            self._states_read = stream_seq

    async def _read_samples(self) -> None:
        """Samples that were logged in full can be drawn again, which takes their weights.

        Records that have left the log since they were read count until the process ends.
        """
        async for stream_seq, data in self._bus.samples.since(self._samples_read + 1):
            record = _SAMPLES.decode(data)
            if record.content is not None and (adapter := record.request.adapter) is not None:
                self._in_logs |= _needed(adapter.files.values(), "samples")
            self._samples_read = stream_seq

    async def _read_payloads(self) -> None:
        async for fact in self._bus.facts.of_log(first=self._payloads_read + 1):
            self._payloads |= await self._of_record(fact)
            self._payloads_read = fact.stream_seq

    async def _of_record(self, fact: Fact) -> dict[str, Need]:
        if fact.costs is not None and fact.costs.blobs is not None:
            return _all(fact.costs.blobs, "payloads")
        # Imported, or written before references were told beside it.
        record = await self._bus.log.get(fact.target, fact.seq)
        if record is None:
            return {}
        refs = [ref for ref in (record.op_ref, record.result_ref) if ref is not None]
        return _needed(refs, "payloads")

    async def _loaded(self, fact: Fact) -> dict[str, Need]:
        if fact.costs is not None:
            return _all(fact.costs.loaded, "loaded")
        record = await self._bus.log.get(fact.target, fact.seq)  # imported: read it itself
        if record is None:
            return {}
        try:
            result = await self._bus.log.result(record, await self._seals.of(fact.target))
        except Forgotten:  # nothing of it is repeated any more
            return {}
        except ValueError as exc:
            msg = f"the result of {fact.target}:{fact.seq} cannot be read: {exc}"
            raise ServerError(msg) from exc
        if isinstance(result, ops.CreateModelDone | ops.LoadWeightsDone):
            return _needed(result.parts.values(), "loaded")
        return {}


async def entries(view: View[M]) -> list[M]:
    """All present entries, read from the broker now: a view of long ago may lack some."""
    watch = await view.watch()
    await watch.close()
    return list(view)


def _needed(refs: Iterable[BlobRef], need: Need) -> dict[str, Need]:
    return _all((ref.blake3 for ref in refs), need)


def _all(digests: Iterable[str], need: Need) -> dict[str, Need]:
    return dict.fromkeys(digests, need)
