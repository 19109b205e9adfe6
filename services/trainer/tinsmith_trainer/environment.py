"""What decides the last bits of this trainer's numbers: versions, device, threads, base weights.

It stands in every log, so that a replay elsewhere can tell a fault from another machine.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from blake3 import blake3

from tinsmith import __version__

if TYPE_CHECKING:
    from tinsmith_trainer.base_model import BaseModel


def describe(base: BaseModel, *, microbatch_tokens: int, ranks: int = 1) -> dict[str, str]:
    """The environment as it is now; call it after the number of threads was set."""
    dtype = str(next(base.model.parameters()).dtype).removeprefix("torch.")
    return {
        "tinsmith": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a str that msgpack does not know
        "transformers": str(transformers.__version__),
        "numpy": np.__version__,
        "device": _device(base.device),
        "threads": str(torch.get_num_threads()),
        "dtype": dtype,
        "base_model": base.info.name,
        "base_blake3": base_blake3(base),
        "microbatch_tokens": str(microbatch_tokens),
        "ranks": str(ranks),
    }


def base_blake3(base: BaseModel) -> str:
    """blake3 over the base model's parameters: name, dtype, shape and bytes of each, by name."""
    hasher = blake3()
    for name, parameter in sorted(base.model.state_dict().items()):
        hasher.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        raw = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        hasher.update(raw.numpy().data)
    return hasher.hexdigest()


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"cpu: {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
