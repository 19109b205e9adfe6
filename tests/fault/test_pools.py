"""Several samplers of one base model: what one of them does or suffers, no client notices."""

from __future__ import annotations

import random
import signal
from collections import Counter

import numpy as np
import pytest
from tests.fault.cluster import until
from tests.integration.conftest import MODEL
from tests.integration.steps import datum

from tinsmith.messages import sampling, table
from tinsmith.messages.base import decoder

ADAPTERS = 16
VERSIONS = 2
REQUESTS = 500
RESIDENT = 6  # adapters in a sampler's memory: fewer than are drawn from
LENGTH = 4
PROMPTS = ([5, 6, 7, 8], [21, 9, 14], [33, 34, 35, 36, 37, 38])
PATIENCE_S = 600


class Learner:
    """A model that learns to say one token and nothing else, and then another."""

    def __init__(self, service, seed):
        self._service = service
        self._model = service.create_lora_training_client(MODEL, rank=4, seed=seed).result()
        self.token = None

    def look(self):
        """How well it says its token by now, when it is known."""
        return self._model.forward_backward(
            [said(prompt, self.token) for prompt in PROMPTS], "cross_entropy"
        )

    def go_on(self):
        from tinker import types as T

        return self._model.optim_step(T.AdamParams(learning_rate=3e-2))

    def saved(self, name):
        path = self._model.save_weights_for_sampler(name).result(PATIENCE_S).path
        return Version(self.token, self._service.create_sampling_client(model_path=path).result())


class Version:
    """Weights as they were saved."""

    def __init__(self, token, sampler):
        self.token = token
        self.sampler = sampler
        self._answers = {}  # the first one to each prompt

    def check(self, prompt, answer):
        """It says its own token, each time with the same log-probabilities."""
        (sequence,) = answer.sequences
        assert list(sequence.tokens) == [self.token] * LENGTH
        first = self._answers.setdefault(tuple(prompt), sequence.logprobs)
        np.testing.assert_allclose(sequence.logprobs, first, atol=1e-4)


def said(prompt, token):
    """The prompt with the token behind it, all that is to be learned."""
    targets = [token] * (len(prompt) + LENGTH - 1)
    weights = np.zeros(len(targets), np.float32)
    weights[len(prompt) - 1 :] = 1
    return datum(prompt + [token] * (LENGTH - 1), targets, weights)


def has_learned(losses):
    outputs = losses.result(PATIENCE_S).loss_fn_outputs
    return all(min(output["logprobs"].data[-LENGTH:]) > -0.3 for output in outputs)


def learning(learners, tokens):
    """Yields each learner as it has learned its token, while the others go on."""
    for learner, token in zip(learners, tokens, strict=True):
        learner.token = token
    while learners:
        looks = [(learner, learner.look()) for learner in learners]
        learned = [learner for learner, losses in looks if has_learned(losses)]
        learners = [learner for learner in learners if learner not in learned]
        for stepped in [learner.go_on() for learner in learners]:
            stepped.result(PATIENCE_S)
        yield from learned


def draw(sampler, prompt):
    from tinker import types as T

    params = T.SamplingParams(max_tokens=LENGTH, temperature=0.0, stop=[])
    return sampler.sample(T.ModelInput.from_ints(prompt), 1, params)


def answered_by(cluster):
    """How many requests each sampler has answered, as the log of samples has it."""

    async def records(bus):
        read = decoder(sampling.SampleRecord).decode
        return [read(data) async for _, data in bus.samples.since(1)]

    return Counter(record.sampler for record in cluster.ask(records))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_answer_is_of_its_version_while_versions_advance_and_a_sampler_dies(
    new_cluster, clients
):
    cluster = new_cluster()
    gateway, *_ = cluster.start("gateway", "trainer", "checkpointer")
    begun = [cluster.begin("sampler", max_adapters=RESIDENT, threads=1) for _ in range(2)]
    killed, stays = [cluster.started(*one) for one in begun]
    instances = killed.instance, stays.instance
    service = clients(cluster.server(gateway))
    base = service.create_sampling_client(base_model=MODEL).result()
    (untrained,) = draw(base, PROMPTS[0]).result(PATIENCE_S).sequences
    learners = [Learner(service, seed) for seed in range(ADAPTERS)]
    choose = random.Random(0)
    versions, asked = [], []
    for number in range(VERSIONS):
        first = 60 + number * ADAPTERS  # each version of each has a token of its own
        for learner in learning(learners, range(first, first + ADAPTERS)):
            versions.append(learner.saved(f"v{number}"))
            while len(asked) < len(versions) * REQUESTS // (VERSIONS * ADAPTERS):
                version, prompt = choose.choice([versions[-1], *versions]), choose.choice(PROMPTS)
                asked.append((version, prompt, draw(version.sampler, prompt)))
            if len(versions) == ADAPTERS + ADAPTERS // 2:
                killed.kill()
    asked += [(None, PROMPTS[0], draw(base, PROMPTS[0])) for _ in range(ADAPTERS)]
    for version, prompt, future in asked:
        answer = future.result(PATIENCE_S)
        if version is None:
            np.testing.assert_allclose(answer.sequences[0].logprobs, untrained.logprobs, atol=1e-4)
        else:
            version.check(prompt, answer)
    counts = answered_by(cluster)

    assert len(asked) == REQUESTS + ADAPTERS
    assert sum(counts.values()) == len(asked) + 1  # and none of them twice
    assert set(counts) == set(instances)
    assert min(counts.values()) > 20
    until(lambda: not cluster.ask(lambda bus: bus.subjects(table.SAMPLES)), "an empty queue")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_that_is_told_to_stop_leaves_nothing_to_wait_for(new_cluster, clients):
    from tinker import types as T

    cluster = new_cluster()
    gateway, *_ = cluster.start("gateway", "checkpointer")
    begun = [cluster.begin("sampler", threads=1, max_rows=4, drain_s=0) for _ in range(2)]
    leaving, stays = [cluster.started(*one) for one in begun]
    instance = leaving.instance
    service = clients(cluster.server(gateway))
    base = service.create_sampling_client(base_model=MODEL).result()
    params = T.SamplingParams(max_tokens=100, stop=[])
    asked = [base.sample(T.ModelInput.from_ints([5 + n, 6, 7]), 2, params) for n in range(30)]
    until(lambda: instance in answered_by(cluster), "its first answer")
    leaving.process.send_signal(signal.SIGTERM)
    code = leaving.process.wait(PATIENCE_S)
    lengths = [len(s.tokens) for f in asked for s in f.result(PATIENCE_S).sequences]

    assert code == 0
    assert leaving.events("finishing")[0]["requests"] > 0
    assert lengths == [100] * 60
    assert set(answered_by(cluster)) == {instance, stays.instance}
