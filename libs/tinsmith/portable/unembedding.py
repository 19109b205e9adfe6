"""An adapter's files without the part that adapts the unembedding.

Some engines have no LoRA there. The rest is left as it is, byte for byte, and computes something
else than the whole adapter does.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from tinsmith.adapters import CONFIG_FILE, WEIGHTS_FILE
from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULE = "lm_head"
_METADATA = "__metadata__"


def without_unembedding(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """``files`` of an adapter, PEFT's weights and configuration, without the unembedding's.

    Raises:
        InvalidRequest: it adapts nothing else.
    """
    config = json.loads(files[CONFIG_FILE])
    config["target_modules"] = [name for name in config["target_modules"] if name != MODULE]
    if not config["target_modules"] and not config.get("target_parameters"):
        raise InvalidRequest("--no-unembed: the adapter adapts nothing else; leave the option out")
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return {**files, WEIGHTS_FILE: _kept(files[WEIGHTS_FILE]), CONFIG_FILE: text.encode()}


def _kept(data: bytes) -> bytes:
    """A safetensors file: 8 bytes of the header's length, a header in JSON, the tensors' bytes."""
    (length,) = struct.unpack_from("<Q", data)
    start = 8 + length
    old: dict[str, Any] = json.loads(data[8:start])
    header: dict[str, Any] = {k: v for k, v in old.items() if k == _METADATA}
    pieces, offset = [], 0
    for name, entry in sorted(old.items(), key=lambda item: item[1].get("data_offsets", [0])):
        if name == _METADATA or MODULE in name.split("."):
            continue
        first, last = entry["data_offsets"]
        pieces.append(data[start + first : start + last])
        header[name] = {**entry, "data_offsets": [offset, offset + last - first]}
        offset += last - first
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([struct.pack("<Q", len(head)), head, *pieces])
