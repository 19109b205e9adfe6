"""What exists: one entry per subject in the registry stream, last value wins.

Written by whoever owns the thing, watched by the gateways (all of it) and the trainers
(sessions). ``owner`` is the id of an API key, never the key.
"""

from __future__ import annotations

from typing import Any, Literal

from tinsmith.messages.base import Message
from tinsmith.messages.ops import LoraShape
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


class Run(Message, frozen=True, kw_only=True):
    """A model being trained; written by the gateway when its creation is asked for."""

    model_id: str
    session_id: str
    owner: str
    created_ns: int
    base_model: str
    lora: LoraShape
    user_metadata: dict[str, str] = {}


class Sampler(Message, frozen=True, kw_only=True):
    """A sampling session; written by the gateway, or by the checkpointer when ephemeral."""

    sampler_id: str
    session_id: str
    owner: str
    created_ns: int
    base_model: str
    model_path: str | None = None
    adapter: AdapterRef | None = None


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
