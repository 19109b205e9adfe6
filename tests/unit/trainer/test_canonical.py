"""The bits of a whole model on its lineage: those that its passes compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.unit.trainer.test_whole import ADAM, loaded, train

from tinsmith.messages.ops import WHOLE, LoraShape
from tinsmith_trainer import canonical

if TYPE_CHECKING:
    from pathlib import Path

WORDS = {"float32": (torch.int32, "u4"), "bfloat16": (torch.int16, "u2")}


@pytest.mark.parametrize("dtype", WORDS)
def test_they_are_those_of_the_models_parameters(any_folder: Path, dtype: str):
    engine = loaded(any_folder, dtype=dtype)
    engine.create("m", WHOLE)
    train(engine, ADAM, 2)
    snapshot = engine.snapshot("m")
    bits, specs = canonical.bits(snapshot), canonical.specs(snapshot)

    model = engine._passes._base.model
    assert bits.keys() == specs.keys() == dict(model.named_parameters()).keys()
    for name, one in model.named_parameters():
        word, unsigned = WORDS[str(one.dtype).removeprefix("torch.")]
        held = one.detach().reshape(-1).view(word).numpy().view(unsigned)
        np.testing.assert_array_equal(bits[name], held, err_msg=name)
        assert specs[name].shape == tuple(one.shape)
    assert canonical.size_bytes(snapshot) == sum(one.nbytes for one in bits.values())


def test_the_root_names_the_weights_and_nothing_else(tiny_llama: Path):
    roots = []
    for _ in range(2):
        engine = loaded(tiny_llama)
        engine.create("m", WHOLE)
        train(engine)
        roots.append(canonical.root(engine.snapshot("m")))
    train(engine)

    assert roots[0] == roots[1] != canonical.root(engine.snapshot("m"))


def test_an_adapter_has_no_lineage_of_its_own(tiny_llama: Path):
    from tinsmith_trainer import base_model
    from tinsmith_trainer.engine import TrainingEngine

    engine = TrainingEngine(base_model.load(str(tiny_llama), name="tiny"))
    engine.create("m", LoraShape(rank=2))
    with pytest.raises(TypeError, match="trained whole"):
        canonical.root(engine.snapshot("m"))
