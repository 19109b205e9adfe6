"""The served model: loaded from a Hugging Face folder, run pass by pass on the KV cache.

A pass is a list of pieces, each some tokens of one sequence; decoding is a pass of pieces of one
token. T = rows of the pass, N = rows whose logits are wanted, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch

from tinsmith.errors import StartupError
from tinsmith_sampler import attention, lora_layers
from tinsmith_sampler.attention import PassPlan, Segment
from tinsmith_sampler.kv_cache import KvCache, whole_pages
from tinsmith_sampler.linear_kernels import FIXED_HEIGHT
from tinsmith_sampler.loading import decoder, eos_tokens, load_model, load_tokenizer
from tinsmith_sampler.lora_layers import PassShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from tinsmith_sampler.kv_cache import Extent
    from tinsmith_sampler.lora_layers import Adapter, RowGroup

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_HEAD_ROWS = 256
"""Logits are computed for so many positions at a time where the shape of a pass is free."""


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


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Tokens ``position`` and on of the sequence that lies in ``extent``.

    ``wanted``: indices into ``tokens`` of those whose logits are needed.
    """

    tokens: NDArray[np.int32]
    position: int
    extent: Extent
    adapter: Adapter | None
    wanted: NDArray[np.int64]


class ServedModel:
    """A causal language model whose linear layers take adapters and whose KV lives in a cache."""

    def __init__(self, options: TorchOptions) -> None:
        torch.set_num_threads(options.threads)
        self.device = options.device
        self.dtype = _DTYPES[options.dtype]
        model = load_model(options.model_path, dtype=self.dtype, device=self.device)
        tokenizer = load_tokenizer(options.model_path)
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.cache = _cache(config, options, self.dtype)
        # The longest prompt must fit beside the row that continues it.
        self.context_length = min(
            config.max_position_embeddings,
            options.context_length or config.max_position_embeddings,
            self.cache.capacity // 2,
        )
        self.eos_tokens = eos_tokens(model, tokenizer)
        self.decode = decoder(tokenizer)
        self._active = lora_layers.ActiveAdapters(PassShape(1, mixes=True))
        self._layers = lora_layers.install(model, self._active)
        self._body = model.base_model
        self._head = cast("nn.Module", model.get_output_embeddings())  # type: ignore[no-untyped-call]
        self.shape = self._active.shape = self._pass_shape()
        self._check_head(model)

    @property
    def layer_shapes(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every linear layer that an adapter may change."""
        return {name: (one.in_features, one.out_features) for name, one in self._layers.items()}

    def run(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """One pass; returns the wanted logits of each piece, float32 [wanted, V].

        Pieces with the same adapter should be neighbours.
        """
        hidden_TK = self._hidden(pieces)
        firsts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)])
        wanted = [piece.wanted + first for piece, first in zip(pieces, firsts, strict=False)]
        counts = [len(rows) for rows in wanted]
        if not sum(counts):
            return [hidden_TK.new_empty((0, self.vocab_size)) for _ in pieces]
        rows_N = torch.from_numpy(np.concatenate(wanted)).to(self.device)
        groups = lora_layers.group_rows(
            (count, piece.adapter) for count, piece in zip(counts, pieces, strict=True)
        )
        return list(torch.split(self._logits(hidden_TK[rows_N], groups), counts))

    def _hidden(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Final hidden states [T, hidden]; keys and values are in the cache afterwards."""
        self._active.groups = lora_layers.group_rows(
            (len(piece.tokens), piece.adapter) for piece in pieces
        )
        tokens_T, positions_T, plan = self._plan(pieces)
        out = self._body(
            input_ids=tokens_T[None],
            position_ids=positions_T[None],
            use_cache=False,
            plan=plan,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _plan(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor, PassPlan]:
        total = sum(len(piece.tokens) for piece in pieces)
        height = max(total, self.shape.height)
        tokens_T, positions_T = np.zeros(height, np.int64), np.zeros(height, np.int64)
        slots_T = np.full(height, self.cache.scratch, np.int64)
        segments = []
        first = 0
        for piece in pieces:
            count, position, start = len(piece.tokens), piece.position, piece.extent.start
            rows = slice(first, first + count)
            tokens_T[rows] = piece.tokens
            positions_T[rows] = np.arange(position, position + count)
            slots_T[rows] = positions_T[rows] + start
            mask = attention.causal_mask(count, position, self.device)
            segments.append(Segment(first, count, start, start + position + count, mask))
            first += count
        slots = torch.from_numpy(slots_T).to(self.device)
        plan = PassPlan(self.cache, slots, segments)
        return (
            torch.from_numpy(tokens_T).to(self.device),
            torch.from_numpy(positions_T).to(self.device),
            plan,
        )

    def _logits(self, hidden_NK: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """Float32 logits [N, V], a block of rows at a time."""
        block = _HEAD_ROWS if self.shape.mixes else self.shape.height
        blocks = []
        for first in range(0, len(hidden_NK), block):
            part = hidden_NK[first : first + block]
            clipped = (group.clipped(first, first + len(part)) for group in groups)
            self._active.groups = tuple(group for group in clipped if group.first < group.end)
            blocks.append(self._head_rows(part))
        return torch.cat(blocks)

    def _head_rows(self, hidden_NK: torch.Tensor) -> torch.Tensor:
        rows = len(hidden_NK)
        padding = max(0, self.shape.height - rows)
        padded = torch.nn.functional.pad(hidden_NK, (0, 0, 0, padding))
        logits: torch.Tensor = self._head(padded[None])[0, :rows].float()
        return logits

    def _pass_shape(self) -> PassShape:
        heights = [layer.product.kernel.least for layer in self._layers.values()]
        known = [height for height in heights if height is not None]
        if len(known) < len(heights):
            return PassShape(FIXED_HEIGHT, mixes=False)
        return PassShape(1, mixes=True)

    def _check_head(self, model: PreTrainedModel) -> None:
        """Some models do more to the logits than their head does; those need their own code."""
        extent = self.cache.take(4)
        if extent is None:
            raise StartupError("kv_tokens: there is not room for one page; raise it")
        piece = Piece(np.arange(4, dtype=np.int32), 0, extent, None, np.arange(4))
        mine = self.run([piece])[0]
        tokens, positions, plan = self._plan([piece])
        theirs = model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, plan=plan
        ).logits[0, :4]
        self.cache.give(extent)
        if not torch.allclose(mine, theirs.float(), rtol=1e-3, atol=1e-3):
            raise StartupError(
                f"model: {type(model).__name__} changes its logits after the head, which the "
                "torch engine does not know; serve it with SGLang"
            )


def _cache(config: PretrainedConfig, options: TorchOptions, dtype: torch.dtype) -> KvCache:
    head_dim = getattr(config, "head_dim", None)
    planes = (
        config.num_hidden_layers,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim or config.hidden_size // config.num_attention_heads,
    )
    return KvCache(planes, whole_pages(options.kv_tokens), dtype=dtype, device=options.device)
