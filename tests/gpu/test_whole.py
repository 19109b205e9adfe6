"""All weights trained on a device: the steps of float32 on a CPU, and bfloat16 beside masters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.gpu.engines import learn, scores, whole

from tinsmith.messages.ops import WHOLE, OptimStep
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.state import digest

pytestmark = pytest.mark.gpu
# With a smaller eps, rounding of single gradients near zero is what would be compared.
STEPS = {
    "adamw": OptimStep(learning_rate=1e-3, eps=1e-4, weight_decay=0.1, grad_clip_norm=20.0),
    "dimuon": OptimStep(learning_rate=1e-3, optimizer="dimuon"),
}


@pytest.mark.parametrize(("optimizer", "close"), [("adamw", 1e-4), ("dimuon", 1e-2)])
def test_float32_steps_are_those_of_the_cpu(folders, device, optimizer, close):
    """Dimuon's part that is AdamW has the eps that it has."""
    engines = [whole(folders["qwen3"], name) for name in (device, "cpu")]
    for engine in engines:
        engine.drop("m")
        engine.create("m", WHOLE, optimizer)
        for _ in range(3):
            learn(engine)
            engine.optim_step("m", STEPS[optimizer])

    np.testing.assert_allclose(scores(engines[0]), scores(engines[1]), rtol=0, atol=close)


def test_in_bfloat16_masters_are_float32_and_weights_are_those_rounded(folders, device):
    engine = whole(folders["llama"], device, dtype="bfloat16")
    before = engine._adapters.get("m").weights.clone()
    learn(engine)
    engine.optim_step("m", OptimStep(learning_rate=1e-6))
    tenant, model = engine._adapters.get("m"), engine._form._parameters._parameters

    assert tenant.weights.dtype == torch.float32
    assert 0 < (tenant.weights - before).abs().max() < 2e-6
    for name, master in tenant.layout.named(tenant.weights).items():
        assert torch.equal(model[name], master.to(torch.bfloat16)), name
        assert model[name].device.type == device


def test_a_state_that_is_saved_and_loaded_goes_on_with_the_same_bits(folders, device):
    live, resumed = (whole(folders["llama"], device, dtype="bfloat16") for _ in range(2))
    step = OptimStep(learning_rate=1e-3)
    learn(live)
    live.optim_step("m", step)
    files = dict(to_files(live.snapshot("m"), with_optimizer=True))
    resumed.restore("m", files, with_optimizer=True)
    for engine in (live, resumed):
        learn(engine)
        engine.optim_step("m", step)

    assert digest(live.state("m")) == digest(resumed.state("m"))
