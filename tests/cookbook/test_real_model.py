"""The arithmetic of math_rl with the real model of `make demo`, as a user would begin."""

from __future__ import annotations

import pytest
from tests.cookbook.recipe import Recipes

from tinsmith import paths
from tinsmith.demo import model, server


@pytest.fixture
def real_recipes(tmp_path):
    """Recipes against a server of its own."""
    config = server.write_config(tmp_path, model.fetch(paths.cache_dir().absolute()))
    with server.running(config):
        yield Recipes(config, tmp_path, tmp_path)


def test_a_real_model_earns_more_after_some_steps(real_recipes):
    real_recipes.run(
        "math_rl",
        *("env=arithmetic", f"model_name={model.NAME}", "groups_per_batch=4", "group_size=4"),
        *("max_tokens=5", "learning_rate=5e-4", "max_steps=4", "eval_every=0", "save_every=0"),
        "log_path=rl",
    )

    log = real_recipes.log("rl")
    rewards = log.of("env/all/reward/total")
    assert len(rewards) == 4
    assert max(rewards[2:]) > rewards[0] + 0.02
    # Trainer and sampler compute the same log-probabilities.
    assert max(map(abs, log.of("optim/kl_sample_train_v1"))) < 1e-3
