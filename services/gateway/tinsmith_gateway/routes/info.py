"""Questions about models, checkpoints and sampling sessions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tinsmith_gateway import bodies, responses, versions
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import OWNER
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.listings import optimizer_config


async def get_server_capabilities(request: web.Request) -> web.Response:
    """The base models that are served, and to which versions of the client."""
    supported = request.app[GATEWAY].models.capabilities()
    return responses.of_json({"supported_models": supported, "client_versions": versions.RANGE})


async def get_info(request: web.Request) -> web.Response:
    """A model's base model, shape and tokenizer."""
    gateway = request.app[GATEWAY]
    asked = await bodies.read_json(request, requests.ModelRef)
    run = await gateway.registry.run(request[OWNER], asked.model_id)
    data = {"model_name": run.base_model}
    if (served := gateway.models.describe(run.base_model)) is not None:
        # Without a tokenizer id the client goes by the model's name.
        data |= {"arch": served.arch, "tokenizer_id": served.tokenizer_id or run.base_model}
    return responses.of_json(
        {
            "type": "get_info",
            "model_id": run.model_id,
            "model_name": run.base_model,
            "model_data": data,
            "optimizer_config": optimizer_config(run.optimizer),
            "is_lora": run.lora.rank > 0,
            "lora_rank": run.lora.rank or None,
        }
    )


async def weights_info(request: web.Request) -> web.Response:
    """A checkpoint's base model and shape."""
    asked = await bodies.read_json(request, requests.WeightsInfo)
    checkpoint = await request.app[GATEWAY].registry.checkpoint(request[OWNER], asked.tinker_path)
    lora = checkpoint.lora
    return responses.of_json(
        {
            "base_model": checkpoint.base_model,
            "is_lora": lora.rank > 0,
            "lora_rank": lora.rank or None,
            "train_unembed": lora.train_unembed,
            "train_mlp": lora.train_mlp,
            "train_attn": lora.train_attn,
            "optimizer_config": optimizer_config(checkpoint.optimizer),
        }
    )


async def get_sampler(request: web.Request) -> web.Response:
    """What a sampling session samples from."""
    sampler = await request.app[GATEWAY].registry.sampler(
        request[OWNER], request.match_info["sampler_id"]
    )
    answer: dict[str, Any] = {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model}
    if sampler.model_path is not None:
        answer["model_path"] = sampler.model_path
    return responses.of_json(answer)


ROUTES = (
    web.get("/api/v1/get_server_capabilities", get_server_capabilities),
    web.post("/api/v1/get_info", get_info),
    web.post("/api/v1/weights_info", weights_info),
    web.get("/api/v1/samplers/{sampler_id}", get_sampler),
)
