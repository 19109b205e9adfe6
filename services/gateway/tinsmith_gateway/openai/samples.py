"""Prompts and options as the samples that are drawn; every check that needs no model is here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tinsmith import ids
from tinsmith.errors import InvalidRequest, TooLarge
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.sampling import Limits, Target, sample

if TYPE_CHECKING:
    from tinsmith.messages.sampling import Sample
    from tinsmith_gateway.gateway import Gateway
    from tinsmith_gateway.openai.options import Options
    from tinsmith_gateway.openai.sources import Source


async def samples_of(
    gateway: Gateway, owner: str, source: Source, options: Options, prompts: list[list[int]]
) -> list[Sample]:
    """One sample for each prompt; InvalidRequest and TooLarge name the field that is wrong."""
    config = gateway.config
    _check_range("n", options.n, 1, config.max_samples)
    if len(prompts) * options.n > config.max_samples:
        raise InvalidRequest(
            f"prompt: {len(prompts)} prompts with {options.n} continuations each are over the "
            f"limit of {config.max_samples}; send fewer in one request"
        )
    if options.return_routed_experts:
        _check_routed(prompts, options.n, config.max_request_tokens)
    _check_range(options.name_of_top, options.top or 0, 0, config.max_topk_logprobs)
    seat = await gateway.openai.guests.seat(owner, source)
    limits = Limits(
        max_samples=config.max_samples,
        max_topk=config.max_topk_logprobs,
        max_tokens=config.max_request_tokens,
        vocab_size=source.served.vocab_size,
        context_length=source.served.context_length,
    )
    tell = gateway.openai.inbox.address if options.stream else ""
    made = []
    for prompt in prompts:
        _check_room(len(prompt), options, source)
        target = Target(
            request_id=ids.future_id(seat.sampler.sampler_id, seq := next(seat.numbers)),
            sampler_id=seat.sampler.sampler_id,
            base_model=source.base_model,
            adapter=source.adapter,
        )
        asked = requests.Sample(
            seq_id=seq,
            num_samples=options.n,
            prompt=requests.Prompt(chunks=[requests.Chunk(tokens=prompt)]),
            sampling_params=options.params,
            topk_sample_logprobs=options.top,
        )
        more = {"tell": tell, "routed_experts": options.return_routed_experts}
        made.append(msgspec.structs.replace(sample(asked, target, limits), **more))
    return made


def _check_routed(prompts: list[list[int]], n: int, most: int) -> None:
    """Each continuation tells the experts of its prompt's tokens anew; samplers know the bytes."""
    tokens = n * sum(map(len, prompts))
    if tokens > most:
        raise TooLarge(
            f"return_routed_experts: the tokens of the prompts, told with each of {n} "
            f"continuations, are {tokens}, over the limit of {most}; lower n, shorten the prompts, "
            "or ask in several requests"
        )


def _check_room(prompt: int, options: Options, source: Source) -> None:
    """Before anything of a streamed answer is sent, since that cannot be taken back."""
    context = source.served.context_length
    drawn = 1 if options.length is None else options.length
    if prompt + drawn > context:
        raise InvalidRequest(
            f"max_tokens: a prompt of {prompt} tokens and {drawn} to draw are {prompt + drawn}, "
            f"over the model's context of {context}; shorten the prompt or lower max_tokens"
        )


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{field}: {value} is outside {low} to {high}")
