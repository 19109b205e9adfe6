"""Sequenced operations on one model: what the gateway sends and the trainer carries out.

Produced by the gateway, consumed by the trainer that owns the model, kept in the log. One
``Op`` travels per ``(model_id, seq)``; ``seq`` 0 creates the model, clients start at 1.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tinsmith.messages.base import BlobRef, Failed, Message, Tensor
from tinsmith.messages.weights import PublishedVersion


class Span(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Provenance: the next ``length`` positions are those of one sampling request."""

    kind: Literal["prompt", "sampled"]
    sequence_id: str
    offset: int = 0  # in the request's prompt, or in its sampled tokens
    length: int


class Datum(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One training sequence: input tokens and the loss's per-token inputs by name.

    Spans tile what they annotate, in order; there are none where nothing is known.
    """

    tokens: Tensor  # int32 [n]
    inputs: dict[str, Tensor]  # e.g. target_tokens int64 [n] or [n, k], weights float32 likewise
    input_spans: tuple[Span, ...] = ()  # of tokens
    target_spans: tuple[Span, ...] = ()  # of target_tokens


class LoraShape(msgspec.Struct, frozen=True, kw_only=True):
    """Which matrices an adapter adapts, and how wide it is."""

    rank: int = 32  # 0: no adapter, every weight of the base is trained
    alpha: float = 32.0
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


OptimizerFamily = Literal["adamw", "dimuon"]

WHOLE = LoraShape(rank=0, alpha=0.0)
"""The shape of a model that has all weights of its base trained."""


class CreateModel(Message, frozen=True, kw_only=True):
    """Seq 0: a fresh adapter, or one restored from a checkpoint.

    With ``checkpoint`` the adapter's shape and weights come from there, its optimizer state
    too if ``with_optimizer``; ``lora`` is then ignored.
    """

    base_model: str
    lora: LoraShape = LoraShape()
    checkpoint: str | None = None  # tinker:// path
    with_optimizer: bool = False
    optimizer: OptimizerFamily = "adamw"  # the checkpoint's own with ``with_optimizer``


class ForwardBackward(Message, frozen=True, kw_only=True):
    """Score datums and, unless ``forward_only``, add their gradient to the accumulated one."""

    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: dict[str, float | str] = {}
    forward_only: bool = False


class OptimStep(Message, frozen=True, kw_only=True):
    """One step on the accumulated gradient, which is zeroed afterwards."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled
    grad_clip_norm: float = 0.0  # global norm; 0 = off
    optimizer: OptimizerFamily = "adamw"  # must be the model's; "dimuon" has no weight decay


class SaveWeights(Message, frozen=True, kw_only=True):
    """Write a named checkpoint of weights and optimizer state (kind ``weights``)."""

    name: str
    overwrite: bool = False
    ttl_s: int | None = None
    user_metadata: dict[str, str] = {}


class SaveWeightsForSampler(Message, frozen=True, kw_only=True):
    """Publish the adapter for sampling: named, or ephemeral as a new sampling session."""

    name: str | None = None
    sampling_session_id: str | None = None  # set exactly when ``name`` is not
    overwrite: bool = True
    ttl_s: int | None = None
    user_metadata: dict[str, str] = {}
    is_inflight: bool = False  # the sampling session moves on with later saves of its kind


class SaveWeightsExternal(Message, frozen=True, kw_only=True):
    """Write the weights for other tools (kind ``external_weights``), for ``recipients`` only."""

    name: str
    overwrite: bool = True
    ttl_s: int | None = None
    user_metadata: dict[str, str] = {}
    recipients: tuple[str, ...] = ()  # age's, to whom every file is encrypted; (): in the clear


class LoadWeights(Message, frozen=True, kw_only=True):
    """Replace this model's weights by a checkpoint's; pending gradients are dropped."""

    path: str  # tinker:// path of a ``weights`` checkpoint
    with_optimizer: bool = False


class Refused(Message, frozen=True, kw_only=True):
    """A request the gateway found invalid; it only consumes its seq and fails its future."""

    reason: Failed
    asked_blake3: str = ""  # of the body that was refused, where that was not for its content


OpBody = (
    CreateModel
    | ForwardBackward
    | OptimStep
    | SaveWeights
    | SaveWeightsForSampler
    | SaveWeightsExternal
    | LoadWeights
    | Refused
)


class Op(Message, frozen=True, kw_only=True):
    """One sequenced operation, self-contained."""

    model_id: str
    seq: int
    body: OpBody


class CreateModelDone(Message, frozen=True, kw_only=True):
    """The model exists; ``parts`` are the checkpoint's it came from, if any."""

    model_id: str
    lora: LoraShape
    parts: dict[str, BlobRef] = {}


class Frame(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where an op's rows lay in a pass that had rows of other models too.

    Matrix products of another size may round otherwise. So this, and nothing else of the others,
    is what it takes to come to the same bits again.
    """

    rows: int  # of the pass
    first: int  # the first of the op's
    length: int  # tokens that every row was padded to


class ForwardBackwardDone(Message, frozen=True, kw_only=True):
    """Per-datum log-probabilities in request order, and ``name:reduction`` metrics."""

    logprobs: tuple[Tensor, ...]  # float32, each of its datum's target_tokens shape
    metrics: dict[str, float]  # always has "loss:sum"
    passes: tuple[tuple[int, ...], ...] = ()  # indices of the datums computed together, in order
    frames: tuple[Frame | None, ...] = ()  # of each pass, None of one without others; () if all are
    ranks: int = 1  # pass k is of sum k mod ranks of the gradient, and those are added up in order
    by_pass: bool = False  # each pass is a sum of its own: ``ranks`` decided the passes alone


class OptimStepDone(Message, frozen=True, kw_only=True):
    """The step was applied."""

    metrics: dict[str, float] = {}
    norm_block: int = 0  # the norm is that of the norms of blocks of so many numbers; 0: of all


class SaveWeightsDone(Message, frozen=True, kw_only=True):
    """The checkpoint's manifest is durable; ``parts`` are what was saved."""

    path: str
    size_bytes: int = 0
    parts: dict[str, BlobRef] = {}


class SaveWeightsForSamplerDone(Message, frozen=True, kw_only=True):
    """The weights, which are ``parts``, can be sampled from: by path, or by sampling session."""

    path: str | None = None
    sampling_session_id: str | None = None
    size_bytes: int = 0
    parts: dict[str, BlobRef] = {}
    published: PublishedVersion | None = None  # the same weights on their lineage


class SaveWeightsExternalDone(Message, frozen=True, kw_only=True):
    """The files can be downloaded; ``parts`` are what they were made of, before encryption."""

    path: str
    size_bytes: int = 0  # of the files as they are downloaded
    parts: dict[str, BlobRef] = {}


class LoadWeightsDone(Message, frozen=True, kw_only=True):
    """The weights were replaced by ``parts``, whatever the path may come to mean later."""

    path: str
    parts: dict[str, BlobRef] = {}


OpResult = (
    CreateModelDone
    | ForwardBackwardDone
    | OptimStepDone
    | SaveWeightsDone
    | SaveWeightsForSamplerDone
    | SaveWeightsExternalDone
    | LoadWeightsDone
    | Failed
)


class Placement(Message, frozen=True, kw_only=True):
    """A model that wants an owner among the trainers of its base model.

    The owner keeps this message unacknowledged, in progress, for as long as it holds the
    model: when it dies, the broker hands the model to another trainer.
    """

    model_id: str
    base_model: str


class Record(Message, frozen=True, kw_only=True):
    """One entry of a model's log: the op has happened exactly when its record is appended."""

    model_id: str
    seq: int  # the op's seq
    epoch: int  # the owner's, rises with every take-over
    op: bytes | None = None  # the encoded Op, sealed if ``sealed`` says so; or
    op_ref: BlobRef | None = None  # where that lies
    op_blake3: str  # of the encoded Op; keyed by the run's key where it is sealed
    result: bytes | None = None  # the encoded OpResult likewise, or
    result_ref: BlobRef | None = None
    result_blake3: str
    state_blake3: str = ""  # of the model after an op that changed it: create, load, step
    prev_blake3: str  # of the previous entry's bytes; 64 zeros for the first
    sealed: str = ""  # how op and result are sealed (see tinsmith.sealing.seal); "": not at all


class Owned(Message, frozen=True, kw_only=True):
    """A log entry by which a new owner fences every earlier one, and says what it computes with."""

    model_id: str
    epoch: int
    trainer_id: str
    environment: dict[str, str] = {}  # versions, device, threads: what decides the last bits
    prev_blake3: str


class StateSaved(Message, frozen=True, kw_only=True):
    """A log entry: the model as it was after op ``seq`` lies in ``parts``.

    A new owner starts from the newest of these. It may stand later in the log than ops that
    came after ``seq``: writing it does not hold them up.
    """

    model_id: str
    seq: int
    epoch: int
    state_blake3: str
    parts: dict[str, BlobRef]
    prev_blake3: str


LogEntry = Record | Owned | StateSaved


class OpDone(Message, frozen=True, kw_only=True):
    """A ping on core NATS: the record of this op is in the log now."""

    model_id: str
    seq: int
