"""How the settings of a sampler become engines on SGLang."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith import ids, model_files
from tinsmith.cores import threads
from tinsmith.errors import ConfigError
from tinsmith.paths import DataDir
from tinsmith_sampler.model import device_of
from tinsmith_sampler.sglang.engine import SglangEngine
from tinsmith_sampler.sglang.inspecting import SPARE_TOKENS
from tinsmith_sampler.sglang.launching import SglangOptions, default_python
from tinsmith_sampler.sglang.server import GivenServer, OwnServer
from tinsmith_sampler.sglang.whole_engine import SglangWholeEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.config import ModelConfig
    from tinsmith_sampler.config import SamplerConfig
    from tinsmith_sampler.sglang.base_model import BaseModel
    from tinsmith_sampler.sglang.server import SglangServer


WHOLE_FAMILIES = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe"})
"""``model_type`` of models whose weights were seen to be replaced bit for bit."""


def sglang_engine(
    model: ModelConfig, config: SamplerConfig, data_dir: Path, figures: dict[str, float]
) -> SglangEngine:
    """An engine that was not started; ConfigError when the model cannot have one."""
    _check(model, config)

    def new_server(base: BaseModel) -> SglangServer:
        if config.sglang_url:
            return GivenServer(config.sglang_url, key=config.sglang_api_key)
        return OwnServer(_options(model, config, base), _log_file(model, data_dir))

    return SglangEngine(
        model.source,
        new_server,
        max_rows=config.max_rows,
        max_rank=config.max_lora_rank,
        context_length=model.context_length,
        figures=figures,
    )


def sglang_wholes(
    model: ModelConfig, config: SamplerConfig, data_dir: Path
) -> Callable[[str], SglangWholeEngine]:
    """What makes engines for models that were trained whole, from their folders.

    Each is a server of its own, beside that of the base model.
    """
    numbers = count(1)

    def new_engine(source: str) -> SglangWholeEngine:
        log = _log_file(model, data_dir, f"-whole-{next(numbers)}")

        def new_server(base: BaseModel) -> SglangServer:
            return OwnServer(replace(_options(model, config, base), is_whole=True), log)

        return SglangWholeEngine(
            source,
            new_server,
            max_rows=config.max_rows,
            max_rank=config.max_lora_rank,
            context_length=model.context_length,
        )

    return new_engine


def _check(model: ModelConfig, config: SamplerConfig) -> None:
    if config.sglang_url and (config.sglang_python or config.sglang_args):
        raise ConfigError(
            "sampler.sglang_url: with it no server is started here, so sglang_python and "
            "sglang_args say nothing; leave out the one or the others"
        )
    if model.full:
        _check_whole(model, config)
    if model.quantization != "none":
        raise ConfigError(
            f"sampler.engine: {model.name!r} has quantization = {model.quantization!r}, which "
            'engine = "sglang" would round otherwise than the trainer; set engine = "torch", or '
            "quantization to none"
        )


def _check_whole(model: ModelConfig, config: SamplerConfig) -> None:
    if config.sglang_url:
        raise ConfigError(
            f"sampler.sglang_url: {model.name!r} has full = true, which takes servers that are "
            "started here, since their weights are replaced; leave out one of both"
        )
    family = model_files.find(model.source).family
    if family not in WHOLE_FAMILIES:
        raise ConfigError(
            f'sampler.engine: {model.name!r} has full = true, but engine = "sglang" replaces the '
            f"weights of {', '.join(sorted(WHOLE_FAMILIES))} alone, not of {family}; set "
            'engine = "torch", or leave full out'
        )


def _options(model: ModelConfig, config: SamplerConfig, base: BaseModel) -> SglangOptions:
    python = Path(config.sglang_python).expanduser() if config.sglang_python else None
    context_length = None
    if model.context_length is not None:
        context_length = min(model.context_length + SPARE_TOKENS, base.context_length)
    return SglangOptions(
        python=python or default_python(),
        model_path=str(base.folder),
        dtype=model.dtype,
        device=device_of(config.device),
        threads=threads(config.threads),
        max_rows=config.max_rows,
        cache_tokens=config.cache_tokens,
        context_length=context_length,
        max_adapters=config.max_adapters,
        max_lora_rank=config.max_lora_rank,
        lora_targets=tuple(sorted({layer.rpartition(".")[2] for layer in base.layers})),
        routed_experts=config.routed_experts and base.mixture is not None,
        extra=config.sglang_args,
    )


def _log_file(model: ModelConfig, data_dir: Path, which: str = "") -> Path:
    return DataDir(data_dir).run / f"sglang-{ids.pool_token(model.name)}{which}.log"
