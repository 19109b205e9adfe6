"""The JSON bodies that clients send, as they send them; fields not named here are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tinsmith.errors import InvalidRequest
from tinsmith_gateway.wire.target_tokens import JsonTensor

Count = Annotated[int, Meta(ge=0)]
TrainingSeq = Annotated[int, Meta(ge=1, le=2**31 - 1)]  # int32 in the protobuf form
SamplingSeq = Annotated[int, Meta(ge=0, lt=10**18 * 9)]  # 64 bits: clones use blocks of 1e9
Order = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # of a model or a sampler in its session

T = TypeVar("T")


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all bodies."""


class CreateSession(Body, frozen=True, kw_only=True):
    """Opens a session."""

    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionRef(Body, frozen=True, kw_only=True):
    """A heartbeat."""

    session_id: str


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """How the client's program ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body, frozen=True, kw_only=True):
    """Ends a session."""

    reason: FinishReason
    detail: str | None = None


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter asked for."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The family of optimizer; its numbers come with each step."""

    type: str = "adamw"
    version: int = 1  # of "dimuon"


class CreateModel(Body, frozen=True, kw_only=True):
    """Creates a model from a base model."""

    session_id: str
    model_seq_id: Order
    base_model: str
    lora_config: LoraConfig | None = None
    user_metadata: dict[str, str] | None = None
    optimizer_config: OptimizerConfig | None = None


class CreateFromCheckpoint(Body, frozen=True, kw_only=True):
    """Creates a model from a checkpoint: ``load_weights`` with a session."""

    session_id: str
    model_seq_id: Order
    path: str
    optimizer: bool = False
    base_model: str | None = None
    user_metadata: dict[str, str] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class LoadTarget(Body, frozen=True, kw_only=True):
    """Tells the two forms of ``load_weights`` apart."""

    session_id: str | None = None
    model_id: str | None = None


class ModelRef(Body, frozen=True, kw_only=True):
    """A question about a model."""

    model_id: str


class Sequenced(Body, frozen=True, kw_only=True):
    """What attributes a training request to its place; the rest is read only afterwards."""

    model_id: str
    seq_id: TrainingSeq


class LoadWeights(Body, frozen=True, kw_only=True):
    """Loads a checkpoint into a model that exists: ``load_weights`` with a model."""

    path: str
    optimizer: bool = False
    weights_access_token: str | None = None


class AdamParams(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one AdamW step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class DimuonParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of one Dimuon step."""

    type: Literal["dimuon"] = "dimuon"
    learning_rate: float
    grad_clip_norm: float = 0.0
    beta1: float = 0.9


class OptimStep(Body, frozen=True, kw_only=True):
    """One optimizer step."""

    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None  # other families, tagged by "type"


class SaveWeights(Body, frozen=True, kw_only=True):
    """Saves a training checkpoint."""

    path: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(Body, frozen=True, kw_only=True):
    """Saves weights to sample from: named by ``path``, or as a new sampling session."""

    path: str | None = None
    sampling_session_seq_id: Order | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeightsExternal(Body, frozen=True, kw_only=True):
    """Saves weights for other tools, to be downloaded file by file."""

    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: tuple[str, ...] | None = None


class CreateSamplingSession(Body, frozen=True, kw_only=True):
    """Opens a sampling session on a base model or on saved weights."""

    session_id: str
    sampling_session_seq_id: Order
    base_model: str | None = None
    model_path: str | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a prompt; kinds other than ``encoded_text`` are not supported."""

    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Its chunks belong together without a gap."""

    chunks: list[Chunk]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class Sample(Body, frozen=True, kw_only=True):
    """Draws continuations of a prompt, or scores it."""

    sampling_session_id: str | None = None
    seq_id: SamplingSeq = 0
    num_samples: int = 1
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count | None = None
    topk_sample_logprobs: Count | None = None
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: Count | None = None


class RetrieveFuture(Body, frozen=True, kw_only=True):
    """Polls for a result; with ``allow_metadata_only`` a large one may be announced by its size."""

    request_id: str
    allow_metadata_only: bool = False


class FutureRef(Body, frozen=True, kw_only=True):
    """Names work that nobody waits for any more."""

    request_id: str


class FuturesTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One client of a sampling session; clones use ``seq_id`` from their number times 1e9 on."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Count = 0


class RetrieveFutures(Body, frozen=True, kw_only=True):
    """Asks which of a client's samples are done; ``retrieved_request_ids`` need not be kept."""

    target: FuturesTarget
    prev_cursor: Annotated[int, Meta(ge=0, le=2**62)] = 0  # the broker has 64 bits
    timeout: Annotated[float, Meta(ge=0)] | None = None
    retrieved_request_ids: tuple[str, ...] = ()


class SamplerRef(Body, frozen=True, kw_only=True):
    """A copy of a client that joins its sampling session."""

    sampling_session_id: str


class SetTtl(Body, frozen=True, kw_only=True):
    """When a checkpoint expires, in seconds from now; null: never."""

    ttl_seconds: int | None


class SetProject(Body, frozen=True, kw_only=True):
    """Moves a session into a project."""

    project_id: str


class CopyWeights(Body, frozen=True, kw_only=True):
    """Copies a checkpoint: into a project, or into a slot of a session that exists."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Order | None = None
    ttl_seconds: int | None = None


class SearchOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose sessions."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: tuple[str, ...] = ()


class StatusQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A status to match, and for ``client_finished`` the reasons."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: tuple[str, ...] | None = None


class SearchCursor(msgspec.Struct, frozen=True, kw_only=True):
    """The last session of the page before."""

    last_created_at: str
    last_session_id: str


class SearchSessions(Body, frozen=True, kw_only=True):
    """A search; every filter that is given must match."""

    session_id: str | None = None
    project_ids: tuple[str, ...] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: SearchOwner = SearchOwner()
    statuses: tuple[StatusQuery, ...] | None = None
    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class WeightsInfo(Body, frozen=True, kw_only=True):
    """A question about a checkpoint."""

    tinker_path: str


def decode(raw: bytes, type_: type[T]) -> T:
    """``raw`` as ``type_``; InvalidRequest with the path of the field that is wrong."""
    try:
        return msgspec.json.decode(raw, type=type_)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"request body: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"request body: not JSON ({error})") from error


def convert(value: object, type_: type[T], field: str) -> T:
    """A decoded part of a body as ``type_``; InvalidRequest with the field that is wrong."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{field}: {error}") from error
