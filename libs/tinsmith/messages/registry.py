"""What exists: one entry per subject in the registry stream, last value wins.

Written by whoever owns the thing, watched by the gateways (all of it) and the trainers
(sessions). ``owner`` is the id of an API key, never the key.
"""

from __future__ import annotations

from typing import Any, Literal

from tinsmith.messages.base import Message
from tinsmith.messages.ops import LoraShape, OptimizerFamily
from tinsmith.messages.sampling import AdapterRef


class Session(Message, frozen=True, kw_only=True):
    """A client's session; written by the gateway. Ended ones release their models."""

    session_id: str
    owner: str
    created_ns: int
    status: Literal["active", "finished", "expired"] = "active"
    detail: str = ""
    sdk_version: str = ""
    display_name: str | None = None
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] = {}
    project_id: str | None = None  # a label
    finish_reason: str = ""  # the client's word: success, errored or interrupted
    ended_ns: int | None = None


class Run(Message, frozen=True, kw_only=True):
    """A model being trained; written by the gateway when its creation is asked for."""

    model_id: str
    session_id: str
    owner: str
    created_ns: int
    base_model: str
    lora: LoraShape
    user_metadata: dict[str, str] = {}
    project_id: str | None = None
    optimizer: OptimizerFamily = "adamw"
    unloaded_ns: int | None = None  # since when its client wants no more of it


class Sampler(Message, frozen=True, kw_only=True):
    """A sampling session; written by the gateway, or by the checkpointer when ephemeral."""

    sampler_id: str
    session_id: str
    owner: str
    created_ns: int
    base_model: str
    model_path: str | None = None
    adapter: AdapterRef | None = None
    clones: int = 0  # how many copies of the client have joined
    follows: str | None = None  # the model whose later inflight saves replace ``adapter``


class ServedModel(Message, frozen=True, kw_only=True):
    """A base model that a trainer or a sampler serves, with what is needed to validate."""

    name: str
    role: Literal["trainer", "sampler"]
    vocab_size: int
    context_length: int
    tokenizer_id: str
    arch: str = ""
    eos_tokens: tuple[int, ...] = ()
    max_rank: int = 128
    pool: str = ""  # of samplers; each pool of a model has an entry
    labels: dict[str, str] = {}  # of the pool's samplers: engine, dtype, device


class Usage(Message, frozen=True, kw_only=True):
    """What one model or sampling session used in one hour; written by the meter.

    It holds all facts up to the stream sequences ``through_log`` and ``through_result``, so that
    a fact that is read twice counts once.
    """

    hour: int  # unix time / 3600, UTC
    target: str  # a model or sampler id
    owner: str
    session_id: str
    base_model: str
    trained_tokens: int = 0  # scored or trained on
    prefill_tokens: int = 0  # prompts that were computed
    cached_tokens: int = 0  # prompts that were found in the cache
    sampled_tokens: int = 0
    checkpoints: int = 0  # saves
    byte_seconds: int = 0  # of checkpoints
    through_log: int = 0
    through_result: int = 0
    through_ns: int = 0  # storage is counted up to here


class MeterMark(Message, frozen=True, kw_only=True):
    """How far the meter has read a stream."""

    stream_seq: int


class ApiKey(Message, frozen=True, kw_only=True):
    """A key that clients may present, as its digest; the key itself is nowhere."""

    digest: str  # sha-256, hex; the entry's id as well
    owner: str  # the id made of ``name``: all keys of one name share what they make
    name: str
    last_four: str
    created_ns: int
    project_id: str | None = None  # of sessions that name none
    expires_ns: int | None = None
    revoked_ns: int | None = None
    max_unfinished: int | None = None  # else gateway.max_unfinished
    sampling_share: int | None = None  # else gateway.sampling_share


class Secret(Message, frozen=True, kw_only=True):
    """What all gateways sign download links or tokens with; made by the first."""

    key: bytes


class MasterKey(Message, frozen=True, kw_only=True):
    """Which master key wraps the keys of runs; written by the first service that has it."""

    fingerprint: str


class RunKey(Message, frozen=True, kw_only=True):
    """The key of a run's payloads; written by the gateway before the run, erased to forget it."""

    model_id: str
    created_ns: int
    wrapped: bytes  # nonce, AES-256-GCM of the key under the master key; the model id is bound in
    fingerprint: str  # of the master key


class ForgottenRun(Message, frozen=True, kw_only=True):
    """A run whose key was destroyed; written before its ``RunKey`` is erased, and stays."""

    model_id: str
    forgotten_ns: int
    reason: str = ""
