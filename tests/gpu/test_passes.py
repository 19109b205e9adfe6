"""Passes over the model: the numbers of float32 on a CPU, whatever shares the pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.gpu.engines import DATA, adapted, apart, gradient, learn, scores
from tests.unit.trainer.examples import logprobs
from tests.unit.trainer.test_mixing import OPS, several, together

from tinsmith.messages.ops import LoraShape
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model
from tinsmith_trainer.engine import TrainingEngine

pytestmark = pytest.mark.gpu
LOGPROB, MEAN_LOGPROB, GRADIENT = 0.25, 0.02, 0.05
"""How far bfloat16 may be off: a log-probability, all of them on average, a gradient's length."""


def close(dtype):
    """How far logprobs and gradients of one dtype may be apart when sums have other orders."""
    return (1e-4, 1e-4) if dtype == "float32" else (LOGPROB, GRADIENT)


def test_auto_is_the_device_under_test(device):
    if device == "cuda" or not torch.cuda.is_available():
        assert base_model.find_device("auto").type == device


@pytest.mark.parametrize("family", tiny_model.FAMILIES)
def test_float32_is_that_of_the_cpu_in_every_family(folders, device, family):
    ours, theirs = adapted(folders[family], device), adapted(folders[family], "cpu")
    done, expected = learn(ours), learn(theirs)

    np.testing.assert_allclose(scores(ours), scores(theirs), rtol=0, atol=1e-4)
    assert done.metrics == pytest.approx(expected.metrics, rel=1e-4)
    assert apart(gradient(ours), gradient(theirs)) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_bfloat16_base_with_float32_adapters_is_close_to_float32(folders, device, family):
    half = adapted(folders[family], device, dtype="bfloat16")
    exact = adapted(folders[family], "cpu")
    done, expected = learn(half), learn(exact)
    tenant = half._adapters.get("m")

    assert tenant.weights.dtype == tenant.gradient.dtype == torch.float32
    off = np.abs(scores(half) - scores(exact))
    assert off.max() < LOGPROB
    assert off.mean() < MEAN_LOGPROB
    assert done.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=0.01)
    assert apart(gradient(half), gradient(exact)) < GRADIENT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gemma2"])
def test_rows_of_one_pass_are_those_of_passes_of_their_own(folders, device, family, dtype):
    """Of other lengths, so with padding; with windows, caps and sinks too."""
    shared = adapted(folders[family], device, dtype=dtype)
    single = adapted(folders[family], device, dtype=dtype, tokens=1)
    learn(shared)
    learn(single)
    logprob, length = close(dtype)

    np.testing.assert_allclose(scores(shared), scores(single), rtol=0, atol=logprob)
    assert apart(gradient(shared), gradient(single)) < length


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_pass_of_several_models_is_that_of_each_alone(folders, device, family, dtype):
    mixed, alone = (several(folders[family], device=device, dtype=dtype) for _ in range(2))
    found = together(mixed, OPS)
    logprob, length = close(dtype)
    for model_id, op in OPS.items():
        expected = alone.forward_backward(model_id, op)
        ours, theirs = (np.concatenate(logprobs(done)) for done in (found[model_id], expected))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=logprob)
        assert apart(gradient(mixed, model_id), gradient(alone, model_id)) < length


def test_checkpointed_layers_give_the_same_bits(folders, device):
    engines = []
    for checkpointing in (False, True):
        base = base_model.load(str(folders["llama"]), name="tiny", device=device)
        engine = TrainingEngine(base, microbatch_tokens=512, checkpointing=checkpointing)
        engine.create("m", LoraShape(rank=8))
        engines.append(engine)
    plain, checkpointed = engines

    assert learn(plain, DATA) == learn(checkpointed, DATA)
    assert torch.equal(gradient(plain), gradient(checkpointed))
