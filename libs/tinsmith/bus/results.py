"""Results of sampling, kept for some hours so that any gateway can answer any poll."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.bus.claims import check_in, resolve
from tinsmith.bus.facts import headers_of, sample_costs
from tinsmith.bus.wire import ERR_MAX_PER_SUBJECT, Rejected, last, publish
from tinsmith.messages.base import decoder, encode
from tinsmith.messages.sampling import SampleResult
from tinsmith.messages.table import RESULT_STREAM, RESULT_TEMPLATE

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

    from tinsmith.blobs import BlobStore

_RESULTS = decoder(SampleResult)


class ResultStore:
    """One result per (sampler, seq); the first one written stays."""

    def __init__(self, connection: tuple[Client, JetStreamContext], blobs: BlobStore) -> None:
        self._connection = connection
        self._blobs = blobs

    async def put_first(self, sampler_id: str, seq: int, result: SampleResult) -> SampleResult:
        """Store ``result`` unless there is one already; gives the one that is stored then."""
        payload, headers = await check_in(encode(result), self._blobs)
        headers |= headers_of(sample_costs(result))
        try:
            await publish(self._connection, _subject(sampler_id, seq), payload, headers=headers)
        except Rejected as exc:
            if exc.code != ERR_MAX_PER_SUBJECT:
                raise
            return await self.get(sampler_id, seq) or result
        return result

    async def get(self, sampler_id: str, seq: int) -> SampleResult | None:
        """The stored result, or None while there is none."""
        found = await last(self._connection[1], RESULT_STREAM, _subject(sampler_id, seq))
        if found is None:
            return None
        _, data = await resolve(found, self._blobs)
        result: SampleResult = _RESULTS.decode(data)
        return result


def _subject(sampler_id: str, seq: int) -> str:
    return RESULT_TEMPLATE.subject(sampler=ids.token(sampler_id), seq=str(seq))
