"""The adapted layers, what they adapt, and how adapters start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tinsmith.errors import InvalidRequest, StartupError
from tinsmith.messages.ops import LoraShape
from tinsmith_trainer import base_model
from tinsmith_trainer.adapters import Adapter, LoraLayout
from tinsmith_trainer.lora import ActiveAdapter, LoraLinear, LoraPair, check_shape
from tinsmith_trainer.targets import inject

if TYPE_CHECKING:
    from pathlib import Path

    from tinsmith_trainer.targets import Targets

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def smollm2_targets() -> Targets:
    """Those of SmolLM2-135M, from its sizes alone."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return inject(LlamaForCausalLM(config), ActiveAdapter())


@pytest.mark.parametrize(
    ("group", "parameters"),
    [("train_attn", 115_200), ("train_mlp", 190_080), ("train_unembed", 49_728)],
)
def test_parameters_per_rank_are_those_of_the_public_table(
    smollm2_targets: Targets, group: str, parameters: int
):
    none = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    shape = LoraShape(**{**none, group: True})

    assert LoraLayout(smollm2_targets.of(shape), 1).size == parameters
    assert LoraLayout(smollm2_targets.of(shape), 32).size == 32 * parameters


def test_all_groups_at_rank_32_have_11_million_parameters(smollm2_targets: Targets):
    assert LoraLayout(smollm2_targets.of(LoraShape()), 32).size == 11_360_256


def fresh(tiny_llama: Path, **shape: object) -> Adapter:
    lora = LoraShape(**{"rank": 4, **shape})
    targets = inject(base_model.load(str(tiny_llama), name="tiny").model, ActiveAdapter())
    return Adapter.fresh(lora, targets.of(lora), CPU)


def test_a_seed_gives_these_bits_on_every_machine(tiny_llama: Path):
    pairs = fresh(tiny_llama, seed=7).pairs
    first = pairs["model.layers.0.self_attn.q_proj"].A_RI[0, :3].tolist()
    last = pairs["lm_head"].A_RI[-1, -3:].tolist()

    assert first == [0.09982174634933472, -0.07024647295475006, -0.06724968552589417]
    assert last == [0.05468320846557617, 0.10485123097896576, 0.12377113103866577]


def test_a_starts_kaiming_uniform_and_b_zero(tiny_llama: Path):
    for pair in fresh(tiny_llama, rank=128).pairs.values():
        bound = pair.A_RI.shape[1] ** -0.5

        assert 0.95 * bound < pair.A_RI.abs().max() <= bound
        assert pair.A_RI.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not pair.B_OR.any()


def test_seeds_of_any_64_bits_are_taken_and_differ(tiny_llama: Path):
    seeds = (0, 2**32, -1, 2**63 - 1)

    assert len({fresh(tiny_llama, seed=seed).weights.sum().item() for seed in seeds}) == 4


@pytest.mark.parametrize("rank", [0, 3, 48, 129, 256, -2])
def test_a_rank_that_is_no_power_of_two_up_to_128_is_refused(rank: int):
    with pytest.raises(InvalidRequest, match=rf"rank: {rank} is not a power of two from 1 to 128"):
        check_shape(LoraShape(rank=rank))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_not_positive_is_refused(alpha: float):
    with pytest.raises(InvalidRequest, match=r"alpha: .* is not a positive number; use 32"):
        check_shape(LoraShape(alpha=alpha))


def test_nothing_to_train_is_refused():
    with pytest.raises(InvalidRequest, match="set at least one of them"):
        check_shape(LoraShape(train_attn=False, train_mlp=False, train_unembed=False))


def test_an_architecture_without_known_matrices_is_named():
    with pytest.raises(StartupError, match=r"GPT2LMHeadModel is not an architecture .* q_proj"):
        inject(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1)), ActiveAdapter())


@pytest.fixture
def layer() -> LoraLinear:
    torch.manual_seed(0)
    return LoraLinear("x", nn.Linear(6, 5).requires_grad_(False), ActiveAdapter())


def pair() -> LoraPair:
    torch.manual_seed(1)
    made = LoraPair(torch.randn(2, 6).requires_grad_(), torch.randn(5, 2).requires_grad_(), 0.5)
    made.A_RI.grad, made.B_OR.grad = torch.zeros(2, 6), torch.zeros(5, 2)
    return made


def test_without_an_adapter_the_layer_is_its_base(layer: LoraLinear):
    x = torch.randn(2, 3, 6)

    assert torch.equal(layer(x), layer.base(x))


def test_the_adapter_is_active_only_inside_its_block(layer: LoraLinear):
    x = torch.randn(3, 6)
    with layer.active.use({"x": pair()}):
        inside = layer(x)

    assert not torch.allclose(inside, layer.base(x))
    assert torch.equal(layer(x), layer.base(x))


@pytest.mark.parametrize("x_needs_grad", [False, True])
def test_output_and_gradients_equal_the_plain_formula(layer: LoraLinear, x_needs_grad: bool):
    mine = pair()
    x = torch.randn(2, 3, 6, requires_grad=x_needs_grad)
    wanted = [mine.A_RI, mine.B_OR, *([x] if x_needs_grad else [])]
    upstream = torch.randn(2, 3, 5)
    plain = layer.base(x) + mine.scale * (x @ mine.A_RI.T) @ mine.B_OR.T
    expected = torch.autograd.grad(plain, wanted, upstream)

    with layer.active.use({"x": mine}):
        y = layer(x)

    y.backward(upstream)

    torch.testing.assert_close(y, plain)
    torch.testing.assert_close([tensor.grad for tensor in wanted], [*expected])


def test_in_bfloat16_the_gradient_of_the_factors_stays_float32(layer: LoraLinear):
    layer.base.bfloat16()
    mine = pair()
    with layer.active.use({"x": mine}):
        y = layer(torch.randn(3, 6, dtype=torch.bfloat16))
    y.sum().backward()

    assert y.dtype == torch.bfloat16
    assert mine.A_RI.grad.dtype == mine.B_OR.grad.dtype == torch.float32
