"""All patches, and when each is made."""

from __future__ import annotations

import torch

from . import after_import, deterministic, host_memory, lora_rows, pinning, seeding, stand_ins


def apply() -> None:
    """Make this process fit for SGLang without a GPU; nothing is changed where there is one."""
    if torch.cuda.is_available():
        return
    stand_ins.install()
    pinning.remove()
    seeding.define()
    after_import.install(
        {
            "sglang.srt.arg_groups.choices": deterministic.allow_torch_attention,
            "sglang.srt.batch_invariant_ops": deterministic.skip_gpu_kernels,
            "sglang.srt.lora.backend.torch_backend": lora_rows.repair,
            "sglang.srt.mem_cache.pool_host.common": host_memory.skip_registration,
        }
    )
