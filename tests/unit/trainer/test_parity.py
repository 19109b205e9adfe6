"""Training equals a plain torch and PEFT loop that starts from the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import peft
import pytest
import safetensors.torch
import torch
from tests.unit.trainer.examples import cross_entropy, random_datum, values
from transformers import AutoModelForCausalLM

from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import WEIGHTS, to_files
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from pathlib import Path

    from tinsmith.messages.ops import Datum

pytestmark = [  # what PEFT itself says and calls
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

DATA = tuple(random_datum(length, seed=length) for length in (40, 7, 23, 64, 1))
# A smaller eps would blow up the rounding of single gradients that happen to be near zero: PEFT's
# own float32 and float64 runs then differ by more than 1e-5.
STEPS = [
    OptimStep(
        learning_rate=rate,
        beta1=0.8,
        beta2=0.9,
        eps=0.1,
        weight_decay=0.1,
        grad_clip_norm=clip,
    )
    for rate, clip in ((2e-3, 50.0), (1e-3, 0.0), (3e-3, 20.0), (2e-4, 0.0), (2e-3, 1e6))
]


class PlainLoop:
    """The reference: PEFT's layers, full logits, autograd and torch's AdamW."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = peft.PeftModel.from_pretrained(base, checkpoint, is_trainable=True)
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable)

    def step(self, op: OptimStep) -> float:
        loss = sum(self._loss(datum) for datum in DATA)
        loss.backward()
        if op.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(self.trainable, op.grad_clip_norm)
        self.optimizer.param_groups[0].update(
            lr=op.learning_rate,
            betas=(op.beta1, op.beta2),
            eps=op.eps,
            weight_decay=op.weight_decay,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def _loss(self, datum: Datum) -> torch.Tensor:
        tokens = torch.tensor(values(datum.tokens), dtype=torch.int64)
        targets = torch.tensor(values(datum.inputs["target_tokens"]))
        lp = self.model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        picked = lp.gather(1, targets[:, None]).squeeze(1)
        return -(torch.tensor(values(datum.inputs["weights"])) * picked).sum()


def saved(engine: TrainingEngine, folder: Path) -> Path:
    for name, data in to_files(engine.snapshot("m"), with_optimizer=False).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("rank", [1, 8, 32])
def test_five_steps_match_a_plain_peft_loop(any_folder: Path, tmp_path: Path, rank: int):
    engine = TrainingEngine(base_model.load(str(any_folder), name="tiny"), microbatch_tokens=64)
    engine.create("m", LoraShape(rank=rank, alpha=16.0))
    plain = PlainLoop(any_folder, saved(engine, tmp_path))

    for op in STEPS:
        loss = engine.forward_backward("m", cross_entropy(*DATA)).metrics["loss:sum"]
        engine.optim_step("m", op)

        assert loss == pytest.approx(plain.step(op), rel=1e-5)

    theirs = peft.get_peft_model_state_dict(plain.model, save_embedding_layers=False)
    ours = safetensors.torch.load(to_files(engine.snapshot("m"), with_optimizer=False)[WEIGHTS])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
