"""Supervised fine-tuning: the loss falls, and the answers change.

python sft.py --model HuggingFaceTB/SmolLM2-135M-Instruct --steps 20
"""

from __future__ import annotations

import random

import numpy as np
import sums
import tinker
from tinker import types

BATCH = 16


def datum(tokenizer, pair: tuple[int, int]) -> types.Datum:
    """Trains on the answer: the weights of the prompt's tokens are 0."""
    prompt, answer = sums.prompt(tokenizer, pair), sums.answer(tokenizer, pair)
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "weights": np.array(weights, np.float32),
        },
    )


def main() -> None:
    """Train, printing the loss per token, then answer what was held out."""
    args = sums.arguments("Teach numbers as answers.", steps=20, rate=1e-3).parse_args()
    service = tinker.ServiceClient()  # TINKER_BASE_URL, TINKER_API_KEY
    training = service.create_lora_training_client(args.model, rank=16, seed=0).result()
    tokenizer = training.get_tokenizer()

    draw = random.Random(0)
    for step in range(args.steps):
        batch = [datum(tokenizer, pair) for pair in draw.sample(sums.TRAIN, BATCH)]
        # Both are on their way before either is waited for: no round trip in between.
        loss = training.forward_backward(batch, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=args.learning_rate))
        stepped.result()
        weight = sum(one.loss_fn_inputs["weights"].to_numpy().sum() for one in batch)
        print(f"step {step:3d}  loss per token {loss.result().metrics['loss:sum'] / weight:.4f}")

    sampler = training.save_weights_and_get_sampling_client().result()
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0)
    for pair in sums.HELD_OUT[:4]:
        prompt = types.ModelInput.from_ints(sums.prompt(tokenizer, pair))
        drawn = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result()
        text = tokenizer.decode(drawn.sequences[0].tokens, skip_special_tokens=True)
        print(f"{pair[0]} + {pair[1]} = {text!r}")

    print("to train on:   ", training.save_state("sft").result().path)
    print("to sample from:", training.save_weights_for_sampler("sft").result().path)


if __name__ == "__main__":
    main()
