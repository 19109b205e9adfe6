"""A model that is trained whole and sampled on SGLang, as a user runs it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.integration import conftest as integration
from tests.integration.steps import datum
from tests.sglang.engines import EXACT
from tests.sglang.test_up import PATIENCE_S, PROMPT, SETTINGS
from tinker import types as T

WHOLE = f"{integration.MODEL}:full"
ADAM = T.AdamParams(learning_rate=1e-3)
VERSIONS = 3

pytestmark = [pytest.mark.filterwarnings(entry) for entry in integration.CLIENT_WARNINGS]


@pytest.fixture(scope="module")
def up(model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "START_PATIENCE_S", PATIENCE_S)
        folder = tmp_path_factory.mktemp("whole-up")
        extra = f"full = true\n{SETTINGS}"
        running = integration.start(folder, model_folder=model, extra=extra)
    yield running
    integration.stop(running)


@pytest.mark.timeout(2400)  # three servers start, one after another
def test_every_saved_version_is_sampled_with_its_own_numbers(up):
    clients = integration.connect(up)
    model = next(clients).create_lora_training_client(WHOLE).result()
    versions = []
    for _ in range(VERSIONS):
        model.forward_backward([datum([5, 6, 7, 8, 9, 10])], "cross_entropy").result()
        model.optim_step(ADAM).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        drawn, scored = drawn_and_scored(sampler)
        expected = told_by_the_trainer(model, drawn.tokens)
        np.testing.assert_allclose(drawn.logprobs, expected, atol=EXACT)
        np.testing.assert_allclose(scored, expected, atol=EXACT)
        versions.append((sampler, expected, drawn.tokens))
    assert len({tuple(expected) for _, expected, _ in versions}) == VERSIONS
    assert followed(up)

    sampler, expected, tokens = versions[0]  # an older one comes from its files
    again, scored = drawn_and_scored(sampler)
    assert list(again.tokens) == list(tokens)
    np.testing.assert_allclose(scored, expected, atol=EXACT)
    next(clients, None)


def drawn_and_scored(sampler):
    params = T.SamplingParams(max_tokens=12, seed=1, stop=[], temperature=0.7)
    (drawn,) = sampler.sample(PROMPT, 1, params).result().sequences
    whole = T.ModelInput.from_ints([*PROMPT.to_ints(), *drawn.tokens])
    scored = sampler.compute_logprobs(whole).result()
    return drawn, np.array(scored[PROMPT.length :])


def told_by_the_trainer(model, tokens):
    whole = datum([*PROMPT.to_ints(), *tokens])
    output = model.forward([whole], "cross_entropy").result().loss_fn_outputs[0]
    return np.array(output["logprobs"].data)[PROMPT.length - 1 : -1]


def followed(up):
    """That the versions came by the lineage, from the log of the server."""
    log = (up.folder / "server.log").read_text(errors="replace")
    return log.count("version served") == VERSIONS and "version loaded from files" not in log
