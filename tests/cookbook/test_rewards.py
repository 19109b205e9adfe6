"""Reinforcement learning of a small model that is half-way there: the reward must rise."""

from __future__ import annotations

import pytest
from tests.cookbook import chats
from tests.cookbook.recipe import MODEL

SIZE = ("groups_per_batch=8", "group_size=8", "max_tokens=5", "learning_rate=3e-3")
QUIET = ("eval_every=0", "save_every=0")
STEPS = 8
ASYNC = ("max_steps_off_policy=2",)
STREAMED = (
    "stream_minibatch_config.groups_per_batch=8",
    "stream_minibatch_config.num_minibatches=2",
)


@pytest.mark.parametrize(
    "chosen",
    [(), ("loss_fn=importance_sampling",), ASYNC, ("loss_fn=importance_sampling", *STREAMED)],
    ids=["default", "importance_sampling", "async", "streamed"],
)
def test_math_rl_raises_the_reward(recipes, half_taught, chosen):
    recipes.run(
        "math_rl",
        *("env=arithmetic", MODEL, f"load_checkpoint_path={half_taught}", *SIZE, *QUIET),
        *(*chosen, f"max_steps={STEPS}", "log_path=rl"),
    )

    log = recipes.log("rl")
    rewards = log.of("env/all/reward/total")
    assert len(rewards) == STEPS
    assert -0.09 < rewards[0] < -0.01  # some answers count, some do not
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.01
    assert max(log.of("grad_norm")) > 0
    assert "final" in log.checkpoints


CONFIGS = """\
---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
---
"""


def test_rl_loop_raises_the_reward(recipes):
    # A folder in the place where a recipe runs is loaded in the place of the hub's data set.
    chats.write(recipes.folder / "HuggingFaceH4/no_robots/train.jsonl", chats.boxed(256))
    rows = [{"question": chats.LEGS, "answer": "Two, as many as wings.\n#### 2"}] * 64
    problems = chats.write(recipes.folder / "openai/gsm8k/train.jsonl", rows)
    problems.with_name("README.md").write_text(CONFIGS)
    recipes.run("sl_loop", MODEL, "batch_size=16", "learning_rate=1e-2", "log_path=taught")
    taught = recipes.log("taught").checkpoints["final"]["state_path"]
    start = {"name": "taught", "batch": 0, "state_path": taught}
    chats.write(recipes.folder / "rl/checkpoints.jsonl", [start])

    recipes.run(
        "rl_loop",
        *(MODEL, "batch_size=8", "group_size=8", "max_tokens=16", "learning_rate=3e-3"),
        *("max_steps=6", "save_every=3", "log_path=rl"),
    )

    log = recipes.log("rl")
    rewards = log.of("reward/total")
    assert len(rewards) == 6
    assert 0 < rewards[0] < 0.8
    assert rewards[-1] > rewards[0] + 0.1
    assert max(log.of("grad_norm")) > 0
    assert set(log.checkpoints) == {"taught", "000003", "final"}
