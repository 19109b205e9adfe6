"""Reinforcement learning with a reward that a program computes: its curve rises.

python rl.py --model HuggingFaceTB/SmolLM2-135M-Instruct --steps 15
python rl.py --reward short
python rl.py --load tinker://RUN/weights/sft     # go on from a saved state
"""

from __future__ import annotations

import random

import numpy as np
import sums
import tinker
from tinker import types

GROUPS, SAMPLES = 8, 8  # questions of a step, answers to each
PARAMS = types.SamplingParams(max_tokens=8, temperature=1.0)


def datum(prompt: list[int], drawn: types.SampledSequence, advantage: float) -> types.Datum:
    """An answer, with what its sampler thought of it; the prompt's tokens count for nothing."""
    tokens = prompt + drawn.tokens
    before = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "logprobs": np.array([*before, *drawn.logprobs], np.float32),
            "advantages": np.array([*before, *[advantage] * len(drawn.tokens)], np.float32),
        },
    )


def collect(sampler, tokenizer, pairs, score) -> tuple[list[types.Datum], float]:
    """Answers to each question, compared with each other; and their mean reward."""
    prompts = [sums.prompt(tokenizer, pair) for pair in pairs]
    futures = [
        sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, PARAMS) for prompt in prompts
    ]
    data, every = [], []
    for pair, prompt, future in zip(pairs, prompts, futures, strict=True):
        drawn = future.result().sequences
        texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in drawn]
        rewards = np.array([score(text, pair) for text in texts])
        every.extend(rewards)
        advantages = rewards - rewards.mean()
        if advantages.any():  # else the group teaches nothing
            data += [
                datum(prompt, one, float(advantage))
                for one, advantage in zip(drawn, advantages, strict=True)
            ]
    return data, float(np.mean(every))


def main() -> None:
    """Sample, score, step; print the curve of rewards at the end."""
    args = sums.rl_arguments("Reward answers.").parse_args()
    service = tinker.ServiceClient()
    if args.load:
        training = service.create_training_client_from_state(args.load).result()
    else:
        training = service.create_lora_training_client(args.model, rank=16, seed=0).result()
    tokenizer = training.get_tokenizer()

    draw, rewards = random.Random(0), []
    for step in range(args.steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        pairs = draw.sample(sums.TRAIN, GROUPS)
        data, reward = collect(sampler, tokenizer, pairs, sums.REWARDS[args.reward])
        rewards.append(reward)
        if data:
            loss = training.forward_backward(data, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=args.learning_rate)).result()
            loss.result()
        print(f"step {step:3d}  reward {reward:.3f}  datums {len(data)}", flush=True)

    print("\nreward by step\n" + sums.curve(rewards))
    print("to sample from:", training.save_weights_for_sampler("rl").result().path)


if __name__ == "__main__":
    main()
