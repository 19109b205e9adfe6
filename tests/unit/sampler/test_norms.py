"""Norms in one operation: the same bits, or left as they are."""

from __future__ import annotations

import pytest
import torch
from tests.unit.sampler.examples import prompt
from torch import nn
from transformers import AutoModelForCausalLM

from tinsmith.testing import tiny_model
from tinsmith_sampler import norms


@pytest.mark.parametrize("family", tiny_model.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_computes_the_same_bits(family, dtype, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model.build(tmp_path, family=family), dtype=dtype
    ).eval()
    found = norms.install(model)
    replaced = [module for module in model.modules() if "forward" in vars(module)]
    assert len(replaced) == found
    tokens = torch.from_numpy(prompt(40))[None].long()
    with torch.inference_mode():
        for name, one in model.named_parameters():
            if "norm" in name:  # as when weights are replaced: those of a new model are all one
                one.mul_(torch.linspace(0.5, 1.7, one.numel()).view(one.shape))
        after = model(tokens).logits
        for module in replaced:
            del module.forward
        assert torch.equal(model(tokens).logits, after)
    if dtype == torch.float32 and family == "llama":
        assert found == 2 * model.config.num_hidden_layers + 1


class Other(nn.Module):
    """As the Gemma family has it: the weight is an offset from one."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.full((8,), 0.1)), 1e-6

    def forward(self, x):
        return nn.functional.rms_norm(x, (8,), 1 + self.weight, self.variance_epsilon)


def test_a_norm_that_computes_something_else_is_left_as_it_is():
    model = nn.Sequential(Other())
    x = torch.randn(2, 8)
    before = model(x)

    assert norms.install(model) == 0
    assert torch.equal(model(x), before)
