"""The whole server on the SGLang engine as a user runs it: `tinsmith up` and the real client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.integration import conftest as integration
from tests.integration.steps import datum, new_model, step
from tests.sglang.engines import EXACT
from tinker import types as T
from transformers import AutoTokenizer

SETTINGS = """
[sampler]
engine = "sglang"
device = "cpu"
threads = 1
max_rows = 8
cache_tokens = 8192
max_lora_rank = 16
log = "full"
"""
PATIENCE_S = 600.0
PROMPT = T.ModelInput.from_ints([5, 6, 7, 8])

pytestmark = [pytest.mark.filterwarnings(entry) for entry in integration.CLIENT_WARNINGS]


@pytest.fixture(scope="module")
def up(model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "START_PATIENCE_S", PATIENCE_S)
        folder = tmp_path_factory.mktemp("up")
        running = integration.start(folder, model_folder=model, extra=SETTINGS)
    yield running
    integration.stop(running)


@pytest.fixture(scope="module")
def user(up):
    yield from integration.connect(up)


@pytest.fixture(scope="module")
def trained(user):
    model = new_model(user)
    for _ in range(4):
        step(model)
    return model


@pytest.fixture(scope="module")
def tuned(trained):
    return trained.save_weights_and_get_sampling_client().result()


@pytest.fixture(scope="module")
def base(user):
    return user.create_sampling_client(base_model="tiny/llama").result()


def sample(sampler, n=1, **params):
    params = {"max_tokens": 12, "seed": 1, "stop": [], **params}
    return sampler.sample(PROMPT, n, T.SamplingParams(**params)).result().sequences


def test_sampled_and_scored_logprobs_are_the_trainers(trained, tuned):
    (drawn,) = sample(tuned, temperature=0.7)
    tokens = [5, 6, 7, 8, *drawn.tokens]
    scored = tuned.compute_logprobs(T.ModelInput.from_ints(tokens)).result()
    output = trained.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]

    assert scored[0] is None
    np.testing.assert_allclose(drawn.logprobs, scored[4:], atol=EXACT)
    np.testing.assert_allclose(drawn.logprobs, np.array(output["logprobs"].data)[3:-1], atol=EXACT)


def test_base_and_adapter_are_served_side_by_side_by_their_seeds(base, tuned):
    asked = [sampler.sample(PROMPT, 4, T.SamplingParams(max_tokens=12, seed=1, stop=[]))
             for sampler in (base, tuned, base, tuned)]  # fmt: skip
    answers = [[one.tokens for one in future.result().sequences] for future in asked]

    assert answers[0] == answers[2]
    assert answers[1] == answers[3]
    assert answers[0] != answers[1]
    assert len(set(map(tuple, answers[0]))) == 4


def test_the_likeliest_tokens_come_with_prompt_and_samples(base):
    params = T.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    answer = base.sample(
        PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
    ).result()  # fmt: skip

    (drawn,) = answer.sequences
    assert len(answer.topk_prompt_logprobs[1]) == 2
    assert [cell[0][0] for cell in drawn.topk_logprobs] == list(drawn.tokens)


def test_stops_by_token_and_by_string(base, model):
    (free,) = sample(base, max_tokens=40)
    stop = free.tokens[3]
    (by_token,) = sample(base, max_tokens=40, stop=[stop])
    text = AutoTokenizer.from_pretrained(model).decode(free.tokens)
    pairs = (text[at : at + 2] for at in range(3, len(text) - 1))
    (by_string,) = sample(base, max_tokens=40, stop=[next(filter(str.isascii, pairs))])

    assert by_token.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert by_string.tokens == free.tokens[: len(by_string.tokens)]
    assert by_token.stop_reason == by_string.stop_reason == "stop"


def test_a_cancelled_sample_fails_and_the_next_is_answered(up, user):
    sampler = user.create_sampling_client(base_model="tiny/llama").result()
    begun = _prefills(up)
    running = sampler.sample(PROMPT, 4, T.SamplingParams(max_tokens=1800, stop=[]))
    until(lambda: _prefills(up) > begun or None)
    cancelled = {"request_id": f"{sampler._sampling_session_id}:0"}
    assert up.post("cancel_future", cancelled)[0] == 200

    with pytest.raises(Exception, match="cancelled"):
        running.result()
    assert len(sample(sampler)[0].tokens) == 12


def test_what_the_engine_lacks_is_refused_with_a_way_out(base):
    with pytest.raises(Exception, match="prompt_alt_tokens_k"):
        base.sample(PROMPT, 1, T.SamplingParams(max_tokens=1), prompt_alt_tokens_k=2).result()


def test_a_replay_of_its_samples_does_not_claim_to_be_one(up, trained, tuned):
    sample(tuned)
    line = [sys.executable, "-m", "tinsmith", "replay", "--sampling", trained.model_id]
    line += ["--config", up.folder / "tinsmith.toml", "--data-dir", up.folder / "data"]

    def told():
        ran = subprocess.run(
            list(map(str, line)), capture_output=True, text=True, timeout=300, check=False
        )
        return None if "none of" in ran.stderr else ran  # records come after answers

    ran = until(told)
    assert ran.returncode != 0
    assert "drawn by the engine 'sglang'" in ran.stderr


def test_every_request_is_answered_when_the_server_dies_under_it(up, base, tuned):
    """Each with the tokens that it would have had."""
    params = T.SamplingParams(max_tokens=200, seed=9, stop=[])
    before = {sampler: _tokens(sampler.sample(PROMPT, 4, params)) for sampler in (base, tuned)}
    begun = _prefills(up)
    asked = [
        (sampler, sampler.sample(PROMPT, 4, params)) for sampler in (base, tuned) for _ in range(6)
    ]
    until(lambda: _prefills(up) > begun or None)
    scheduler = _scheduler(up)
    os.kill(scheduler, signal.SIGKILL)

    for sampler, future in asked:
        assert _tokens(future) == before[sampler]
    assert _scheduler(up) != scheduler
    assert "begun_anew" in (up.folder / "server.log").read_text()


def _tokens(future):
    return [one.tokens for one in future.result().sequences]


def _prefills(up):
    """Passes over prompts that the server has told of."""
    (log,) = (up.folder / "data" / "run").glob("sglang-*.log")
    return log.read_text(errors="replace").count("Prefill batch")


def _scheduler(up):
    """The process that computes, below the sampler."""
    found = [up.pids["sampler"]]
    for parent in found:  # grows while it is read
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return next(pid for pid in found if "sglang::sched" in Path(f"/proc/{pid}/comm").read_text())


def until(found):
    deadline = time.monotonic() + PATIENCE_S
    while (result := found()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return result
