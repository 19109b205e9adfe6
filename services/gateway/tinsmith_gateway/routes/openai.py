"""OpenAI's routes for models, completions and chat."""

from __future__ import annotations

import json
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tinsmith.errors import TinsmithError
from tinsmith.messages.failures import message_of
from tinsmith_gateway import bodies, responses
from tinsmith_gateway.gateway import GATEWAY, Gateway
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.openai import errors
from tinsmith_gateway.openai.answer import Answer
from tinsmith_gateway.openai.forms import ChatForm, CompletionForm
from tinsmith_gateway.openai.options import Chat, Completion, decode
from tinsmith_gateway.openai.samples import samples_of
from tinsmith_gateway.openai.sources import base_models, source_of
from tinsmith_gateway.wire.results import JSON

if TYPE_CHECKING:
    from tinsmith_gateway.openai.forms import Form
    from tinsmith_gateway.openai.options import Options
    from tinsmith_gateway.openai.sources import Source

_SSE = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_DONE = b"data: [DONE]\n\n"


async def list_models(request: web.Request) -> web.Response:
    """Base models, and the caller's weights that were saved for sampling."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    listed = [_model(name) for name in base_models(gateway)]
    for run in gateway.registry.runs.group(owner):
        listed += [
            _model(saved.path, saved.created_ns, owner)
            for saved in gateway.registry.listed_checkpoints(run.model_id)
            if saved.kind == "sampler_weights"
        ]
    return responses.of_json({"object": "list", "data": listed})


async def get_model(request: web.Request) -> web.Response:
    """One that can be sampled from, listed or not."""
    source = await source_of(request.app[GATEWAY], request[OWNER], request.match_info["model"])
    return responses.of_json(_model(source.name))


async def completions(request: web.Request) -> web.StreamResponse:
    """Continues texts, or tokens."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    options = decode(await bodies.read(request, JSON), Completion)
    source = await source_of(gateway, owner, options.model)
    prompts = [await _tokens(gateway, source, prompt) for prompt in options.prompts]
    return await _answer(request, source, options, prompts, CompletionForm())


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation, written out by the model's own chat template."""
    gateway, owner = request.app[GATEWAY], request[OWNER]
    options = decode(await bodies.read(request, JSON), Chat)
    source = await source_of(gateway, owner, options.model)
    prompt = await gateway.openai.texts.render(source.base_model, options.conversation)
    return await _answer(request, source, options, [prompt.tolist()], ChatForm())


async def _tokens(gateway: Gateway, source: Source, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    tokens: list[int] = (await gateway.openai.texts.tokenize(source.base_model, prompt)).tolist()
    return tokens


async def _answer(
    request: web.Request, source: Source, options: Options, prompts: list[list[int]], form: Form
) -> web.StreamResponse:
    gateway, owner = request.app[GATEWAY], request[OWNER]
    samples = await samples_of(gateway, owner, source, options, prompts)
    answer = Answer(gateway, owner, options, samples, form)
    if options.stream:
        return await _stream(request, answer)
    return responses.of_json(await answer.whole(lambda: _is_gone(request)))


async def _stream(request: web.Request, answer: Answer) -> web.StreamResponse:
    """Server-sent events; an error before the first of them is an answer of its own."""
    response = web.StreamResponse(headers=_SSE)
    with suppress(ConnectionResetError):  # it went away: its samples have been cancelled
        await _write(request, response, answer)
    return response


async def _write(request: web.Request, response: web.StreamResponse, answer: Answer) -> None:
    try:
        async with aclosing(answer.chunks(lambda: _is_gone(request))) as chunks:
            async for chunk in chunks:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(_event(chunk))
        await response.write(_DONE)
    except TinsmithError as error:
        if not response.prepared:
            raise
        await response.write(_event(errors.body(responses.status_of(error), message_of(error))))


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _model(name: str, created_ns: int = 0, owner: str = "tinsmith") -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created_ns // 10**9, "owned_by": owner}


ROUTES = (
    web.get("/v1/models", list_models),
    web.get("/v1/models/{model:.+}", get_model),
    web.post("/v1/completions", completions),
    web.post("/v1/chat/completions", chat_completions),
)
