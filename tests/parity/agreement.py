"""Trainer and sampler on one adapter: the log-probabilities of both, side by side."""

from __future__ import annotations

import numpy as np
from tests.unit.sampler.engines import running
from tests.unit.sampler.examples import prompt, row, scoring
from tests.unit.trainer.examples import cross_entropy, datum, logprobs

from tinsmith_trainer.checkpoint_files import to_files


async def require_same_logprobs(trainer, folder, form, *, close):
    """What a sampler of ``form`` draws and scores under the model "m" is what ``trainer`` says."""
    files = to_files(trainer.snapshot("m"), with_optimizer=False)
    async with running(folder, **form) as sampler:
        await sampler.load_adapter("a", files)
        made = await sampler.generate(row(prompt=prompt(40), max_tokens=20, adapter="a"))
        text = np.concatenate([prompt(40), made.tokens])
        scored = await sampler.score(scoring(text, adapter="a"))

    op = cross_entropy(datum(text[:-1], text[1:]), forward_only=True)
    (trained,) = logprobs(trainer.forward_backward("m", op))

    np.testing.assert_allclose(made.logprobs, trained[39:], rtol=0, atol=close)
    np.testing.assert_allclose(scored.logprobs[1:], trained, rtol=0, atol=close)
