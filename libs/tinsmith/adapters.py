"""Names inside a checkpoint, and the reference by which a sampler gets what it needs of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from tinsmith import whole
from tinsmith.messages.sampling import AdapterRef
from tinsmith.parts import check_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.checkpoints import Checkpoint

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def adapter_ref(checkpoint: Checkpoint) -> AdapterRef:
    """What a sampler needs of a checkpoint; the version names exactly these bits.

    The configuration is part of the version: equal weights under another alpha are another
    adapter. Raises InvalidRequest for a manifest that nobody must follow.
    """
    check_manifest(checkpoint)
    is_whole = whole.holds_whole(checkpoint.parts)
    names = whole.weight_files(checkpoint.parts) if is_whole else (WEIGHTS_FILE, CONFIG_FILE)
    files = {name: checkpoint.parts[name] for name in names}
    return AdapterRef(
        version=version_of(files),
        files=files,
        model_id=checkpoint.model_id,
        op_seq=None if checkpoint.log_model_id else checkpoint.op_seq,  # in this run's own log
        published=checkpoint.published,
    )


def version_of(files: Mapping[str, BlobRef]) -> str:
    """The name of an adapter, or of a whole model, that has these files."""
    is_whole = whole.holds_whole(files)
    names = whole.weight_files(files) if is_whole else (WEIGHTS_FILE, CONFIG_FILE)
    digests = (files[name].blake3 for name in names if name in files)
    return blake3("".join(digests).encode()).hexdigest(16)
