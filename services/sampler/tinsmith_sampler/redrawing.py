"""Engines that are set up as logged samples say, to draw these again.

What decides bits is taken from the log, as far as this machine can do it: the base weights and
their precision, the kind of device, the threads, the length of the context.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import msgspec

from tinsmith import whole
from tinsmith.cores import threads
from tinsmith.errors import ServerError
from tinsmith.model_files import Quantization
from tinsmith_sampler.answering import answer
from tinsmith_sampler.checks import Limits
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.kv_cache import PAGE
from tinsmith_sampler.model import TorchOptions, device_of
from tinsmith_sampler.residency import Residency
from tinsmith_sampler.torch_engine import TorchEngine
from tinsmith_sampler.whole_models import WholeModels

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from tinsmith.config import Config, ModelConfig
    from tinsmith.logbook.samples import Samples
    from tinsmith.messages.sampling import AdapterRef, SampleContent, SampleRecord

_TAKEN = ("base_blake3", "dtype", "quantization", "threads", "context_length")
"""Keys of an environment that are taken from the log, or must be as it says."""

DTypeName = Literal["float32", "bfloat16"]


class Setting(NamedTuple):
    """What an engine is set up by; texts as they stand in the log, empty where it says nothing."""

    base_model: str
    engine: str
    base_blake3: str
    dtype: str
    quantization: str
    device: str
    threads: str
    context_length: str


def setting_of(record: SampleRecord) -> Setting:
    """What the sampler of ``record`` was set up as."""
    told = record.environment
    names = Setting._fields[1:]
    return Setting(record.request.base_model, *(told.get(name, "") for name in names))


class Redrawing:
    """Draws logged samples of one setting again. Made by ``open_engine``."""

    def __init__(
        self, engine: TorchEngine, samples: Samples, max_adapters: int, wholes: WholeModels
    ) -> None:
        self.environment = engine.environment
        """What this machine computes with."""
        self._engine = engine
        self._samples = samples
        self._adapters = Residency(engine, max_adapters)
        self._wholes = wholes

    async def redraw(self, record: SampleRecord, content: SampleContent) -> SampleContent:
        """What the request of ``record`` is answered here.

        Raises:
            BlobMissing: the weights are not there any more.
            UserError: it is none that could have been answered.
        """
        params = msgspec.structs.replace(record.request.params, stop_strings=content.stop_strings)
        request = msgspec.structs.replace(
            record.request,
            prompt=content.prompt,
            params=params,
            target_tokens=content.target_tokens,
        )
        limits = Limits(
            vocab_size=self._engine.vocab_size,
            context_length=self._engine.context_length,
            max_samples=len(content.sequences),
            max_topk=self._engine.vocab_size,
        )
        if request.adapter is None:
            done = await answer(self._engine, request, limits)
        elif whole.holds_whole(request.adapter.files):
            async with self._wholes.hold(request.adapter) as engine:
                done = await answer(engine, request, limits)
        else:
            adapter = request.adapter
            async with self._adapters.hold(adapter.version, lambda: self._fetch(adapter)):
                done = await answer(self._engine, request, limits)
        return msgspec.structs.replace(
            content,
            sequences=done.sequences,
            prompt_logprobs=done.prompt_logprobs,
            topk_prompt_logprobs=done.topk_prompt_logprobs,
            target_prompt_logprobs=done.target_prompt_logprobs,
            prompt_alt_tokens=done.prompt_alt_tokens,
        )

    async def _fetch(self, adapter: AdapterRef) -> dict[str, bytes]:
        return {name: await self._samples.blob(ref) for name, ref in adapter.files.items()}


@asynccontextmanager
async def open_engine(
    setting: Setting, samples: Samples, config: Config
) -> AsyncIterator[Redrawing]:
    """An engine set up as ``setting`` says, and where that is silent, as configured.

    Raises:
        StartupError: the base model is not configured here, or cannot be loaded.
        ServerError: the samples were drawn from other base weights, or by another engine.
    """
    _check_engine(setting)
    settings, model = config.section(SamplerConfig), config.model(setting.base_model)
    context_length = _number(setting, "context_length") or model.context_length
    options = TorchOptions(
        model_path=model.source,
        dtype=cast("DTypeName", _one_of(DTypeName, setting, model, "dtype")),
        quantization=cast("Quantization", _one_of(Quantization, setting, model, "quantization")),
        device=_device(setting, settings),
        threads=_number(setting, "threads") or threads(settings.threads),
        max_rows=settings.max_rows,
        # Two of the longest texts must fit, or the context would be shorter.
        kv_tokens=max(settings.cache_tokens, 2 * ((context_length or 0) + PAGE)),
        context_length=context_length,
        max_lora_rank=settings.max_lora_rank,
    )
    engine = TorchEngine(options)
    wholes = WholeModels(options, samples.blob, limit=settings.max_whole)
    await engine.start()
    try:
        found = engine.environment["base_blake3"]
        if setting.base_blake3 not in ("", found):
            raise ServerError(
                f"base_blake3: the samples were drawn from {setting.base_blake3}, but "
                f"{model.source} is {found}; set path in [[models]] to the weights of that time"
            )
        yield Redrawing(engine, samples, settings.max_adapters, wholes)
    finally:
        await wholes.close()
        await engine.close()


def _check_engine(setting: Setting) -> None:
    """The same seed is another draw in another engine: to compare them would prove nothing."""
    if setting.engine not in ("", "torch"):
        raise ServerError(
            f"environment: samples of {setting.base_model} were drawn by the engine "
            f"{setting.engine!r}, and the replay has the torch engine alone, which draws other "
            "tokens from the same seeds; they cannot be drawn again here"
        )


def departures(told: dict[str, str], ours: dict[str, str]) -> Iterable[str]:
    """In which ways a sample was drawn otherwise than this machine does."""
    for key in sorted(told.keys() & ours.keys()):
        if key not in _TAKEN and told[key] != ours[key]:
            yield f"{key}: {told[key]} in the log, {ours[key]} here; the last bits may differ"
    if unsaid := [key for key in _TAKEN if key not in told]:
        yield f"the log does not say {', '.join(unsaid)}; taken from the configuration"


def _one_of(names: object, setting: Setting, model: ModelConfig, key: str) -> str:
    """What the log says of ``key``, or else the configuration; ServerError for an unknown name."""
    name: str = getattr(setting, key) or getattr(model, key)
    if name not in get_args(names):
        raise ServerError(f"environment: {key} is {name!r} in the log; this version has no such")
    return name


def _device(setting: Setting, settings: SamplerConfig) -> str:
    """The kind that the log says, if this machine has it and none is configured."""
    if settings.device == "auto" and setting.device.startswith("cpu"):
        return "cpu"
    return device_of(settings.device)


def _number(setting: Setting, key: str) -> int | None:
    text = getattr(setting, key)
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise ServerError(f"environment: {key} is {text!r} in the log, not a number over 0")
    return int(text)
