"""What a start of an SGLang server is, and whether it computes what the engine promises.

A server by URL was set up by somebody else, and each of these settings would change numbers without
a word: seeds that are ignored, log-probabilities at the temperature, other weights after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from tinsmith.errors import StartupError
from tinsmith_sampler.sglang.logprobs import NotFinite, chosen
from tinsmith_sampler.sglang.wire import Generate, Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tinsmith_sampler.sglang.base_model import BaseModel
    from tinsmith_sampler.sglang.client import SglangClient
    from tinsmith_sampler.sglang.wire import ServerInfo

SPARE_TOKENS = 7
"""Of a server's context, which no request can use."""
_HOT = 4.0
"""A temperature at which log-probabilities are nothing like those at 1."""
_TRIED = 8  # tokens
_SAME = 0.5  # nats; two ways to order sums of bfloat16 differ by less, two temperatures by more


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What was found. Equal ones give the same numbers."""

    version: str
    device: str
    dtype: str
    context_length: int  # tokens of a prompt and its continuation together
    base_checksum: str  # blake3 over the server's own checksums of all tensors
    routed_experts: bool = field(default=False, compare=False)  # whether it tells them


async def inspect(
    client: SglangClient, model: BaseModel, *, max_rank: int, context_length: int | None
) -> Inspection:
    """Look at a server that answers; SglangError when it ends meanwhile.

    Raises:
        StartupError: it is set up in a way in which it would give other numbers than promised.
    """
    info = await client.server_info()
    _check_settings(info, client.url, max_rank)
    await _check_logprobs(client, model)
    room = [model.context_length, _longest(info, model), context_length or model.context_length]
    return Inspection(
        version=info.version,
        device=info.device or "unknown",
        dtype=info.dtype or "unknown",
        context_length=min(room),
        base_checksum=_digest(await client.checksums()),
        routed_experts=info.enable_return_routed_experts,
    )


def _longest(info: ServerInfo, model: BaseModel) -> int:
    """Tokens that surely fit: a prompt has to be shorter than what the server tells."""
    if info.max_req_input_len is None:
        return model.context_length - SPARE_TOKENS
    return info.max_req_input_len - 1


def _check_settings(info: ServerInfo, url: str, max_rank: int) -> None:
    if info.max_lora_rank is not None and info.max_lora_rank < max_rank:
        raise StartupError(
            f"sglang: the server at {url} takes adapters up to rank {info.max_lora_rank}, the "
            f"sampler up to {max_rank}; raise its --max-lora-rank or lower sampler.max_lora_rank"
        )


async def _check_logprobs(client: SglangClient, model: BaseModel) -> None:
    """Tokens that are drawn hot must have the log-probabilities that scoring gives them."""
    start = min(1, model.vocab_size - 1)
    drawing = Sampling(sampling_seed=1, max_new_tokens=_TRIED, temperature=_HOT, ignore_eos=True)
    drawn = await client.generate(Generate(rid="trial", input_ids=[start], sampling_params=drawing))
    scoring = Generate(
        rid="trial",
        input_ids=[start, *drawn.output_ids],
        sampling_params=Sampling(sampling_seed=1, max_new_tokens=0),
        logprob_start_len=0,
    )
    scored = await client.generate(scoring)
    if drawn.output_ids and max(drawn.output_ids) >= model.vocab_size:
        raise StartupError(
            f"sglang: the server at {client.url} drew token {max(drawn.output_ids)}, but the "
            f"vocabulary of {model.folder} has {model.vocab_size}; it serves another model"
        )
    try:
        count = len(drawn.output_ids)
        told = chosen(drawn.meta_info.output_token_logprobs, count)
        true = chosen((scored.meta_info.input_token_logprobs or [])[1:], count)
    except NotFinite:
        raise StartupError(
            f"sglang: the logits of the server at {client.url} are not finite; check the model's "
            "files and dtype"
        ) from None
    _check_same(told, true, client.url)


def _check_same(told: NDArray[np.float32], true: NDArray[np.float32], url: str) -> None:
    off = float(np.abs(told - true).max(initial=0.0))
    if off > _SAME:
        raise StartupError(
            f"sglang: the server at {url} gives log-probabilities at the temperature that it draws "
            f"at ({off:.2f} nats off at {_HOT:g}); start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        )


def _digest(checksums: dict[str, str]) -> str:
    text = "".join(f"{name} {checksum}\n" for name, checksum in sorted(checksums.items()))
    return blake3(text.encode()).hexdigest()
