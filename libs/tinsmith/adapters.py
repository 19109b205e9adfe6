"""Names inside an adapter's checkpoint, and the reference by which a sampler gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from tinsmith.messages.sampling import AdapterRef

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.messages.base import BlobRef

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def adapter_ref(parts: Mapping[str, BlobRef]) -> AdapterRef:
    """What a sampler needs of a checkpoint's ``parts``; the version names exactly these bits.

    The configuration is part of the version: equal weights under another alpha are another
    adapter.
    """
    files = {name: parts[name] for name in (WEIGHTS_FILE, CONFIG_FILE)}
    version = blake3("".join(ref.blake3 for ref in files.values()).encode()).hexdigest(16)
    return AdapterRef(version=version, files=files)
