"""What the sampler serves on a device is what the trainer trains there."""

from __future__ import annotations

import pytest
from tests.gpu.engines import adapted
from tests.parity.agreement import require_same_logprobs
from tests.unit.sampler.engines import bits, running
from tests.unit.sampler.examples import prompt, row

pytestmark = pytest.mark.gpu
FORMS = [
    ("llama", "none", "bfloat16", 0.1),
    ("qwen3", "none", "bfloat16", 0.1),
    ("llama", "nf4", "bfloat16", 0.1),
    ("llama", "none", "float32", 1e-4),
    ("gemma2", "none", "float32", 1e-4),
]
"""Family, quantisation, dtype, and how far log-probabilities may differ."""


@pytest.mark.parametrize(("family", "quantization", "dtype", "close"), FORMS)
async def test_logprobs_are_the_trainers(folders, device, family, quantization, dtype, close):
    form = {"dtype": dtype, "quantization": quantization, "device": device}
    trainer = adapted(folders[family], **form)
    await require_same_logprobs(trainer, folders[family], form, close=close)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_request_drawn_twice_has_the_same_bits(folders, device, dtype):
    request = row(prompt=prompt(40), max_tokens=20, seed=7)
    drawn = []
    for _ in range(2):
        async with running(folders["llama"], dtype=dtype, device=device) as sampler:
            drawn += [bits(await sampler.generate(request)) for _ in range(2)]

    assert drawn == drawn[:1] * 4
