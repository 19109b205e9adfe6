"""Steps of a small training loop, as a user would write them."""

from __future__ import annotations

import numpy as np

RANK = 8


def datum(tokens, targets=None, weights=None):
    from tinker import types as T

    tokens = list(tokens)
    targets = targets if targets is not None else [*tokens[1:], tokens[0]]
    inputs = {"target_tokens": np.array(targets)}
    inputs["weights"] = np.ones(len(tokens), np.float32) if weights is None else weights
    return T.Datum(model_input=T.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


X, Y = datum(range(5, 25)), datum(range(40, 70))
PROBE = datum(range(7, 27))


def new_model(client, seed=0, **options):
    return client.create_lora_training_client(
        "tiny/llama", rank=RANK, seed=seed, **options
    ).result()


def step(model, data=(X, Y), lr=1e-2):
    from tinker import types as T

    losses = model.forward_backward(list(data), "cross_entropy")
    stepped = model.optim_step(T.AdamParams(learning_rate=lr))
    result = losses.result()
    stepped.result()
    return result.metrics["loss:sum"]


def probe(model):
    output = model.forward([PROBE], "cross_entropy").result().loss_fn_outputs[0]
    return np.array(output["logprobs"].data, np.float32)
