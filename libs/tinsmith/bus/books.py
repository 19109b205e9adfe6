"""What the broker's own books say: of itself, of its streams and how full they are."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from tinsmith import ids
from tinsmith.bus.wire import TRANSIENT, last
from tinsmith.errors import BrokerUnavailable
from tinsmith.messages.table import LOG_STREAM, LOG_TEMPLATE, STREAMS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nats.aio.client import Client
    from nats.js import JetStreamContext

PATIENCE_S = 3.0
API = "$JS.API"
_ERR_NO_STREAM = 10059


class _Error(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct, kw_only=True):
    error: _Error | None = None


class _Limits(msgspec.Struct):
    max_storage: int = -1


class _Account(_Answer, kw_only=True):
    storage: int = 0
    limits: _Limits = msgspec.field(default_factory=_Limits)


class _Config(msgspec.Struct):
    max_bytes: int = -1
    num_replicas: int = 1


class _Holds(msgspec.Struct):
    messages: int = 0
    bytes: int = 0
    first_ts: datetime | None = None
    consumer_count: int = 0


class _Stream(_Answer, kw_only=True):
    """What of the broker's answer is needed; ``ts`` is its own clock's."""

    config: _Config | None = None
    state: _Holds = msgspec.field(default_factory=_Holds)
    ts: datetime | None = None


A = TypeVar("A", bound=_Answer)


class StreamState(NamedTuple):
    """How full one stream is."""

    name: str
    messages: int
    size: int  # bytes
    max_bytes: int  # 0: no limit of its own
    oldest_s: float  # since its oldest message was put there; 0 when there is none
    consumers: int
    replicas: int


class BrokerState(NamedTuple):
    """The server that we are connected to, and what its account keeps."""

    version: str
    rtt_s: float  # of one request
    skew_s: float  # its clock less ours, as far as ``rtt_s`` lets one tell
    storage: int  # bytes on disk, of all streams
    max_storage: int  # 0: no limit of the account
    max_payload: int  # bytes


class LastOp(NamedTuple):
    """The newest operation that was committed on a model."""

    seq: int
    at_s: float  # unix time, by the broker's clock


class Books:
    """Reads them; nothing is changed, and no queue is touched."""

    def __init__(self, connection: tuple[Client, JetStreamContext]) -> None:
        self._client, self._js = connection

    async def broker(self) -> BrokerState:
        """The server.

        Raises:
            BrokerUnavailable: it is away, has no JetStream, or does not let this user ask.
        """
        began_s = time.monotonic()
        account = await self._ask("INFO", _Account)
        rtt_s = time.monotonic() - began_s
        version = self._client.connected_server_version
        return BrokerState(
            version=f"{version.major}.{version.minor}.{version.patch}",
            rtt_s=rtt_s,
            skew_s=await self._skew_s(),
            storage=account.storage,
            max_storage=max(0, account.limits.max_storage),
            max_payload=self._client.max_payload,
        )

    async def stream(self, name: str) -> StreamState | None:
        """One stream, or None when the broker has none of that name; raises as ``broker``."""
        info = await self._ask(f"STREAM.INFO.{name}", _Stream)
        return None if info.config is None else _state(name, info.config, info)

    async def streams(self, names: Iterable[str] = tuple(STREAMS)) -> list[StreamState]:
        """Those of ``names`` that there are; raises as ``broker``."""
        found = await asyncio.gather(*(self.stream(name) for name in names))
        return [state for state in found if state is not None]

    async def last_op(self, model_id: str) -> LastOp | None:
        """When the model's newest operation was committed; None: there is none yet.

        Raises:
            BrokerUnavailable: no answer.
        """
        subject = LOG_TEMPLATE.subject(model=ids.token(model_id), kind="op", number="*")
        found = await last(self._js, LOG_STREAM, subject, patience_s=PATIENCE_S)
        if found is None:
            return None
        at_s = 0.0 if found.time is None else found.time.timestamp()
        return LastOp(int((found.subject or "0").rpartition(".")[2]), at_s)

    async def _skew_s(self) -> float:
        """As told with the state of any stream; 0 when there is none."""
        before_s = time.time()
        info = await self._ask(f"STREAM.INFO.{LOG_STREAM}", _Stream)
        after_s = time.time()
        if info.ts is None:
            return 0.0
        told_s = info.ts.timestamp()
        return told_s - min(max(told_s, before_s), after_s)

    async def _ask(self, what: str, answer: type[A]) -> A:
        try:
            told = await self._client.request(f"{API}.{what}", b"", timeout=PATIENCE_S)
            found = msgspec.json.decode(told.data, type=answer)
        except (*TRANSIENT, msgspec.ValidationError) as exc:
            raise BrokerUnavailable(
                f"the broker does not tell {what} ({type(exc).__name__}); does it run JetStream, "
                "and may this user ask?"
            ) from exc
        error = found.error
        if error is not None and error.err_code != _ERR_NO_STREAM:
            raise BrokerUnavailable(f"the broker does not tell {what}: {error.description}")
        return found


def _state(name: str, config: _Config, info: _Stream) -> StreamState:
    holds, oldest_s = info.state, 0.0
    if holds.messages and holds.first_ts is not None and info.ts is not None:
        oldest_s = max(0.0, (info.ts - holds.first_ts).total_seconds())
    return StreamState(
        name=name,
        messages=holds.messages,
        size=holds.bytes,
        max_bytes=max(0, config.max_bytes),
        oldest_s=oldest_s,
        consumers=holds.consumer_count,
        replicas=config.num_replicas,
    )
