"""Which adapter each row of the last layer has, on SGLang's LoRA of plain torch.

Before the last layer a prefill keeps only the rows whose logits are wanted. SGLang 0.5.23 passes
their layout along, but this one of its backends ignores it and takes that of the whole batch: with
an adapter of ``lm_head``, rows get the adapter of another row, off by a whole nat.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def repair(module: Any) -> None:
    """Have its backend compute with the rows that are there."""
    backend = module.TorchNativeLoRABackend
    pruned_lengths = importlib.import_module("sglang.srt.lora.utils").get_lm_head_pruned_lens
    prepare_whole = backend.prepare_lora_batch

    def prepare(self: Any, batch: Any, adapters: list[int], *args: Any, **named: Any) -> None:
        prepare_whole(self, batch, adapters, *args, **named)
        self.lm_head_batch_info = None
        self.lm_head_pass_batch_infos = None
        lengths = pruned_lengths(batch)
        if lengths is None:  # nothing was left out
            return
        self.lm_head_batch_info = _rows(self.batch_info, adapters, lengths)
        passes = self._get_lm_head_pass_segments(adapters, lengths)
        if passes is not None:
            self.lm_head_pass_batch_infos = [_rows(self.batch_info, *each) for each in passes]

    def run_a(
        self: Any, x: Any, weights: Any, stack_num: int = 1, *_args: Any, **named: Any
    ) -> torch.Tensor:
        rows = named.get("pruned_batch_info") or self.batch_info
        out: torch.Tensor = module.sgemm_lora_a_fwd(
            inputs=x, weights=weights, batch_info=rows, num_slices=stack_num
        )
        return out

    def run_b(
        self: Any,
        x: Any,
        weights: Any,
        output_offset_cpu: Any,
        base_output: Any = None,
        *_args: Any,
        **named: Any,
    ) -> torch.Tensor:
        rows = named.get("pruned_batch_info") or self.batch_info
        out: torch.Tensor = module.sgemm_lora_b_fwd(
            inputs=x,
            weights=weights,
            batch_info=rows,
            slice_offsets=output_offset_cpu,
            base_output=base_output,
        )
        return out

    backend.prepare_lora_batch = prepare
    backend.run_lora_a_sgemm = run_a
    backend.run_lora_b_sgemm = run_b


def _rows(whole: Any, adapters: Sequence[int], lengths: Sequence[int]) -> Any:
    """The layout of a batch of segments of these lengths, each of one adapter."""
    length = torch.tensor(lengths, dtype=torch.int32)
    begins = torch.nn.functional.pad(length.cumsum(0, dtype=torch.int32), (1, 0))
    adapter = torch.tensor(adapters, dtype=torch.int32)
    return dataclasses.replace(
        whole,
        use_cuda_graph=False,
        bs=len(lengths),
        num_segments=len(lengths),
        max_len=max(lengths),
        expected_tokens=sum(lengths),
        seg_lens=length,
        seg_lens_cpu=length,
        seg_indptr=begins,
        seg_indptr_cpu=begins,
        weight_indices=adapter,
        weight_indices_cpu=adapter,
    )
