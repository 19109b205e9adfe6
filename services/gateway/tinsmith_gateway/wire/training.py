"""JSON training requests as op bodies.

Every function raises UserError for content that is wrong; who calls it decides whether that
refuses the request or becomes a ``Refused`` op that takes its place in the sequence.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tinsmith import age, ids, whole
from tinsmith.errors import InvalidRequest, NotSupported, UserError
from tinsmith.messages import ops
from tinsmith.messages.failures import to_failed
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.labels import check_metadata
from tinsmith_gateway.wire.seeds import seed_for

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 24 * 3600


def sequenced(raw: bytes) -> requests.Sequenced:
    """The model and the place that a request claims; InvalidRequest when it cannot be told."""
    head = requests.decode(raw, requests.Sequenced)
    ids.check_model_id(head.model_id)
    return head


def lazily(build: Callable[[], ops.OpBody]) -> ops.OpBody:
    """What ``build`` makes; for a content that is wrong, an op that only fails its future."""
    try:
        return build()
    except UserError as error:
        return refused(error)


def refused(error: UserError, *, asked_blake3: str = "") -> ops.Refused:
    """An op that takes its place in the sequence and fails its future with ``error``.

    ``asked_blake3`` is of the body that was asked for, where it may be taken another time.
    """
    return ops.Refused(reason=to_failed(error), asked_blake3=asked_blake3)


def lora_shape(asked: requests.LoraConfig | None, *, max_rank: int, model_id: str) -> ops.LoraShape:
    """The adapter's shape; ``max_rank`` is the trainers' limit for the base model."""
    if asked is None:
        raise InvalidRequest(
            "lora_config: missing; ask for an adapter with lora_config.rank, or for all weights "
            f"by the model's name with {whole.SUFFIX!r} behind it"
        )
    rank = asked.rank
    if not 1 <= rank <= max_rank or rank & (rank - 1):
        raise InvalidRequest(
            f"lora_config.rank: {rank} is not a power of two from 1 to {max_rank}; "
            "use one, e.g. 8, 16 or 32"
        )
    if not (asked.train_attn or asked.train_mlp or asked.train_unembed):
        raise InvalidRequest(
            "lora_config: train_attn, train_mlp and train_unembed are all false, "
            "which leaves nothing to train; set at least one"
        )
    return ops.LoraShape(
        rank=rank,
        seed=seed_for(asked.seed, model_id),
        train_attn=asked.train_attn,
        train_mlp=asked.train_mlp,
        train_unembed=asked.train_unembed,
    )


def whole_shape(asked: requests.LoraConfig | None) -> ops.LoraShape:
    """The shape of a model that is trained whole, where rank and seed mean nothing."""
    for field in ("train_attn", "train_mlp", "train_unembed"):
        if asked is not None and not getattr(asked, field):
            raise InvalidRequest(
                f"lora_config.{field}: false, but a model with {whole.SUFFIX!r} in its name has "
                "every weight trained; leave it true, or train an adapter on the plain name"
            )
    return ops.WHOLE


def optimizer(config: requests.OptimizerConfig | None) -> ops.OptimizerFamily:
    """The family asked for; NotSupported for one that is unknown here."""
    if config is None or config.type == "adamw":
        return "adamw"
    if config.type != "dimuon":
        raise NotSupported(
            f"optimizer_config.type: {config.type[:80]!r} is not supported; use 'adamw' or 'dimuon'"
        )
    if config.version != 1:
        raise NotSupported(f"optimizer_config.version: {config.version} is not supported; use 1")
    return "dimuon"


def optim_step(raw: bytes) -> ops.OptimStep:
    """One step of either optimizer; whether it is the model's is not decided here."""
    asked = requests.decode(raw, requests.OptimStep)
    if asked.optimizer_params is not None:
        if asked.adam_params is not None:
            raise InvalidRequest("adam_params, optimizer_params: both are given; send one of them")
        return _dimuon_step(asked.optimizer_params)
    if (adam := asked.adam_params) is None:
        raise InvalidRequest("adam_params: missing; send AdamParams with the step")
    _check_number("learning_rate", adam.learning_rate)
    _check_number("beta1", adam.beta1, below=1.0)
    _check_number("beta2", adam.beta2, below=1.0)
    _check_number("eps", adam.eps)
    _check_number("weight_decay", adam.weight_decay)
    _check_number("grad_clip_norm", adam.grad_clip_norm)
    return ops.OptimStep(
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=adam.grad_clip_norm,
    )


def _dimuon_step(params: dict[str, Any]) -> ops.OptimStep:
    family = str(params.get("type"))[:80]
    if family != "dimuon":
        raise NotSupported(
            f"optimizer_params.type: {family!r} is not supported; send DimuonParams, or "
            "adam_params (AdamW)"
        )
    dimuon = requests.convert(params, requests.DimuonParams, "optimizer_params")
    _check_number("learning_rate", dimuon.learning_rate, of="optimizer_params")
    _check_number("beta1", dimuon.beta1, below=1.0, of="optimizer_params")
    if not math.isfinite(dimuon.grad_clip_norm):
        raise InvalidRequest(
            f"optimizer_params.grad_clip_norm: {dimuon.grad_clip_norm} is not a finite number"
        )
    return ops.OptimStep(
        optimizer="dimuon",
        learning_rate=dimuon.learning_rate,
        beta1=dimuon.beta1,
        grad_clip_norm=max(0.0, dimuon.grad_clip_norm),  # none from 0 down, by the client's word
    )


def save_weights(raw: bytes) -> ops.SaveWeights:
    """A named checkpoint with optimizer state."""
    asked = requests.decode(raw, requests.SaveWeights)
    return ops.SaveWeights(
        name=ids.check_name(asked.path),
        overwrite=asked.overwrite,
        ttl_s=check_ttl(asked.ttl_seconds),
        user_metadata=_sorted(asked.user_metadata),
    )


def save_weights_for_sampler(raw: bytes, session_id: str) -> ops.SaveWeightsForSampler:
    """Weights to sample from, named or as a sampling session of ``session_id``."""
    asked = requests.decode(raw, requests.SaveWeightsForSampler)
    order = asked.sampling_session_seq_id
    if (asked.path is None) == (order is None):
        raise InvalidRequest(
            "path, sampling_session_seq_id: exactly one is needed; "
            "the first names the weights, the second makes a sampling session of them"
        )
    return ops.SaveWeightsForSampler(
        name=None if asked.path is None else ids.check_name(asked.path),
        sampling_session_id=None if order is None else ids.sampler_id(session_id, order),
        is_inflight=order is not None and asked.kind == "inflight",
        ttl_s=check_ttl(asked.ttl_seconds),
        user_metadata=_sorted(asked.user_metadata),
    )


def save_weights_external(raw: bytes) -> ops.SaveWeightsExternal:
    """Weights to download, in the clear or for recipients only."""
    asked = requests.decode(raw, requests.SaveWeightsExternal)
    return ops.SaveWeightsExternal(
        name=ids.check_name(asked.path),
        ttl_s=check_ttl(asked.ttl_seconds),
        recipients=age.check_recipients(
            asked.age_encryption_recipients or (), "age_encryption_recipients"
        ),
    )


def load_weights(raw: bytes) -> ops.LoadWeights:
    """A load into an existing model; whether the checkpoint can be loaded is not decided here."""
    asked = requests.decode(raw, requests.LoadWeights)
    return ops.LoadWeights(path=asked.path, with_optimizer=asked.optimizer)


def _sorted(metadata: dict[str, str] | None) -> dict[str, str]:
    """In one order: equal requests must give equal ops. InvalidRequest when it is too much."""
    return dict(sorted(check_metadata(metadata or {}).items()))


def check_ttl(ttl_s: int | None) -> int | None:
    """``ttl_s`` itself; InvalidRequest when it is out of range."""
    if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise InvalidRequest(
            f"ttl_seconds: {ttl_s} is outside {MIN_TTL_S} (an hour) to {MAX_TTL_S} (ten years); "
            "leave it out to keep the checkpoint"
        )
    return ttl_s


def _check_number(
    field: str, value: float, *, below: float = math.inf, of: str = "adam_params"
) -> None:
    # NaN fails the comparison.
    if not 0.0 <= value < below:
        limit = "a finite number from 0" if below == math.inf else f"from 0 and below {below:g}"
        raise InvalidRequest(f"{of}.{field}: {value} is not {limit}")
