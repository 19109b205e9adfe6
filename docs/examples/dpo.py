"""Direct preference optimisation: a loss of our own on the server's log-probabilities.

python dpo.py --model HuggingFaceTB/SmolLM2-135M-Instruct --steps 10
"""

from __future__ import annotations

import random

import numpy as np
import sums
import tinker
import torch
from tinker import types
from torch.nn.functional import logsigmoid

BETA = 0.1
BATCH = 8  # pairs


def datum(tokenizer, pair: tuple[int, int], text: str) -> types.Datum:
    """The question with this answer."""
    prompt = sums.prompt(tokenizer, pair)
    answer = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "weights": np.array(weights, np.float32),
        },
    )


def preference(tokenizer, pair: tuple[int, int]) -> list[types.Datum]:
    """The number alone is preferred to a sentence around it."""
    total = sum(pair)
    chosen, rejected = str(total), f"The sum of {pair[0]} and {pair[1]} is {total}."
    return [datum(tokenizer, pair, text) for text in (chosen, rejected)]


def scores(data: list[types.Datum], logprobs: list[torch.Tensor]) -> torch.Tensor:
    """[pairs, 2]: log-probability of the chosen and of the rejected answer."""
    weights = [torch.tensor(one.loss_fn_inputs["weights"].to_numpy()) for one in data]
    summed = [(one * weight).sum() for one, weight in zip(logprobs, weights, strict=True)]
    return torch.stack(summed).reshape(-1, 2)


def main() -> None:
    """Train, printing loss, accuracy and margin of each batch."""
    args = sums.arguments("Prefer numbers to sentences.", steps=10, rate=1e-4).parse_args()
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(args.model, rank=16, seed=0).result()
    tokenizer = training.get_tokenizer()

    # Before the first step the model is its own reference.
    every = [preference(tokenizer, pair) for pair in sums.TRAIN]
    flat = [one for both in every for one in both]
    outputs = training.forward(flat, "cross_entropy").result().loss_fn_outputs
    reference = scores(flat, [torch.tensor(one["logprobs"].to_numpy()) for one in outputs])

    draw = random.Random(0)
    for step in range(args.steps):
        picked = draw.sample(range(len(every)), BATCH)
        data = [one for n in picked for one in every[n]]

        def loss(data, logprobs, picked=picked):
            gain = scores(data, logprobs) - reference[picked]
            margins = BETA * (gain[:, 0] - gain[:, 1])
            metrics = {
                "accuracy": (margins > 0).float().mean().item(),
                "margin": margins.mean().item(),
            }
            value = -logsigmoid(margins).mean()
            return value, {**metrics, "loss": value.item()}

        result = training.forward_backward_custom(data, loss).result()
        training.optim_step(types.AdamParams(learning_rate=args.learning_rate)).result()
        shown = "  ".join(
            f"{name} {result.metrics[name]:.3f}" for name in ("loss", "accuracy", "margin")
        )
        print(f"step {step:3d}  {shown}", flush=True)

    print("to sample from:", training.save_weights_for_sampler("dpo").result().path)


if __name__ == "__main__":
    main()
