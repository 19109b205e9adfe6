"""Off-policy reinforcement learning: sampling never waits for training, and lags behind by a bound.

python async_rl.py --model HuggingFaceTB/SmolLM2-135M-Instruct --steps 15 --max-lag 2
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass

import numpy as np
import sums
import tinker
from rl import PARAMS, SAMPLES, datum
from tinker import types

GROUPS = 8  # of a step
ACTORS = 12  # groups that are being sampled at any time


@dataclass
class Policy:
    """The newest weights that can be sampled from, and how many steps they have had."""

    sampler: tinker.SamplingClient
    version: int = 0


async def act(policy: Policy, tokenizer, questions, groups: asyncio.Queue, score) -> None:
    """Answer one question after another, each with the newest weights."""
    for pair in questions:
        prompt, version = sums.prompt(tokenizer, pair), policy.version
        drawn = await policy.sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, PARAMS)
        texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in drawn.sequences]
        rewards = np.array([score(text, pair) for text in texts])
        data = [
            datum(prompt, one, float(reward - rewards.mean()))
            for one, reward in zip(drawn.sequences, rewards, strict=True)
        ]
        await groups.put((version, rewards.mean(), data))


async def gather(groups: asyncio.Queue, version: int, max_lag: int) -> tuple[list, int]:
    """As many groups as a step needs, none older than ``max_lag`` steps; and how many were."""
    kept, dropped = [], 0
    while len(kept) < GROUPS:
        group = await groups.get()
        if version - group[0] <= max_lag:
            kept.append(group)
        else:
            dropped += 1
    return kept, dropped


async def train(training, policy: Policy, groups: asyncio.Queue, args) -> list[float]:
    """One step after another; the mean reward of each."""
    rewards = []
    for step in range(args.steps):
        kept, dropped = await gather(groups, policy.version, args.max_lag)
        data = [one for _, _, group in kept for one in group]
        # The loss weighs each token by how likely it is now against when it was drawn.
        loss = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=args.learning_rate))
        await loss
        await stepped
        lag = max(policy.version - version for version, _, _ in kept)
        rewards.append(float(np.mean([reward for _, reward, _ in kept])))
        print(f"step {step:3d}  reward {rewards[-1]:.3f}  lag {lag}  dropped {dropped}", flush=True)
        policy.sampler = await training.save_weights_and_get_sampling_client()
        policy.version += 1
    return rewards


async def run(args) -> None:
    """Actors and the learner side by side."""
    service = tinker.ServiceClient()
    if args.load:
        training = await service.create_training_client_from_state(args.load)
    else:
        training = await service.create_lora_training_client(args.model, rank=16, seed=0)
    policy = Policy(await training.save_weights_and_get_sampling_client())
    groups: asyncio.Queue = asyncio.Queue(maxsize=ACTORS)
    draw = random.Random(0)
    questions = (draw.choice(sums.TRAIN) for _ in itertools.count())
    tokenizer = training.get_tokenizer()
    score = sums.REWARDS[args.reward]
    actors = [
        asyncio.create_task(act(policy, tokenizer, questions, groups, score)) for _ in range(ACTORS)
    ]
    try:
        rewards = await train(training, policy, groups, args)
    finally:
        for actor in actors:
            actor.cancel()
        await asyncio.gather(*actors, return_exceptions=True)
    print("\nreward by step\n" + sums.curve(rewards))
    print("to sample from:", (await training.save_weights_for_sampler("async_rl")).path)


def main() -> None:
    """Read the options, and run."""
    parser = sums.rl_arguments("Reward answers, off-policy.")
    parser.add_argument("--max-lag", type=int, default=2)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
