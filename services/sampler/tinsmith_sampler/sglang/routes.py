"""Which experts an SGLang server sent tokens to, out of its answers."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tinsmith.errors import ServerError
from tinsmith_sampler.engine import expert_width

if TYPE_CHECKING:
    from tinsmith.model_files import ModelFiles
    from tinsmith_sampler.engine import Experts

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of experts of a layer."""
_OF_EXPERTS = re.compile(r"\blayers\.(\d+)\..*\bexperts\.")


class Mixture(NamedTuple):
    """What a model's folder tells of its experts."""

    experts: int  # of a layer
    k: int  # of each token
    layers: int
    sparse: list[int]  # the layers that have experts

    @property
    def token_bytes(self) -> int:
        """What ``routes`` tells of one token."""
        return len(self.sparse) * self.k * expert_width(self.experts)


def mixture(files: ModelFiles) -> Mixture | None:
    """Of a model; None for one without experts."""
    config = files.config
    sparse = {int(found[1]) for name in files.shapes if (found := _OF_EXPERTS.search(name))}
    count = next((config[name] for name in _COUNTS if config.get(name)), None)
    if not sparse or count is None or not config.get("num_experts_per_tok"):
        return None
    return Mixture(
        count, config["num_experts_per_tok"], config["num_hidden_layers"], sorted(sparse)
    )


def routes(told: str, mixture: Mixture | None, tokens: int) -> Experts:
    """Of the first ``tokens`` tokens: from the server's int32 [tokens or more, layers, k].

    Raises:
        ServerError: it is no such array, of fewer tokens, or of another model.
    """
    try:
        found = np.frombuffer(base64.b64decode(told, validate=True), dtype="<i4")
    except ValueError as problem:  # binascii's too
        raise ServerError(
            f"the SGLang server tells of experts in a way that 0.5.23 does not: {problem}"
        ) from problem
    if mixture is None or found.size % (mixture.layers * mixture.k):
        raise ServerError("the SGLang server tells of other experts than the model's folder has")
    found = found.reshape(-1, mixture.layers, mixture.k)
    if len(found) < tokens:
        raise ServerError(
            f"the SGLang server tells where {len(found)} of {tokens} tokens went; send it again"
        )
    asked, is_narrow = found[:tokens, mixture.sparse], expert_width(mixture.experts) == 1
    return asked.astype(np.uint8) if is_narrow else asked.astype(np.uint16)
