"""The trainer's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tinsmith.config import Section
from tinsmith_trainer.shares import MOST_RANKS


class TrainerConfig(Section, frozen=True, kw_only=True):
    """Settings of ``[trainer]``."""

    model: str = ""
    """Name of the base model to train, one of ``[[models]]``; empty for the first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; ``auto`` takes a GPU when there is one."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """CPU threads of torch; 0 for half of the cores. Results depend on it in the last bit."""
    max_models: Annotated[int, Meta(ge=1)] = 64
    """Most models that this trainer holds at once; more wait for another trainer. One that trains
    all weights of its model holds one."""
    microbatch_tokens: Annotated[int, Meta(ge=0)] = 0
    """Padded tokens of one forward and backward pass; 0 for 1024 on a CPU, 8192 on a GPU. Bounds
    memory, not batch size; results depend on it in the last bit."""
    mixing: Literal["auto", "exact", "mixed"] = "auto"
    """``mixed``: one pass serves several models that wait at once, which small requests need to
    keep a device busy; results then depend in the last bits on how many rows shared the pass, and
    the log says so. ``exact``: never. ``auto``: mixed on a GPU, exact on a CPU."""
    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    """Processes of this trainer, each with a GPU of its own, that share the datums of a request;
    on a CPU they share its cores. See ``docs/running.md``."""
    sharding: Literal["none", "weights"] = "none"
    """``weights``: each of the ranks holds its part of the base, and gathers a layer when it
    computes with it; of a model that is trained whole, its part of masters, moments and gradient.
    Larger models, the same results. See ``docs/running.md``."""
    checkpointing: bool = False
    """Compute a layer's activations again when their gradient is due instead of keeping them:
    memory for a third more time, and the same results. For long sequences."""
    placement_timeout_s: Annotated[float, Meta(ge=3, le=120)] = 7.0
    """How long a silent trainer keeps its models before another may take them over; one that was
    only paused may hold up the first offer, so that it takes twice as long."""
    checkpointer_patience_s: Annotated[float, Meta(ge=0, le=600)] = 20.0
    """How long a save waits for a checkpointer to appear before it fails."""
    drain_s: Annotated[float, Meta(ge=0)] = 5.0
    """When it is told to stop: how long it goes on with the requests that it has begun, and with
    saving its models' states, before it gives up its models without that."""
    snapshot_steps: Annotated[int, Meta(ge=1)] = 50
    """Save a model's state for its next owner at least every so many optimizer steps."""
    snapshot_s: Annotated[float, Meta(gt=0)] = 60.0
    """And at least every so many seconds of training: what a take-over has to repeat."""
    canary_kl: Annotated[float, Meta(gt=0)] = 0.01
    """Warn when samplers and this trainer are further apart than this on the same weights: KL per
    token, of tokens that are scored again (``docs/agreement.md``)."""
    canary_dlogp: Annotated[float, Meta(gt=0)] = 1.0
    """And when the log-probability of any one of them differs by more than this."""
    canary_stale_kl: Annotated[float, Meta(gt=0)] = 0.1
    """Warn when the weights that are sampled from are further than this from the present ones."""
