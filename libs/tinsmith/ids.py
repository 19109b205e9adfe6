"""Identifiers: how they are made, checked, and turned into NATS subject tokens.

session   26 characters of lower-case base32: 130 random bits
model     <session>:train:<n>
sampler   <session>:sample:<n>
future    <model>:<seq> or <sampler>:<seq>: a pure function of what was asked for
path      tinker://<model>/<kind>/<name>
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from blake3 import blake3

from tinsmith.errors import InvalidRequest

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_SESSION = r"[a-z2-7]{26}"
_NUMBER = r"0|[1-9][0-9]{0,18}"  # \d would take the digits of every script
_MODEL_RE = re.compile(rf"({_SESSION}):train:({_NUMBER})")
_SAMPLER_RE = re.compile(rf"({_SESSION}):sample:({_NUMBER})")
_FUTURE_RE = re.compile(rf"({_SESSION}):(train|sample):({_NUMBER}):({_NUMBER})")
_NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_PROJECT_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}")
_PATH_RE = re.compile(rf"tinker://({_SESSION}:train:(?:{_NUMBER}))/([a-z_]+)/([^/]+)")


class FutureId(NamedTuple):
    """The parts of a ``request_id``; ``target`` is a model or a sampler id."""

    kind: str  # "train" or "sample"
    target: str
    seq: int


class CheckpointPath(NamedTuple):
    """The parts of a tinker:// path."""

    model_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


def new_session_id() -> str:
    """130 random bits in base32: unguessable, and legal in a subject."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(26))


def model_id(session_id: str, model_seq_id: int) -> str:
    """The id that the client computes as well."""
    return f"{session_id}:train:{model_seq_id}"


def sampler_id(session_id: str, sampling_session_seq_id: int) -> str:
    """The id of a sampling session."""
    return f"{session_id}:sample:{sampling_session_seq_id}"


def future_id(target: str, seq: int) -> str:
    """The ``request_id`` of op ``seq`` on a model or a sampling session."""
    return f"{target}:{seq}"


def parse_future_id(text: str) -> FutureId:
    """Raises InvalidRequest when ``text`` was not made by ``future_id``."""
    match = _FUTURE_RE.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"request_id: {text[:80]!r} is not an id that this server gives out")
    session, kind, number, seq = match.groups()
    return FutureId(kind, f"{session}:{kind}:{number}", int(seq))


def session_of(target: str) -> str:
    """The session id inside a valid model or sampler id."""
    return target.partition(":")[0]


def check_session_id(text: str) -> str:
    """``text`` itself; InvalidRequest when it is not a session id."""
    return _check(re.compile(_SESSION), text, "session_id")


def check_model_id(text: str) -> str:
    """``text`` itself; InvalidRequest when it is not a model id."""
    return _check(_MODEL_RE, text, "model_id")


def check_sampler_id(text: str) -> str:
    """``text`` itself; InvalidRequest when it is not a sampling session id."""
    return _check(_SAMPLER_RE, text, "sampling_session_id")


def check_name(text: str) -> str:
    """``text`` itself when it may name a checkpoint; InvalidRequest otherwise."""
    if _NAME_RE.fullmatch(text) is None or ".." in text:
        raise InvalidRequest(
            f"path: {text[:80]!r} cannot name a checkpoint; use 1 to 128 letters, digits, '_', '.' "
            "or '-', starting with a letter or digit"
        )
    return text


def is_project(text: str) -> bool:
    """Whether ``text`` can name a project."""
    return _PROJECT_RE.fullmatch(text) is not None


def parse_path(text: str) -> CheckpointPath:
    """Raises InvalidRequest unless ``text`` is tinker://<run>/<kind>/<name>."""
    match = _PATH_RE.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"path: {text[:120]!r} is not a checkpoint path; "
            "the form is tinker://<training run>/<kind>/<name>"
        )
    path = CheckpointPath(*match.groups())
    check_name(path.name)
    return path


def token(identifier: str) -> str:
    """A model, sampler or session id as one NATS subject token."""
    return identifier.replace(":", "-")


def of_token(text: str) -> str:
    """The model, sampler or session id that ``token`` made ``text`` of."""
    return text.replace("-", ":")


def checkpoint_key(path: CheckpointPath) -> str:
    """The registry key of a checkpoint: one token, unique by hash of the whole path."""
    return f"{token(path.model_id)}-{blake3(str(path).encode()).hexdigest()[:16]}"


def pool_token(base_model: str) -> str:
    """A base model's name as one subject token: readable, unique by hash."""
    slug = re.sub(r"[^A-Za-z0-9]+", "_", base_model).strip("_")[:40]
    return f"{slug}-{blake3(base_model.encode()).hexdigest()[:8]}"


def _check(pattern: re.Pattern[str], text: str, field: str) -> str:
    if pattern.fullmatch(text) is None:
        raise InvalidRequest(f"{field}: {text[:80]!r} is not an id that this server gives out")
    return text
