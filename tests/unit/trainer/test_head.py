"""Chunked scores equal those of full logits and autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from tinsmith_trainer import head
from tinsmith_trainer.head import OutputHead, Scores
from tinsmith_trainer.lora import LoraPair
from tinsmith_trainer.loss import Terms

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS, HIDDEN, VOCAB, RANK = 50, 16, 96, 4


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens a chunk: three whole ones and a ragged one."""
    monkeypatch.setattr(head, "_CHUNK_TOKENS", 16)
    monkeypatch.setitem(head._CHUNK_LOGITS, "cpu", 0)


class Case:
    """Random inputs, and the reference made of them with full logits."""

    def __init__(
        self, *, bias: bool = False, dtype: torch.dtype = torch.float32, targets: int = 1
    ) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype).requires_grad_(False)
        self.hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
        self.targets = torch.randint(0, VOCAB, (TOKENS, targets))
        self.weights = torch.randn(TOKENS, targets)
        self.weights[10:40] = 0
        factors = [torch.randn(RANK, HIDDEN), torch.randn(VOCAB, RANK)]
        for factor in factors:
            factor.requires_grad_().grad = torch.zeros_like(factor)
        self.pair = LoraPair(*factors, 0.5)

    def terms(self, rows: slice, logprobs: Tensor) -> Terms:
        slope = -self.weights[rows]
        return Terms(slope * logprobs, slope)

    def score(
        self,
        *,
        adapted: bool = True,
        with_gradient: bool = True,
        prepare: Callable[[Tensor], None] | None = None,
    ) -> Scores:
        pair = self.pair if adapted else None
        return OutputHead(self.linear).score(
            self.hidden.detach(),
            self.targets,
            self.terms,
            pair,
            with_gradient=with_gradient,
            prepare=prepare,
        )

    def reference(self, *, adapted: bool = True) -> tuple[Tensor, list[Tensor]]:
        """Log-probabilities, and gradients of the hidden states, A and B."""
        *factors, scale = self.pair
        logits = self.linear(self.hidden.float())
        if adapted:
            logits = logits + scale * (self.hidden.float() @ factors[0].T) @ factors[1].T
        logprobs = logits.log_softmax(-1).gather(1, self.targets)
        wanted = [self.hidden, *factors] if adapted else [self.hidden]
        return logprobs, list(torch.autograd.grad(-(self.weights * logprobs).sum(), wanted))


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_logprobs_and_gradients_equal_those_of_full_logits(adapted: bool, bias: bool, targets: int):
    case = Case(bias=bias, targets=targets)
    logprobs, gradients = case.reference(adapted=adapted)

    scores = case.score(adapted=adapted)

    ours = [scores.grad_hidden, case.pair.A_RI.grad, case.pair.B_OR.grad][: len(gradients)]
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=0, atol=2e-6)
    torch.testing.assert_close(scores.values, -case.weights * logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, gradients, rtol=1e-5, atol=1e-5)


def test_gradients_add_to_what_the_factors_have():
    case = Case()
    case.score()
    once = case.pair.B_OR.grad.clone()
    case.score()

    torch.testing.assert_close(case.pair.B_OR.grad, 2 * once)


def test_forward_only_gives_the_same_bits_and_no_gradient():
    case = Case()
    scores = case.score(with_gradient=False)

    assert scores.grad_hidden is None
    assert not case.pair.A_RI.grad.any()
    assert torch.equal(scores.logprobs, case.score().logprobs)


def test_likely_tokens_keep_the_precision_of_their_gradient_in_bfloat16():
    case = Case(dtype=torch.bfloat16)
    with torch.no_grad():
        case.hidden.copy_(30 * case.linear.weight[case.targets[:, 0]])
    case.weights.fill_(1.0)
    case.linear.float()
    logprobs, (expected, *_) = case.reference(adapted=False)
    case.linear.bfloat16()

    gradient = case.score(adapted=False).grad_hidden

    likely = logprobs[:, 0] > -0.05
    assert likely.any()
    error = (gradient - expected)[likely].abs().max()
    assert error < 0.05 * expected[likely].abs().max()


def test_logits_far_apart_do_not_overflow():
    case = Case()
    with torch.no_grad():
        case.hidden *= 1e4

    assert torch.isfinite(case.score().logprobs).all()


def test_a_target_given_twice_has_the_sum_of_both_weights():
    once, twice = Case(), Case()
    twice.targets = once.targets.expand(-1, 2)
    twice.weights = torch.cat([0.25 * once.weights, 0.75 * once.weights], dim=1)

    expected, found = once.score(), twice.score()

    torch.testing.assert_close(found.grad_hidden, expected.grad_hidden, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.values.sum(), expected.values.sum())


def test_a_loss_that_sees_all_logprobs_first_is_given_the_same_bits():
    case, seen = Case(), []

    prepared = case.score(prepare=lambda logprobs: seen.append(logprobs.clone()))

    plain = case.score()
    assert torch.equal(seen[0], plain.logprobs)
    assert torch.equal(prepared.grad_hidden, plain.grad_hidden)
