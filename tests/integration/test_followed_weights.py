"""A sampler follows a model that is trained whole: each save reaches its engine as a version."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest
from tests.integration.auditing import bus_of
from tests.integration.conftest import start, stop
from tests.integration.steps import PROBE, X, Y, probe
from tests.integration.test_restarts import until_another
from tests.integration.test_whole import ADAM, new_model, sampled, session, train
from tinker import types as T

from tinsmith import config
from tinsmith.adapters import version_of
from tinsmith.messages.ops import Record, SaveWeightsForSamplerDone
from tinsmith.messages.sampling import SampleDone
from tinsmith.messages.weights import LineageOpened, WeightsStored
from tinsmith.sealing import Seals

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 20
TRAINER_DIES_AT, SAMPLER_DIES_AT = 6, 13
REQUESTS = 3  # of one sampling client, at most


@pytest.fixture
def server(tmp_path, model_folder, request):
    """In the dtype that a test asks for by a parameter."""
    extra = f'full = true\ndtype = "{getattr(request, "param", "float32")}"\n'
    running = start(tmp_path, model_folder=model_folder, extra=extra)
    yield running
    stop(running)


async def saves_of(server, bus, run):
    """What the run's log says was saved for samplers, in order."""
    environ = {"TINSMITH_DATA_DIR": str(server.folder / "data")}
    seal = await Seals(bus, config.load(None, environ)).of(run)
    records = [one async for one in bus.log.entries(run) if isinstance(one, Record)]
    results = [await bus.log.result(one, seal) for one in records]
    return [one for one in results if isinstance(one, SaveWeightsForSamplerDone)]


async def answers_of(bus, sampler_id):
    found = [await bus.results.get(sampler_id, seq) for seq in range(REQUESTS)]
    return [one for one in found if one is not None]


def scoring(sampler):
    """Begins what ``sampled`` does at once."""
    tokens = PROBE.model_input.to_ints()
    last = int(PROBE.loss_fn_inputs["target_tokens"].data[-1])
    return sampler.compute_logprobs(T.ModelInput.from_ints([*tokens, last]))


def rl_step(server, model, number):
    """One step, a new sampling client, and what it and the trainer make of the same text."""
    train(model, ADAM, 1)
    sampler = model.save_weights_and_get_sampling_client().result()
    if number == TRAINER_DIES_AT:
        old = server.pids["trainer:full"]
        server.kill("trainer:full")
        until_another(server, "trainer:full", old)
    if number == SAMPLER_DIES_AT:
        begun, old = scoring(sampler), server.pids["sampler"]
        server.kill("sampler")
        until_another(server, "sampler", old)
        drawn = np.array(begun.result()[1:], np.float32)
    else:
        drawn = sampled(sampler)
    return np.abs(drawn - probe(model)).max()


def test_twenty_steps_with_deaths_between_them_are_sampled_as_they_are_trained(server):
    with session(server) as client:
        model = new_model(client)
        gaps = [rl_step(server, model, number) for number in range(STEPS)]
        run = model.model_id
        asyncio.run(check_answers(server, run))
    replayed = replay(server, run)

    assert max(gaps) < 1e-4, gaps
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


async def check_answers(server, run):
    """Every answer names weights that the log has, and the lineage has gone on."""
    saves, stored, answers = await told(server, run)
    assert [one.published.version for one in saves] == list(range(1, STEPS + 1))
    for save, of_client in zip(saves, answers, strict=True):
        assert of_client
        for answer in of_client:
            assert isinstance(answer, SampleDone), answer
            assert answer.weight_version == version_of(save.parts)
            assert answer.root in ("", save.published.root)
    followed = sum(of_client[0].root != "" for of_client in answers)
    assert followed > STEPS * 3 // 4  # the others were loaded from files, which is as right

    committed = {one.version: one.root for one in stored}
    assert {one.published.version: one.published.root for one in saves} == committed
    async with bus_of(server) as bus:
        opened = [one.message async for one in bus.lineages.entries(run)]
        head = await bus.lineages.head(run)
    assert [one.epoch for one in opened if isinstance(one, LineageOpened)] == [1, 2]
    assert (head.version, head.epoch) == (STEPS, 2)


@pytest.mark.parametrize("server", ["bfloat16"], indirect=True)
def test_in_bfloat16_changes_travel_and_an_older_client_keeps_its_weights(server):
    slow = T.AdamParams(learning_rate=1e-5)
    with session(server) as client:
        model = new_model(client)
        samplers, drawn = [], []
        for _ in range(3):
            model.forward_backward([X, Y], "cross_entropy").result()
            model.optim_step(slow).result()
            samplers.append(model.save_weights_and_get_sampling_client().result())
            drawn.append(sampled(samplers[-1]))
        again = sampled(samplers[0])  # its version has been replaced: it comes from files
        run = model.model_id
        saves, entries, answers = asyncio.run(told(server, run))
    replayed = replay(server, run)

    np.testing.assert_array_equal(again, drawn[0])
    assert [one.form for one in entries if one.commit_seq == 0] == ["full", "delta", "delta"]
    assert all(one.changed < one.elements // 2 for one in entries if one.form == "delta")
    wanted = [one.published.root for one in saves]
    assert [one[0].root for one in answers] == wanted
    assert answers[0][1].root == ""
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


async def told(server, run):
    """The run's saves, what is stored of its lineage, and the answers of each save's client."""
    async with bus_of(server) as bus:
        saves = await saves_of(server, bus, run)
        entries = [one.message async for one in bus.lineages.entries(run)]
        answers = [await answers_of(bus, one.sampling_session_id) for one in saves]
    return saves, [one for one in entries if isinstance(one, WeightsStored)], answers


def replay(server, run):
    command = [sys.executable, "-m", "tinsmith", "replay", run]
    command += ["--config", str(server.folder / "tinsmith.toml")]
    command += ["--data-dir", str(server.folder / "data")]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ, check=False
    )
