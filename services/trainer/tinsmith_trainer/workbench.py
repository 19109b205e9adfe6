"""An engine set up as a log's environment says, on a thread of its own.

What decides bits is taken from the log, as far as this machine can do it: the base weights and
their precision, the kind of device, the threads, the size of a pass.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar, cast, get_args

import torch

from tinsmith.cores import threads
from tinsmith.errors import ServerError, UserError
from tinsmith.messages.failures import to_failed
from tinsmith_trainer import base_model, canonical
from tinsmith_trainer.base_model import DTypeName
from tinsmith_trainer.checkpoint_files import refs, to_files
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.engine import EngineOp, TrainingEngine
from tinsmith_trainer.environment import describe
from tinsmith_trainer.loading import MICROBATCH_TOKENS
from tinsmith_trainer.state import digest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tinsmith.config import Config, ModelConfig
    from tinsmith.logbook import Logbook
    from tinsmith.messages import ops
    from tinsmith.messages.base import BlobRef
    from tinsmith_trainer.base_model import DeviceName
    from tinsmith_trainer.parts import Past

R = TypeVar("R")

Environment = dict[str, str]

_TAKEN = ("base_model", "base_blake3", "dtype", "threads", "microbatch_tokens")
"""Keys of an environment that are taken from the log, or must be as it says."""

_OF_OPS = ("ranks",)
"""Keys that do not matter here, as each op tells for itself."""


class Workbench:
    """Carries out ops of one model at a time. Made by ``open_workbench``."""

    def __init__(
        self,
        engine: TrainingEngine,
        environment: Environment,
        logbook: Logbook,
        thread: ThreadPoolExecutor,
    ) -> None:
        self.environment = environment
        """What this machine computes with."""
        self._engine = engine
        self._logbook = logbook
        self._thread = thread

    async def set_up(self, environment: Environment) -> None:
        """Compute from now on as an owner with ``environment`` did."""
        count = _number(environment, "threads")
        if count is not None:
            # On the thread itself: OpenMP has a number for each.
            await self._run(lambda: torch.set_num_threads(count))
        self._engine.microbatch_tokens = (
            _number(environment, "microbatch_tokens") or self._engine.microbatch_tokens
        )

    async def execute(self, op: ops.Op, past: Past) -> ops.OpResult:
        """Create, forward-backward or step; a mistake in the op is its result."""
        body = cast("EngineOp", op.body)
        try:
            return await self._run(lambda: self._engine.apply(op.model_id, body, past))
        except UserError as exc:
            return to_failed(exc)

    async def restore(
        self,
        model_id: str,
        parts: dict[str, BlobRef],
        *,
        with_optimizer: bool,
        optimizer: ops.OptimizerFamily = "adamw",
    ) -> ops.CreateModelDone:
        """Give the model the state in ``parts``.

        Raises:
            BlobMissing: the logbook lacks one of them.
            InvalidRequest: they are not a checkpoint that fits.
        """
        files = {name: await self._logbook.blob(ref) for name, ref in parts.items()}
        return await self._run(
            lambda: self._engine.restore(
                model_id, files, with_optimizer=with_optimizer, optimizer=optimizer
            )
        )

    async def parts(self, model_id: str, *, with_optimizer: bool) -> dict[str, BlobRef]:
        """What a checkpoint of the model as it is would consist of; nothing is written."""
        return await self._run(
            lambda: refs(to_files(self._engine.snapshot(model_id), with_optimizer=with_optimizer))
        )

    async def root(self, model_id: str) -> str:
        """By which a lineage would know the model as it is."""
        return await self._run(lambda: canonical.root(self._engine.snapshot(model_id)))

    async def state_blake3(self, model_id: str) -> str:
        """The digest of the model's present state."""
        return await self._run(lambda: digest(self._engine.state(model_id)))

    async def _run(self, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


@asynccontextmanager
async def open_workbench(
    environments: Sequence[Environment], config: Config, logbook: Logbook
) -> AsyncIterator[Workbench]:
    """Load the base model that a log's owners computed on; ``set_up`` does the rest for each.

    Raises:
        StartupError: the base model is not configured here, or cannot be loaded.
        ServerError: an owner of the log computed on other weights.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch") as thread:
        loop = asyncio.get_running_loop()
        engine, ours = await loop.run_in_executor(thread, _load, environments, config)
        yield Workbench(engine, ours, logbook, thread)


def _load(
    environments: Sequence[Environment], config: Config
) -> tuple[TrainingEngine, Environment]:
    told, settings = environments[0], config.section(TrainerConfig)
    model = config.model(told["base_model"])
    torch.set_num_threads(threads(settings.threads))
    base = base_model.load(
        model.source,
        name=model.name,
        dtype=_dtype(told, model),
        quantization=model.quantization,
        device=_device(told, settings),
        context_length=model.context_length,
        tokenizer_id=model.tokenizer,
    )
    tokens = settings.microbatch_tokens or MICROBATCH_TOKENS[base.device.type]
    ours = describe(base, microbatch_tokens=tokens)
    for environment in environments:
        _check_base(environment, ours, model.source)
    return TrainingEngine(base, microbatch_tokens=tokens), ours


def _check_base(told: Environment, ours: Environment, source: str) -> None:
    for key in ("base_model", "base_blake3"):
        if told.get(key, ours[key]) != ours[key]:
            raise ServerError(
                f"{key}: the log was computed on {told[key]}, but {source} is {ours[key]}; set "
                "path in [[models]] to the weights of that time"
            )


def departures(environments: Sequence[Environment], ours: Environment) -> tuple[str, ...]:
    """In which ways a log's owners computed otherwise than this machine does."""
    found = []
    for told in environments:
        found += [
            f"{key}: {told[key]} in the log, {ours[key]} here; the last bits may differ"
            for key in sorted(told.keys() & ours.keys())
            if key not in (*_TAKEN, *_OF_OPS) and told[key] != ours[key]
        ]
        if unsaid := [key for key in _TAKEN if key not in told]:
            found.append(f"the log does not say {', '.join(unsaid)}; taken from the configuration")
    return tuple(dict.fromkeys(found))


def _dtype(told: Environment, model: ModelConfig) -> DTypeName:
    name = told.get("dtype", model.dtype)
    if name not in get_args(DTypeName):
        raise ServerError(f"environment: dtype is {name!r} in the log; this version has no such")
    return cast("DTypeName", name)


def _device(told: Environment, settings: TrainerConfig) -> DeviceName:
    """The kind that the log's owner had, if this machine has it and none is configured."""
    if settings.device == "auto" and told.get("device", "").startswith("cpu"):
        return "cpu"
    return settings.device


def _number(environment: Environment, key: str) -> int | None:
    text = environment.get(key)
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise ServerError(f"environment: {key} is {text!r} in the log, not a number over 0")
    return int(text)
