"""How much memory a process has of its GPU; torch is handed in by who has it."""

from __future__ import annotations

from typing import Protocol

from tinsmith.metrics import names as metrics


class Cuda(Protocol):
    """The part of ``torch.cuda`` that is asked."""

    def is_available(self) -> bool:
        """Whether there is one."""

    def memory_allocated(self) -> int:
        """Bytes of tensors."""

    def memory_reserved(self) -> int:
        """Bytes that torch keeps for them."""

    def mem_get_info(self) -> tuple[int, int]:
        """Free and all bytes of the device."""


def tell(cuda: Cuda) -> None:
    """From now on; nothing where there is no GPU."""
    if not cuda.is_available():
        return
    asked = {
        "allocated": cuda.memory_allocated,
        "reserved": cuda.memory_reserved,
        "total": lambda: cuda.mem_get_info()[1],
    }
    for kind, ask in asked.items():
        metrics.DEVICE_MEMORY.labels(kind).set_function(ask)
