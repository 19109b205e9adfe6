"""Small training loops of the unmodified client, supervised and by reinforcement."""

from __future__ import annotations

import random
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tests.integration.conftest import MODEL
from tests.integration.steps import datum

PATIENCE_S = 300.0  # a request that takes longer hangs
RANK = 4
SAMPLES = 2
DRAW_EVERY = 5  # steps of a loop that learns from what it draws


class Tenant:
    """One run, from its creation until it is told that time is over."""

    def __init__(self, client, number, seed):
        self._client = client
        self._rng = random.Random(f"{seed}:{number}")
        self._seed = number
        self._draws = number % 2 == 1
        self._drawn = None  # weights that are sampled from
        self.steps = self.samples = 0
        self.longest_s = 0.0
        self.error = ""
        self.model_id = ""

    def run(self, over):
        """Train until ``over``; what a user would have seen go wrong is kept."""
        try:
            made = self._client.create_lora_training_client(MODEL, rank=RANK, seed=self._seed)
            model = self._waited(made)
            self.model_id = model.model_id
            while not over.is_set():
                data, loss = self._batch(model)
                self._step(model, data, loss)
        except Exception:  # noqa: BLE001 - any error that a client sees breaks the promise
            self.error = traceback.format_exc()

    def _batch(self, model):
        if not self._draws:
            first, length = self._rng.randrange(5, 100), self._rng.randrange(8, 24)
            return [datum(range(first, first + length))], "cross_entropy"
        return self._rollouts(model), "importance_sampling"

    def _rollouts(self, model):
        from tinker import types as T

        if self._drawn is None or self.steps % DRAW_EVERY == 0:
            self._drawn = self._waited(model.save_weights_and_get_sampling_client())
        prompt = [self._rng.randrange(5, 200) for _ in range(6)]
        params = T.SamplingParams(max_tokens=8, stop=[], seed=self._rng.randrange(1 << 30))
        asked = self._drawn.sample(T.ModelInput.from_ints(prompt), SAMPLES, params)
        sequences = self._waited(asked).sequences
        self.samples += len(sequences)
        return [_rollout(prompt, one, self._rng.choice([-1.0, 1.0])) for one in sequences]

    def _step(self, model, data, loss):
        from tinker import types as T

        passed = model.forward_backward(data, loss)
        stepped = model.optim_step(T.AdamParams(learning_rate=1e-3))
        self._waited(passed)
        self._waited(stepped)
        self.steps += 1

    def _waited(self, future):
        began = time.monotonic()
        result = future.result(PATIENCE_S)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        return result


def _rollout(prompt, sequence, advantage):
    """A prompt and its continuation, as the policy gradient takes them."""
    from tinker import types as T

    tokens = prompt + list(sequence.tokens)
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.array([0.0] * (len(prompt) - 1) + list(sequence.logprobs), np.float32),
        "advantages": np.array(
            [0.0] * (len(prompt) - 1) + [advantage] * len(sequence.tokens), np.float32
        ),
    }
    return T.Datum(model_input=T.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def begin(tenants, over):
    """Run all at once, each on a thread of its own; the pool, and their futures."""
    pool = ThreadPoolExecutor(len(tenants), thread_name_prefix="tenant")
    return pool, [pool.submit(tenant.run, over) for tenant in tenants]
