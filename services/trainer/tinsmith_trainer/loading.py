"""The base model and the engine on it, as the configuration says: the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tinsmith import model_files, whole
from tinsmith.cores import threads
from tinsmith.errors import StartupError
from tinsmith.metrics import devices

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tinsmith.config import ModelConfig
    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.config import TrainerConfig
    from tinsmith_trainer.engine import TrainingEngine
    from tinsmith_trainer.ranks import Ranks
    from tinsmith_trainer.seat import Seat
    from tinsmith_trainer.sharded_base import ShardedBase
    from tinsmith_trainer.sharded_state import ShardedForm

MICROBATCH_TOKENS = {"cpu": 1024, "cuda": 8192}  # on a CPU, more is no faster and costs memory


def load(
    model: ModelConfig, config: TrainerConfig, seat: Seat | None = None
) -> tuple[TrainingEngine, dict[str, str]]:
    """The engine and its environment; of one rank of several, with a ``seat``.

    Imports torch, so it runs on a thread: the event loop answers the broker meanwhile.

    Raises:
        StartupError: see ``base_model.load``; or there is not one GPU for each rank, or the ranks
            do not compute alike.
    """
    from tinsmith_trainer import base_model

    model_files.find(model.source)  # what is wrong with it is said before torch is imported
    import torch

    from tinsmith_trainer.engine import TrainingEngine
    from tinsmith_trainer.environment import describe

    torch.set_num_threads(threads(config.threads))
    devices.tell(torch.cuda)
    device = base_model.find_device(config.device)
    tokens = config.microbatch_tokens or MICROBATCH_TOKENS[device.type]
    size = 1 if seat is None else seat.size
    shards = _shards(model, config, size)

    def loaded() -> tuple[BaseModel, dict[str, str]]:
        base = base_model.load(
            model.source,
            name=model.name,
            dtype=model.dtype,
            quantization=model.quantization,
            device=config.device,
            context_length=model.context_length,
            tokenizer_id=model.tokenizer,
            pass_tokens=tokens,
            shards=shards,
        )
        told = describe(replace(base, device=device), microbatch_tokens=tokens, ranks=size)
        return base, told

    if seat is None:
        base, environment = loaded()
        engine = TrainingEngine(base, microbatch_tokens=tokens, checkpointing=config.checkpointing)
        return engine, environment
    _take(seat, device)
    from tinsmith_trainer.ranked_engine import RankedEngine
    from tinsmith_trainer.ranks import Ranks

    ranks = Ranks(seat, device)
    is_sharded, is_whole = shards > 1, whole.is_whole(model.name)
    base, environment, sharded = (
        _in_shards(ranks, device, loaded) if is_sharded and not is_whole else (*loaded(), None)
    )
    _check_alike(ranks, environment)
    engine = RankedEngine(
        base,
        ranks,
        microbatch_tokens=tokens,
        checkpointing=config.checkpointing,
        sharded=sharded,
        form=_sharded_form(base, ranks) if is_sharded and is_whole else None,
    )
    return engine, environment


def _sharded_form(base: BaseModel, ranks: Ranks) -> ShardedForm:
    from tinsmith_trainer.sharded_state import ShardedForm

    return ShardedForm(base, ranks)


def _shards(model: ModelConfig, config: TrainerConfig, size: int) -> int:
    """Into how many a model is divided; StartupError for one that cannot be."""
    if config.sharding == "none":
        return 1
    if size == 1:
        why, remedy = "there is one rank, which holds all", "set trainer.ranks to 2 or more"
    elif model.quantization != "none":
        why = f"weights in {model.quantization} cannot be taken apart"
        remedy = 'set quantization to "none"'
    else:
        return size
    raise StartupError(f'trainer.sharding: {model.name}: {why}; {remedy}, or sharding to "none"')


def _in_shards(
    ranks: Ranks, device: torch.device, load: Callable[[], tuple[BaseModel, dict[str, str]]]
) -> tuple[BaseModel, dict[str, str], ShardedBase]:
    """What ``load`` returns, taken apart; by one rank after the other.

    A machine has room for all weights once, and not once for each of its ranks.
    """
    from tinsmith_trainer.sharded_base import ShardedBase, mesh_of

    mesh = mesh_of(ranks, device)

    def taken_apart() -> tuple[BaseModel, dict[str, str], ShardedBase]:
        base, environment = load()
        sharded = ShardedBase(base, ranks, mesh)
        return sharded.base, environment, sharded

    return ranks.in_turn(taken_apart)


def _take(seat: Seat, device: torch.device) -> None:
    """Each rank has a GPU of its own."""
    import torch

    if device.type != "cuda":
        return
    if seat.beside > (count := torch.cuda.device_count()):
        raise StartupError(
            f"trainer.ranks: {seat.beside} ranks need a GPU each, and torch finds {count}; lower it"
        )
    torch.cuda.set_device(seat.place)


def _check_alike(ranks: Ranks, environment: dict[str, str]) -> None:
    import msgspec

    said = ranks.exchange(msgspec.json.encode(environment))
    for rank, other in enumerate(map(msgspec.json.decode, said)):
        for key, value in environment.items():
            if other[key] != value:
                raise StartupError(
                    f"trainer.ranks: rank {rank} has {key} {other[key]}, rank {ranks.rank} has "
                    f"{value}; ranks must compute alike"
                )
