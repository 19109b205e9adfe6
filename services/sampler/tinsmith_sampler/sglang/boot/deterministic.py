"""Deterministic inference without a GPU: only so does SGLang heed a request's seed."""

from __future__ import annotations

from typing import Any


def allow_torch_attention(choices: Any) -> None:
    """SGLang lists the attention that is deterministic on GPUs, and refuses to start with others.

    On a CPU that of torch computes each row by itself.
    """
    choices.add_deterministic_attention_backend_choices(["torch_native"])


def skip_gpu_kernels(batch_invariant_ops: Any) -> None:
    """Its batch-invariant kernels are for GPUs: on a CPU the first matrix product would fail."""
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_args, **_named: None
