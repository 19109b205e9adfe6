"""The served model: loaded from a Hugging Face folder, run pass by pass on the KV cache.

T = rows of a pass, K = hidden size, N = rows whose logits are wanted, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch

from tinsmith import memory, model_files
from tinsmith.errors import StartupError
from tinsmith_sampler import engine_memory, experts, lora_layers, norms
from tinsmith_sampler.environment import base_blake3
from tinsmith_sampler.kv_cache import PAGE, KvCache, whole_pages
from tinsmith_sampler.linear_kernels import PassShape, pad_rows
from tinsmith_sampler.loading import (
    decoder,
    eos_tokens,
    load_model,
    load_tokenizer,
    make_dense,
)
from tinsmith_sampler.lora_layers import LayerShape
from tinsmith_sampler.passes import Piece, lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from tinsmith.model_files import ModelFiles, Quantization
    from tinsmith_sampler.linear_kernels import FrozenLinear
    from tinsmith_sampler.lora_layers import RowGroup

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptions:
    """What the operator chooses for the torch engine."""

    model_path: str  # a folder in Hugging Face format, or a hub id
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    threads: int = 1  # of torch; more than there are free cores makes it slower
    max_rows: int = 32  # rows that decode together
    kv_tokens: int = 32_768  # tokens in the KV cache, of all sequences together
    context_length: int | None = None  # None: that of the model
    prefill_tokens: int = 256  # prompt tokens between two decoding passes
    max_lora_rank: int = 128
    quantization: Quantization = "none"  # of the base; the values are those, held in ``dtype``


def device_of(configured: str) -> str:
    """Where the model lives; ``auto`` takes a GPU when there is one."""
    if configured != "auto":
        return configured
    return "cuda" if torch.cuda.is_available() else "cpu"


class ServedModel:
    """A causal language model whose linear layers take adapters and whose KV lives in a cache."""

    def __init__(self, options: TorchOptions) -> None:
        torch.set_num_threads(options.threads)
        self.device = options.device
        self.dtype = _DTYPES[options.dtype]
        files = model_files.find(options.model_path)
        model_files.check_quantization(files, options.quantization, device=self.device)
        _check_room(files, options)
        model = load_model(
            files, dtype=self.dtype, device=self.device, quantization=options.quantization
        )
        self.base_blake3 = base_blake3(model)  # before its layers are packed for our kernels
        make_dense(model, self.dtype)
        tokenizer = load_tokenizer(str(files.folder))
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.cache = _cache(config, options, self.dtype)
        # The longest prompt must fit beside the row that continues it.
        self.context_length: int = min(
            config.max_position_embeddings,
            options.context_length or config.max_position_embeddings,
            self.cache.capacity // (2 * PAGE) * PAGE,
        )
        self.eos_tokens = eos_tokens(model, tokenizer)
        self.to_text = decoder(tokenizer)
        self._active = lora_layers.ActiveAdapters()
        named, alone = engine_memory.names_of(model), engine_memory.alone(model)
        self._experts = experts.install(model, self._active)
        self._layers = lora_layers.install(model, self._active)
        norms.install(model)
        self._chosen = int(getattr(config, "num_experts_per_tok", 0) or 0)  # experts of a token
        self.routes = experts.Routes(self.cache, self._experts.values())
        self.places = engine_memory.places(named, alone, self._layers, self._experts)
        """Where each tensor of the checkpoint lies."""
        self._body = model.base_model
        self._head = cast("nn.Module", model.get_output_embeddings())  # type: ignore[no-untyped-call]
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.shape = PassShape.of(kernel.rows for kernel in self._kernels())
        self._check_head(model)

    def _kernels(self) -> Iterator[FrozenLinear]:
        for layer in self._layers.values():
            yield layer.product.kernel
        for mixture in self._experts.values():
            for matrix in mixture.kernels.values():
                yield from matrix

    @property
    def has_experts(self) -> bool:
        """Whether ``routes`` tells anything."""
        return bool(self._experts)

    @property
    def route_bytes(self) -> int:
        """What ``routes`` tells of one token."""
        return self.routes.token_bytes(self._chosen)

    @property
    def layer_shapes(self) -> dict[str, LayerShape]:
        """What an adapter may change, by the names that PEFT has for it."""
        shapes = {
            name: LayerShape(one.in_features, one.out_features)
            for name, one in self._layers.items()
        }
        for mixture in self._experts.values():
            shapes |= mixture.shapes
        return shapes

    def prefill(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """A pass over stretches of prompts; returns the wanted logits of each, float32 [wanted, V].

        Pieces with the same adapter should be neighbours.
        """
        least = self.shape.prompt_least
        hidden_TK = self._hidden(pieces, rows=least, delta_rows=least)
        firsts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)])
        wanted = [piece.wanted + first for piece, first in zip(pieces, firsts, strict=False)]
        counts = [len(rows) for rows in wanted]
        if not any(counts):
            return [hidden_TK.new_empty((0, self.vocab_size)) for _ in pieces]
        rows_N = torch.from_numpy(np.concatenate(wanted)).to(self.device)
        groups = lora_layers.group_rows(
            (count, piece.adapter) for count, piece in zip(counts, pieces, strict=True)
        )
        return list(torch.split(self._logits(hidden_TK[rows_N], groups), counts))

    def decode(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """A pass over one token of each row; returns float32 logits [rows, V].

        At most ``shape.decode_most`` pieces; those with the same adapter should be neighbours.
        """
        shape = self.shape
        hidden_TK = self._hidden(pieces, rows=shape.decode_least, delta_rows=shape.delta_least)
        return self._logits(hidden_TK[: len(pieces)], self._active.groups)

    def _hidden(self, pieces: Sequence[Piece], *, rows: int, delta_rows: int) -> torch.Tensor:
        """Final hidden states [T, hidden], T at least ``rows``; KV is in the cache afterwards."""
        self._active.height = delta_rows
        self._active.rows = sum(len(piece.tokens) for piece in pieces)
        self._active.groups = lora_layers.group_rows(
            (len(piece.tokens), piece.adapter) for piece in pieces
        )
        layout = lay_out(pieces, self.cache, rows=rows, device=self.device)
        self.routes.slots = layout.plan.slots
        out = self._body(**layout.arguments())
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _logits(self, hidden_NK: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """Float32 logits [N, V], a block of rows at a time."""
        self._active.height = self.shape.delta_least
        blocks = []
        for first in range(0, len(hidden_NK), self.shape.decode_most):
            part = hidden_NK[first : first + self.shape.decode_most]
            clipped = (group.clipped(first, first + len(part)) for group in groups)
            self._active.groups = tuple(group for group in clipped if group.first < group.end)
            padded = pad_rows(part[None], self.shape.decode_least)
            blocks.append(self._capped(self._head(padded)[0, : len(part)].float()))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """As the Gemma family caps its logits."""
        if self._softcap is None:
            return logits
        return self._softcap * torch.tanh(logits / self._softcap)

    def _check_head(self, model: PreTrainedModel) -> None:
        """Some models do more to the logits than their head does; those need their own code."""
        extent = self.cache.take(4)
        if extent is None:
            raise StartupError("kv_tokens: there is not room for one page; raise it")
        piece = Piece(np.arange(4, dtype=np.int32), 0, extent, None, np.arange(4))
        layout = lay_out([piece], self.cache, rows=1, device=self.device)
        arguments = layout.arguments()
        self.routes.slots = layout.plan.slots
        self._active.height, self._active.rows = 1, 4
        mine = self._capped(self._head(self._body(**arguments).last_hidden_state))
        theirs = model(**arguments).logits
        self.cache.give(extent)
        if not torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3):
            raise StartupError(
                f"model: {type(model).__name__} changes its logits after the head, which the "
                "torch engine does not know; serve it with SGLang"
            )


def _check_room(files: ModelFiles, options: TorchOptions) -> None:
    config = files.config
    heads = config.get("num_attention_heads") or 1
    width = config.get("head_dim") or config.get("hidden_size", 0) // heads
    floats = 2 * config.get("num_hidden_layers", 0) * width
    floats *= config.get("num_key_value_heads") or heads
    needs = {
        f"for weights in {options.dtype}": files.weight_bytes(options.dtype),
        f"for a cache of {options.kv_tokens} tokens": floats
        * options.kv_tokens
        * _DTYPES[options.dtype].itemsize,
    }
    on_gpu = options.device.startswith("cuda")
    free = torch.cuda.mem_get_info()[0] if on_gpu else memory.available_bytes()
    halve = 'set dtype to "bfloat16", ' if options.dtype == "float32" else ""
    remedy = f"{halve}lower the sampler's cache_tokens, or serve a smaller model"
    memory.check_room(options.model_path, needs, free, place=options.device, remedy=remedy)


def _cache(config: PretrainedConfig, options: TorchOptions, dtype: torch.dtype) -> KvCache:
    head_dim = getattr(config, "head_dim", None)
    planes = (
        config.num_hidden_layers,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim or config.hidden_size // config.num_attention_heads,
    )
    return KvCache(planes, whole_pages(options.kv_tokens), dtype=dtype, device=options.device)
