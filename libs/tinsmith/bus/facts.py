"""What each stored result cost and needs, told by a header: nobody has to read results to know.

The header is written with the result in one message: there is no result without its costs, and
no costs without the result. A log that was imported has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tinsmith import ids
from tinsmith.bus.history import kept
from tinsmith.bus.wire import following, last
from tinsmith.messages import ops, sampling
from tinsmith.messages.base import Failed, decoder
from tinsmith.messages.table import LOG_STREAM, LOG_TEMPLATE, RESULT_STREAM, RESULT_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

    from tinsmith.messages.ops import StateSaved

HEADER = "Ts-Costs"
_STATES = decoder(ops.StateSaved)


class Costs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one training op, or of one sampling request."""

    trained: int = 0  # tokens
    saved: int = 0  # checkpoints
    prefill: int = 0  # tokens of the prompt that were computed
    cached: int = 0  # tokens of the prompt that were found in the cache
    sampled: int = 0  # tokens
    failed: int = 0  # requests
    loaded: tuple[str, ...] = ()  # digests of the parts that whoever repeats the op reads
    blobs: tuple[str, ...] | None = None  # of the op and its result; None: read the record


class Fact(NamedTuple):
    """One stored result; ``target`` is the id of its model or sampling session.

    ``costs`` is None for a record of an imported log.
    """

    stream_seq: int
    at_s: float  # unix time
    target: str
    seq: int
    costs: Costs | None


def headers_of(costs: Costs) -> dict[str, str]:
    """What to publish the result with."""
    return {HEADER: msgspec.json.encode(costs).decode()}


def op_costs(result: ops.OpResult) -> Costs:
    """What a training op has cost, told from its result."""
    match result:
        case ops.ForwardBackwardDone():
            return Costs(trained=sum(t.shape[0] if t.shape else 0 for t in result.logprobs))
        case ops.CreateModelDone() | ops.LoadWeightsDone():
            return Costs(loaded=tuple(ref.blake3 for ref in result.parts.values()))
        case (
            ops.SaveWeightsDone() | ops.SaveWeightsForSamplerDone() | ops.SaveWeightsExternalDone()
        ):
            return Costs(saved=1)
        case Failed():
            return Costs(failed=1)
        case _:
            return Costs()


def sample_costs(result: sampling.SampleResult) -> Costs:
    """What a sampling request has cost."""
    if isinstance(result, sampling.SampleFailed):
        return Costs(failed=1)
    cached = min(result.prompt_cache_hit_tokens, result.prompt_tokens)
    return Costs(
        prefill=result.prompt_tokens - cached,
        cached=cached,
        sampled=sum(len(sequence.tokens) // 4 for sequence in result.sequences),
    )


class Facts:
    """Reads the costs of stored results in the order in which they were stored."""

    def __init__(self, connection: tuple[Client, JetStreamContext]) -> None:
        self._connection = connection

    async def of_log(self, *, first: int, model: str = "*") -> AsyncIterator[Fact]:
        """Of training, from the stream sequence ``first`` to the present last; of one model."""
        subject = LOG_TEMPLATE.subject(model=ids.token(model), kind="op", number="*")
        async for msg in kept(
            self._connection, LOG_STREAM, subject, first=first, headers_only=True
        ):
            *_, target, _, seq = msg.subject.split(".")
            yield _fact(msg, target, seq)

    async def newest(self) -> int:
        """The stream sequence of the newest operation of any model; 0: there is none.

        Raises:
            BrokerUnavailable: no answer.
        """
        subject = LOG_TEMPLATE.subject(model="*", kind="op", number="*")
        found = await last(self._connection[1], LOG_STREAM, subject)
        return 0 if found is None else found.seq or 0

    async def of_results(self, *, first: int, sampler: str = "*") -> AsyncIterator[Fact]:
        """Of sampling, as above; of one sampling session."""
        subject = RESULT_TEMPLATE.subject(sampler=ids.token(sampler), seq="*")
        async for msg in kept(
            self._connection, RESULT_STREAM, subject, first=first, headers_only=True
        ):
            *_, target, seq = msg.subject.split(".")
            yield _fact(msg, target, seq)

    async def next_result(self, sampler_id: str, *, after: int) -> Fact | None:
        """The first result of one sampler behind the stream sequence ``after``, if there is one.

        Raises:
            BrokerUnavailable: no answer.
        """
        subject = RESULT_TEMPLATE.subject(sampler=ids.token(sampler_id), seq="*")
        found = await following(self._connection[1], RESULT_STREAM, subject, after)
        if found is None:
            return None
        return Fact(
            stream_seq=found.seq or 0,
            at_s=0.0 if found.time is None else found.time.timestamp(),
            target=sampler_id,
            seq=int((found.subject or "").rpartition(".")[2]),
            costs=_costs(found.headers),
        )

    async def states(self, *, first: int) -> AsyncIterator[tuple[int, StateSaved]]:
        """Every saved state in the log, with its stream sequence; in order, as above."""
        subject = LOG_TEMPLATE.subject(model="*", kind="state", number="*")
        async for msg in kept(self._connection, LOG_STREAM, subject, first=first):
            yield msg.metadata.sequence.stream, _STATES.decode(msg.data)


def _fact(msg: Msg, target: str, seq: str) -> Fact:
    return Fact(
        stream_seq=msg.metadata.sequence.stream,
        at_s=msg.metadata.timestamp.timestamp(),
        target=ids.of_token(target),
        seq=int(seq),
        costs=_costs(msg.headers),
    )


def _costs(headers: dict[str, str] | None) -> Costs | None:
    told = (headers or {}).get(HEADER)
    return None if told is None else msgspec.json.decode(told, type=Costs)
