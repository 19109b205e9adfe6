"""What decides the last bits of this sampler's numbers: versions, device, threads, base weights.

It stands beside every logged sample, so that a replay elsewhere can tell a fault from another
machine. The trainer has a description of its own kind for its log.
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
    from torch import nn

    from tinsmith_sampler.model import ServedModel, TorchOptions


def describe(options: TorchOptions, model: ServedModel) -> dict[str, str]:
    """The environment of an engine with these ``options``, which has loaded ``model``."""
    return {
        "tinsmith": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a str that msgpack does not know
        "transformers": str(transformers.__version__),
        "numpy": np.__version__,
        "device": _device(torch.device(options.device)),
        "threads": str(options.threads),
        "dtype": options.dtype,
        "quantization": options.quantization,
        "base_blake3": model.base_blake3,
        "context_length": str(model.context_length),  # where a text without max_tokens ends
    }


def base_blake3(model: nn.Module) -> str:
    """blake3 over a model's parameters: name, dtype, shape and bytes of each, by name."""
    hasher = blake3()
    for name, parameter in sorted(model.state_dict().items()):
        hasher.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        raw = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        hasher.update(raw.numpy().data)
    return hasher.hexdigest()


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"cpu: {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
