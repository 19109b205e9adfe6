"""A PEFT adapter's files, read and checked against the base model, as an Adapter.

Only LoRA as it is in ``adapter_model.safetensors`` and ``adapter_config.json`` is understood.
Whatever else PEFT can do to a model is refused, since leaving it out would change the numbers
without a word.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from tinsmith.errors import InvalidRequest
from tinsmith_sampler.linear_kernels import FrozenLinear
from tinsmith_sampler.lora_layers import Adapter, LoraDelta

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith_sampler.lora_layers import LayerShape

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Pairs = dict[str, dict[str, torch.Tensor]]
"""Of each layer, by its name, ``A`` and ``B``."""


class PeftConfig(msgspec.Struct, frozen=True):
    """The part of ``adapter_config.json`` that decides what the tensors mean."""

    r: int
    lora_alpha: float
    peft_type: Literal["LORA"] = "LORA"
    use_dora: Literal[False] = False
    use_rslora: Literal[False] = False
    fan_in_fan_out: Literal[False] = False
    bias: Literal["none"] = "none"
    rank_pattern: dict[str, Any] = {}
    alpha_pattern: dict[str, Any] = {}
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "eva"] | None = True
    """The other ways to begin change the base model's weights, which are not in the files."""
    alora_invocation_tokens: list[int] | None = None
    layer_replication: list[Any] | None = None
    kasa_config: dict[str, Any] | None = None
    arrow_config: dict[str, Any] | None = None
    use_bdlora: dict[str, Any] | None = None


_UNSERVED = (
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "alora_invocation_tokens",
    "layer_replication",
    "kasa_config",
    "arrow_config",
    "use_bdlora",
)


class AdapterReader:
    """Turns files into adapters for one base model; thread-safe."""

    def __init__(
        self,
        layers: Mapping[str, LayerShape],
        *,
        dtype: torch.dtype,
        device: str,
        max_rank: int,
    ) -> None:
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank

    def read(self, version: str, files: Mapping[str, bytes]) -> Adapter:
        """The adapter in ``files``; InvalidRequest names what is wrong with it."""
        config, pairs = self.check(version, files)
        deltas: dict[str, LoraDelta] = {}
        expert_deltas: dict[str, tuple[LoraDelta, ...]] = {}
        for layer, pair in pairs.items():
            parts = self._deltas(layer, pair, config)
            if self._layers[layer].experts:
                expert_deltas[layer] = parts
            else:
                (deltas[layer],) = parts
        return Adapter(version, deltas, expert_deltas)

    def check(self, version: str, files: Mapping[str, bytes]) -> tuple[PeftConfig, Pairs]:
        """What ``files`` hold, when this base model can carry it; else as ``read``."""
        try:
            config = self._config(_file(files, CONFIG))
            pairs = _pairs(_tensors(_file(files, WEIGHTS)))
            for layer, pair in pairs.items():
                self._check(layer, pair, config.r)
        except InvalidRequest as problem:
            raise InvalidRequest(f"adapter {version}: {problem}") from problem
        return config, pairs

    def _config(self, data: bytes) -> PeftConfig:
        try:
            config = msgspec.json.decode(data, type=PeftConfig)
        except msgspec.DecodeError as problem:
            raise InvalidRequest(f"{CONFIG}: {problem}; only plain LoRA is served") from problem
        if not 1 <= config.r <= self._max_rank:
            raise InvalidRequest(
                f"{CONFIG}: r = {config.r} is not in 1..{self._max_rank}; "
                "train with a lower rank, or raise the sampler's max_lora_rank"
            )
        for field in _UNSERVED:
            if getattr(config, field):
                raise InvalidRequest(
                    f"{CONFIG}: {field} = {getattr(config, field)!r} is not served; "
                    "use one rank and alpha for all layers, and LoRA weights alone"
                )
        return config

    def _check(self, layer: str, pair: Mapping[str, torch.Tensor], rank: int) -> None:
        if layer not in self._layers:
            raise InvalidRequest(f"{WEIGHTS}: the base model has no linear layer {layer!r}")
        inputs, outputs, experts = self._layers[layer]
        _check_side(pair, "A", layer, (rank * max(1, experts), inputs))
        _check_side(pair, "B", layer, (outputs, rank * max(1, experts)))

    def _deltas(
        self, layer: str, pair: Mapping[str, torch.Tensor], config: PeftConfig
    ) -> tuple[LoraDelta, ...]:
        """One, or one for each expert: A has theirs below one another, B side by side."""
        inputs, outputs, experts = self._layers[layer]
        count = max(1, experts)
        scaled = pair["B"].float() * (config.lora_alpha / config.r)
        downs = pair["A"].view(count, config.r, inputs)
        ups = scaled.view(outputs, config.r, count).permute(2, 0, 1)  # the expert varies fastest
        return tuple(
            LoraDelta(self._frozen(down), self._frozen(up))
            for down, up in zip(downs, ups, strict=True)
        )

    def _frozen(self, weight: torch.Tensor) -> FrozenLinear:
        return FrozenLinear(weight.to(self._device, self._dtype).contiguous())


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise InvalidRequest(f"the file {name} is missing; there are {sorted(files)}")
    return files[name]


def _tensors(data: bytes) -> dict[str, torch.Tensor]:
    try:
        return load_safetensors(data)
    except SafetensorError as problem:
        raise InvalidRequest(f"{WEIGHTS}: not readable: {problem}") from problem


def _pairs(tensors: Mapping[str, torch.Tensor]) -> Pairs:
    pairs: Pairs = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvalidRequest(
                f"{WEIGHTS}: {name!r} is not a LoRA weight of a linear layer; "
                "names are base_model.model.<layer>.lora_A.weight and ...lora_B.weight"
            )
        pairs.setdefault(match["layer"], {})[match["side"]] = tensor
    if not pairs:
        raise InvalidRequest(f"{WEIGHTS}: it holds no tensor")
    return pairs


def _check_side(
    pair: Mapping[str, torch.Tensor], side: str, layer: str, shape: tuple[int, int]
) -> None:
    name = f"{layer}.lora_{side}"
    if side not in pair:
        raise InvalidRequest(f"{WEIGHTS}: {name} is missing")
    tensor = pair[side]
    if tuple(tensor.shape) != shape:
        raise InvalidRequest(f"{WEIGHTS}: {name} is {list(tensor.shape)}, not {list(shape)}")
    if tensor.dtype not in _FLOATS:
        raise InvalidRequest(f"{WEIGHTS}: {name} is {tensor.dtype}, not float32, bfloat16, float16")
    if not bool(torch.isfinite(tensor).all()):
        raise InvalidRequest(
            f"{WEIGHTS}: {name} has values that are not finite; go back to an earlier checkpoint "
            "and lower the learning rate"
        )
