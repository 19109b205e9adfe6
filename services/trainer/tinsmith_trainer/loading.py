"""The base model and the engine on it, as the configuration says: the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith import model_files
from tinsmith.cores import threads
from tinsmith.errors import StartupError
from tinsmith.metrics import devices

if TYPE_CHECKING:
    import torch

    from tinsmith.config import ModelConfig
    from tinsmith_trainer.config import TrainerConfig
    from tinsmith_trainer.engine import TrainingEngine
    from tinsmith_trainer.ranks import Ranks
    from tinsmith_trainer.seat import Seat

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
    if seat is not None:
        _take(seat, device)
    base = base_model.load(
        model.source,
        name=model.name,
        dtype=model.dtype,
        quantization=model.quantization,
        device=config.device,
        context_length=model.context_length,
        tokenizer_id=model.tokenizer,
        pass_tokens=tokens,
    )
    environment = describe(base, microbatch_tokens=tokens, ranks=1 if seat is None else seat.size)
    if seat is None:
        engine = TrainingEngine(base, microbatch_tokens=tokens, checkpointing=config.checkpointing)
        return engine, environment
    from tinsmith_trainer.ranked_engine import RankedEngine
    from tinsmith_trainer.ranks import Ranks

    ranks = Ranks(seat, device)
    _check_alike(ranks, environment)
    return (
        RankedEngine(base, ranks, microbatch_tokens=tokens, checkpointing=config.checkpointing),
        environment,
    )


def _take(seat: Seat, device: torch.device) -> None:
    """Each rank has a GPU of its own."""
    import torch

    if device.type != "cuda":
        return
    if seat.size > (count := torch.cuda.device_count()):
        raise StartupError(
            f"trainer.ranks: {seat.size} ranks need a GPU each, and torch finds {count}; lower it"
        )
    torch.cuda.set_device(seat.rank)


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
