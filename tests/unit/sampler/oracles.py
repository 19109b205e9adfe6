"""What Hugging Face and PEFT compute for the same model: plain forward passes, no cache."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALL_LINEAR = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "lm_head",
)


class Oracle:
    """A model, or a model under an adapter."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if adapter is not None:
            with peft_warnings_ignored():
                self.model = PeftModel.from_pretrained(self.model, adapter)
        self.model.eval()

    @torch.inference_mode()
    def greedy(self, prompt: np.ndarray, count: int) -> list[int]:
        """The next tokens by ``generate``; neither EOS nor padding ends them."""
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        self.model.generation_config.eos_token_id = None
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def distributions(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities of every token after each of ``tokens``, float32 [n, V]."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return torch.log_softmax(self.model(input_ids=ids).logits[0].float(), -1).numpy()

    def logprobs(self, prompt: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Of ``drawn`` after ``prompt``, float32 [n]."""
        rows = self.distributions(np.concatenate([prompt, drawn]))[len(prompt) - 1 : -1]
        return rows[np.arange(len(drawn)), drawn]


@contextmanager
def peft_warnings_ignored() -> Iterator[None]:
    """PEFT uses what transformers deprecates, and warns of an adapted head that is tied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_adapter(
    base: Path, folder: Path, *, seed: int, rank: int = 4, targets: tuple[str, ...] = ALL_LINEAR
) -> Path:
    """A LoRA adapter whose B is not zero, saved by PEFT."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets))
    generator = torch.Generator().manual_seed(seed)
    with peft_warnings_ignored():
        adapted = get_peft_model(Oracle(base).model, config)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.data.normal_(0, 0.2, generator=generator)
        adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def adapter_files(folder: Path) -> dict[str, bytes]:
    names = ("adapter_model.safetensors", "adapter_config.json")
    return {name: (folder / name).read_bytes() for name in names}


def edited(files: dict[str, bytes], **fields: object) -> dict[str, bytes]:
    """The same adapter with other fields in its configuration."""
    config = json.loads(files["adapter_config.json"]) | fields
    return {**files, "adapter_config.json": json.dumps(config).encode()}
