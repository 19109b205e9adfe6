"""What the sampler serves on a device is what the trainer trains there."""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.engines import adapted
from tests.unit.sampler.engines import bits, running
from tests.unit.sampler.examples import prompt, row, scoring
from tests.unit.trainer.examples import cross_entropy, datum, logprobs

from tinsmith_trainer.checkpoint_files import to_files

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
    files = to_files(trainer.snapshot("m"), with_optimizer=False)
    async with running(folders[family], **form) as sampler:
        await sampler.load_adapter("a", files)
        made = await sampler.generate(row(prompt=prompt(40), max_tokens=20, adapter="a"))
        text = np.concatenate([prompt(40), made.tokens])
        scored = await sampler.score(scoring(text, adapter="a"))

    op = cross_entropy(datum(text[:-1], text[1:]), forward_only=True)
    (trained,) = logprobs(trainer.forward_backward("m", op))
    np.testing.assert_allclose(made.logprobs, trained[39:], rtol=0, atol=close)
    np.testing.assert_allclose(scored.logprobs[1:], trained, rtol=0, atol=close)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_request_drawn_twice_has_the_same_bits(folders, device, dtype):
    request = row(prompt=prompt(40), max_tokens=20, seed=7)
    drawn = []
    for _ in range(2):
        async with running(folders["llama"], dtype=dtype, device=device) as sampler:
            drawn += [bits(await sampler.generate(request)) for _ in range(2)]

    assert drawn == drawn[:1] * 4
