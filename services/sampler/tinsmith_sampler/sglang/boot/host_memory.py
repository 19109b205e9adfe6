"""Host memory that SGLang would register with CUDA."""

from __future__ import annotations

from typing import Any


def skip_registration(module: Any) -> None:
    """Without a GPU there is nobody to register it with, and the call fails."""
    module._cuda_host_register = lambda *_args, **_named: None  # noqa: SLF001
