"""What an installation looks like at one moment: plain facts, for whoever shows them.

``tinsmith status --json`` prints an ``Overview`` as it is. Times are unix seconds, by the clock of
who wrote them; sizes are bytes. Fields are only ever added.
"""

from __future__ import annotations

import msgspec


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is heard; see ``ServiceAlive``."""

    service: str
    instance: str
    version: str
    base_models: tuple[str, ...] = ()
    pool: str = ""
    labels: dict[str, str] = {}
    load: dict[str, float] = {}
    trouble: str = ""
    is_taking: bool = True
    metrics_url: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is or was trained."""

    model_id: str
    session_id: str
    owner: str  # the id
    owner_name: str = ""  # of a key in the registry; "": its key is in the configuration
    base_model: str
    rank: int
    is_whole: bool = False
    optimizer: str = "adamw"
    project_id: str | None = None
    created_s: float
    is_live: bool
    """Its session is active, and its client has not let go of it."""
    ended: str = ""
    """Why it is not live: released, finished, expired."""
    trainer: str = ""
    """The instance that took it last."""
    is_held: bool = False
    """That instance is heard now, so that it has the model."""
    last_op: int | None = None
    last_op_s: float | None = None
    """When it was committed."""
    queued: int = 0
    """Operations that wait or are being worked on."""
    waiting_turns: int | None = None
    """Of other models, before its next one; None: it waits for none."""
    waiting_tokens: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a queue that one pool of samplers, or all trainers of a model, see to."""

    base_model: str
    pool: str = ""
    messages: int


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Work that waits or is being done."""

    name: str  # ops, placements, samples, held
    stream: str
    messages: int
    size: int
    max_bytes: int = 0
    oldest_s: float = 0.0  # an age
    shares: tuple[Share, ...] = ()


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that follows a lineage; see ``WeightsStatus``."""

    replica: str
    plane: str
    state: str
    version: int = 0
    behind: int = 0
    lag_ms: float = 0.0
    reason: str = ""


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """Published weights, and who serves which version of them."""

    lineage_id: str  # of the run that publishes them
    version: int
    epoch: int
    replicas: tuple[Replica, ...] = ()


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """How full a stream is."""

    name: str
    kind: str
    messages: int
    size: int
    max_bytes: int = 0  # 0: no limit of its own
    oldest_s: float = 0.0
    consumers: int = 0
    replicas: int = 1


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """The server of all streams; see ``BrokerState``."""

    version: str
    rtt_ms: float
    skew_ms: float
    storage: int
    max_storage: int = 0
    max_payload: int = 0
    streams: tuple[Stream, ...] = ()


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A base model that was ever served, as its trainer or a pool of samplers announced it."""

    name: str
    role: str
    pool: str = ""
    context_length: int
    vocab_size: int
    max_rank: int = 0
    arch: str = ""
    tokenizer_id: str = ""
    labels: dict[str, str] = {}
    instances: tuple[str, ...] = ()
    """Those that are heard now."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an operator should see to."""

    what: str
    remedy: str


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    at_s: float
    services: tuple[Service, ...] = ()
    runs: tuple[Run, ...] = ()
    """Newest first; the live ones, unless all were asked for."""
    run_count: int = 0
    """All in the registry."""
    queues: tuple[Queue, ...] = ()
    lineages: tuple[Lineage, ...] = ()
    models: tuple[Model, ...] = ()
    broker: Broker | None = None
    unknown: tuple[str, ...] = ()
    """What could not be had, each a sentence: those facts are absent above."""
    problems: tuple[Problem, ...] = ()
    """Empty: all is well."""
