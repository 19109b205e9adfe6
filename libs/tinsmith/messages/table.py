"""The one table of what travels where: subject, message, answer.

``docs/protocol.md`` is generated from it. Ids in braces are filled by ``subject()``; they are
single NATS tokens made by ``tinsmith.ids``, never text from a user.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from tinsmith.messages import (
    anchors,
    checkpoints,
    ops,
    registry,
    sampling,
    services,
    texts,
    weights,
)
from tinsmith.messages.base import Failed, Message, decoder

if TYPE_CHECKING:
    import msgspec

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
M = TypeVar("M", bound=Message)

PREFIX = "tinsmith.v1"
_TOKEN_RE = re.compile(r"[A-Za-z0-9_-]+")


class Row:
    """Common to all rows: a subject with holes, and how to fill them."""

    def __init__(self, template: str, doc: str) -> None:
        self.template = f"{PREFIX}.{template}"
        self.doc = doc

    def subject(self, **tokens: str) -> str:
        """The subject with its holes filled; ``*`` is allowed where a filter is meant."""
        for name, value in tokens.items():
            if value != "*" and _TOKEN_RE.fullmatch(value) is None:
                msg = f"{name}={value!r} is not a subject token"
                raise ValueError(msg)
        return self.template.format(**tokens)

    def tokens(self, subject: str) -> dict[str, str]:
        """What fills the holes of a subject that was made of this row."""
        holes = zip(self.template.split("."), subject.split("."), strict=True)
        return {hole[1:-1]: token for hole, token in holes if hole.startswith("{")}

    @property
    def wildcard(self) -> str:
        """The subject with ``*`` in every hole."""
        return re.sub(r"\{\w+\}", "*", self.template)


class Rpc(Row, Generic[Q, R]):
    """Core request and reply, answered by one instance of a queue group. Not durable."""

    def __init__(self, template: str, request: type[Q], reply: type[R], doc: str) -> None:
        super().__init__(template, doc)
        self.request = request
        self.reply = reply
        self.requests: msgspec.msgpack.Decoder[Q] = decoder(request)
        self.replies: msgspec.msgpack.Decoder[R | Failed] = decoder(reply | Failed)


class Queue(Row, Generic[M]):
    """Durable work: kept by the broker until one consumer has acknowledged it."""

    def __init__(
        self, template: str, stream: str, message: type[M], *, answer: str, doc: str
    ) -> None:
        super().__init__(template, doc)
        self.stream = stream
        self.message = message
        self.messages: msgspec.msgpack.Decoder[M] = decoder(message)
        self.answer = answer


class Event(Row, Generic[M]):
    """Core publish and subscribe: may be lost, never needed for correctness."""

    def __init__(self, template: str, message: type[M], doc: str) -> None:
        super().__init__(template, doc)
        self.message = message
        self.messages: msgspec.msgpack.Decoder[M] = decoder(message)


class Entity(Row, Generic[M]):
    """Last value per subject in the registry stream."""

    def __init__(self, template: str, message: type[M], doc: str) -> None:
        super().__init__(f"reg.{template}", doc)
        self.message = message
        self.messages: msgspec.msgpack.Decoder[M] = decoder(message)


COMMIT_CHECKPOINT = Rpc(
    "rpc.checkpointer.commit",
    checkpoints.CommitCheckpoint,
    checkpoints.CommitCheckpointDone,
    "trainer -> checkpointer: make these parts a checkpoint",
)
GET_CHECKPOINT = Rpc(
    "rpc.checkpointer.get",
    checkpoints.GetCheckpoint,
    checkpoints.Checkpoint,
    "trainer, gateway -> checkpointer: the manifest behind a path",
)
CHANGE_CHECKPOINT = Rpc(
    "rpc.checkpointer.change",
    checkpoints.ChangeCheckpoint,
    checkpoints.Checkpoint,
    "gateway -> checkpointer: publish, hide, let expire",
)
DELETE_CHECKPOINT = Rpc(
    "rpc.checkpointer.delete",
    checkpoints.DeleteCheckpoint,
    checkpoints.Checkpoint,
    "gateway -> checkpointer: end a checkpoint; answers what it was",
)
COPY_CHECKPOINT = Rpc(
    "rpc.checkpointer.copy",
    checkpoints.CopyCheckpoint,
    checkpoints.Checkpoint,
    "gateway -> checkpointer: the same parts under another run",
)
TOKENIZE_TEXT = Rpc(
    "rpc.sampler.tokenize.{pool}",
    texts.TokenizeText,
    texts.PromptRendered,
    "gateway -> any sampler of the base model: text as a prompt",
)
RENDER_CHAT = Rpc(
    "rpc.sampler.render.{pool}",
    texts.RenderChat,
    texts.PromptRendered,
    "gateway -> any sampler of the base model: a conversation as a prompt",
)
SPELL_TOKENS = Rpc(
    "rpc.sampler.spell.{pool}",
    texts.SpellTokens,
    texts.TokensSpelled,
    "gateway -> any sampler of the base model: what tokens add to a text",
)

OPS = Queue(
    "op.{model}.{seq}",
    "TS_OPS",
    ops.Op,
    answer="a Record in the log",
    doc="gateway -> the trainer that owns the model",
)
PLACEMENTS = Queue(
    "place.{pool}.{model}",
    "TS_PLACE",
    ops.Placement,
    answer="ownership",
    doc="gateway -> any trainer of the base model with room for it",
)
SAMPLES = Queue(
    "sample.{pool}.{share}.{sampler}.{seq}",
    "TS_SAMPLE",
    sampling.Sample,
    answer="a SampleResult in TS_RESULT",
    doc="gateway -> any sampler of the base model; the share tells which ones prefer it",
)
HELD = Queue(
    "held.{owner}.{pool}.{share}.{sampler}.{seq}",
    "TS_HELD",
    sampling.Sample,
    answer="the same on TS_SAMPLE",
    doc="gateway -> gateways: samples over their owner's share, until others are done",
)

LOG_STREAM = "TS_LOG"
LOG_TEMPLATE = Row(
    "log.{model}.{kind}.{number}",
    "append-only log of a model: op.<seq>, own.<epoch>, state.<seq>",
)
ANCHOR_STREAM = "TS_ANCHOR"
ANCHOR_TEMPLATE = Row("anchor.{number}", "chain of Anchors: where the logs ended, every so often")
RESULT_STREAM = "TS_RESULT"
RESULT_TEMPLATE = Row("result.{sampler}.{seq}", "results of sampling, first writer wins")
SAMPLE_LOG_STREAM = "TS_SAMPLELOG"
SAMPLE_LOG_TEMPLATE = Row(
    "samplelog.{run}.{sampler}.{seq}",
    "what was sampled from a run's weights, or in a session from the base model",
)
LINEAGE_STREAM = "TS_WEIGHTS"
LINEAGE_TEMPLATE = Row(
    "weights.{lineage}.{kind}.{number}",
    "chain of a weight lineage: open.<epoch>, and full, delta, skip.<version>",
)
CHUNK_STREAM = "TS_CHUNKS"
CHUNK_TEMPLATE = Row("chunk.{lineage}.{digest}", "bytes of weights, by their blake3")
REGISTRY_STREAM = "TS_REGISTRY"
AUDIT_STREAM = "TS_AUDIT"
AUDIT_TEMPLATE = Row("audit.{owner}.{day}.{topic}", "what owners did, by day: 20260131")

OP_DONE = Event("done.op", ops.OpDone, "trainer -> gateways: this op's record is in the log")
SAMPLE_READY = Event("done.sample", services.SampleReady, "sampler -> gateways: result stored")
REQUEST_TAKEN = Event(
    "taken", services.RequestTaken, "gateway -> gateways: one more to count of its owner"
)
TOKENS_DRAWN = Event(
    "drawn.{gateway}", sampling.TokensDrawn, "sampler -> the gateway that asked for it: new tokens"
)
SERVICE_ALIVE = Event("alive.service", services.ServiceAlive, "every service, every two seconds")
SESSION_ALIVE = Event("alive.session", services.SessionAlive, "gateway -> gateways: a heartbeat")
SAMPLE_CANCELLED = Event(
    "cancel.sample", services.SampleCancelled, "gateway -> samplers: nobody waits for it any more"
)
SAMPLE_PICKED = Event(
    "picked.{pool}",
    sampling.SamplePicked,
    "sampler -> trainers of the model: a continuation to score again",
)
WEIGHTS_STATUS = Event(
    "alive.weights", weights.WeightsStatus, "sampler -> trainers, gateways: what it serves"
)

SESSIONS = Entity("session.{id}", registry.Session, "clients' sessions")
RUNS = Entity("run.{id}", registry.Run, "models being trained")
SAMPLERS = Entity("sampler.{id}", registry.Sampler, "sampling sessions")
CHECKPOINTS = Entity("checkpoint.{id}", checkpoints.Checkpoint, "committed checkpoints")
SERVED = Entity("served.{id}", registry.ServedModel, "base models and their limits")
MASTER_KEYS = Entity("master.{id}", registry.MasterKey, "the master key in use, by fingerprint")
RUN_KEYS = Entity("key.{id}", registry.RunKey, "keys of runs' payloads, wrapped")
FORGOTTEN_RUNS = Entity("forgotten.{id}", registry.ForgottenRun, "runs whose key was destroyed")
PRUNED = Entity("pruned.{id}", anchors.PrunedLog, "runs whose log was taken away by policy")
DISCARDED = Entity("discarded.{id}", checkpoints.Discarded, "parts that may be freed")
USAGE = Entity("usage.{id}", registry.Usage, "what was used, by hour and model or sampler")
LINEAGES = Entity("lineage.{id}", weights.LineageHead, "newest versions of weight lineages")
METER = Entity("meter.{id}", registry.MeterMark, "how far the meter has read")
SECRETS = Entity("secret.{id}", registry.Secret, "what the gateways share")
API_KEYS = Entity("apikey.{id}", registry.ApiKey, "API keys, by their digest")

_ROWS = tuple(globals().values())
RPCS: tuple[Rpc[Any, Any], ...] = tuple(row for row in _ROWS if isinstance(row, Rpc))
QUEUES: tuple[Queue[Any], ...] = tuple(row for row in _ROWS if isinstance(row, Queue))
EVENTS: tuple[Event[Any], ...] = tuple(row for row in _ROWS if isinstance(row, Event))
ENTITIES: tuple[Entity[Any], ...] = tuple(row for row in _ROWS if isinstance(row, Entity))
StreamKind = Literal[
    "work queue",
    "append only",
    "append only, logs pruned whole",
    "append only, oldest first out",
    "expiring",
    "last value",
    "kept until no state needs it",
]
STREAMS: dict[str, StreamKind] = {
    "TS_OPS": "work queue",
    "TS_PLACE": "work queue",
    "TS_SAMPLE": "work queue",
    "TS_HELD": "work queue",
    LOG_STREAM: "append only, logs pruned whole",
    ANCHOR_STREAM: "append only",
    RESULT_STREAM: "expiring",
    SAMPLE_LOG_STREAM: "append only, oldest first out",
    LINEAGE_STREAM: "append only, logs pruned whole",
    CHUNK_STREAM: "kept until no state needs it",
    REGISTRY_STREAM: "last value",
    AUDIT_STREAM: "expiring",
}
