"""Sampling with the unmodified client is logged by policy, and drawn again from the log."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
from tests.integration.auditing import bus_of
from tests.integration.conftest import connect, start, stop
from tests.integration.steps import new_model, step
from tinker import types as T

from tinsmith import config, ids
from tinsmith.bus.samples import SampleAddress
from tinsmith.errors import BrokerUnavailable
from tinsmith.logbook.samples import open_samples
from tinsmith.messages.base import decoder, encode
from tinsmith.messages.sampling import SampleContent, SampleRecord
from tinsmith.messages.table import SAMPLE_LOG_STREAM

PROMPT = T.ModelInput.from_ints([5, 6, 7, 8])
FULL = '[sampler]\nlog = "full"\n'
PATIENCE_S = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def logging_server(tmp_path_factory, model_folder):
    """A server that logs samples in full."""
    folder = tmp_path_factory.mktemp("logging")
    running = start(folder, model_folder=model_folder, extra=FULL)
    yield running
    stop(running)


@pytest.fixture(scope="module")
def logging_client(logging_server):
    yield from connect(logging_server)


@pytest.fixture(scope="module")
def run(logging_client, logging_server):
    """A model that was trained and sampled from in two versions, two requests each."""
    return sampled(logging_client, logging_server, versions=2)


def tinsmith(server, *arguments, command="replay"):
    """Run a command against the server's installation."""
    line = [sys.executable, "-m", "tinsmith", *command.split(), *map(str, arguments)]
    line += ["--config", str(server.folder / "tinsmith.toml")]
    line += ["--data-dir", str(server.folder / "data")]
    return subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)


def samples_of(server, run):
    environ = {"TINSMITH_DATA_DIR": str(server.folder / "data")}
    return open_samples(run, config.load(None, environ))


async def records(server, run):
    async with bus_of(server) as bus:
        try:
            return [decoder(SampleRecord).decode(data) async for _, data in bus.samples.stored(run)]
        except BrokerUnavailable:  # there is no such stream while a test has taken it away
            return []


def logged(server, run, count):
    """The records of ``run`` once there are ``count``: they come after the answers."""
    deadline = time.monotonic() + PATIENCE_S
    while len(found := asyncio.run(records(server, run))) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} logged"
    return found


def sampled(client, server, versions):
    """The id of a model from ``versions`` of which was sampled."""
    model = new_model(client)
    for version in range(versions):
        step(model)
        sampler = model.save_weights_and_get_sampling_client().result()
        params = T.SamplingParams(max_tokens=8, temperature=0.8, stop=[])
        sampler.sample(PROMPT, 3, params).result()
        sampler.compute_logprobs(PROMPT).result()
        assert len(logged(server, model.model_id, 2 * (version + 1))) == 2 * (version + 1)
    return model.model_id


def test_a_run_and_what_was_sampled_from_it_replay_bit_for_bit(logging_server, run):
    ran = tinsmith(logging_server, run, "--sampling", "--json")
    assert ran.returncode == 0, ran.stderr
    training, samples = map(json.loads, ran.stdout.splitlines())

    assert (training["run"], training["verdict"]) == (run, "equal")
    assert (samples["samples_of"], samples["verdict"]) == (run, "equal")
    assert (samples["samples_compared"], samples["samples_digest_only"]) == (4, 0)
    assert samples["warnings"] == []


def test_records_say_whose_weights_they_were_and_what_computed_them(logging_server, run):
    found = asyncio.run(records(logging_server, run))

    assert [one.request.adapter.op_seq for one in found] == [3, 3, 6, 6]
    assert len({one.request.adapter.version for one in found}) == 2
    assert {one.environment["threads"] for one in found} == {"1"}
    assert {one.sampler.partition("-")[0] for one in found} == {"sampler"}


def test_samples_of_the_base_model_are_their_sessions(logging_client, logging_server):
    base = logging_client.create_sampling_client(base_model="tiny/llama").result()
    base.sample(PROMPT, 2, T.SamplingParams(max_tokens=5, seed=3)).result()
    session = logging_client.holder.get_session_id()
    logged(logging_server, session, 1)
    ran = tinsmith(logging_server, session, "--sampling")
    shown = tinsmith(logging_server, session, "--samples", command="log show")

    assert ran.returncode == 0, ran.stderr
    assert f"EQUAL bit for bit: samples of {session}" in ran.stdout
    assert "compared 1 of 1 samples: 2 sequences" in ran.stdout
    header, line = shown.stdout.splitlines()
    assert header.split()[:3] == ["request", "kept", "weights"]
    request, *about = line.split()[:3]
    assert request.startswith(f"{session}:sample:")
    assert about == ["full", "base"]


def test_show_tells_of_samples_but_not_what_they_say(logging_server, run):
    shown = tinsmith(logging_server, run, "--samples", "--json", command="log show")
    told = [json.loads(line) for line in shown.stdout.splitlines()]

    assert len(told) == 4
    assert told[0]["params"]["temperature"] == 0.8
    assert [one["length"] for one in told[0]["digests"]["sequences"]] == [8, 8, 8]
    assert "content" not in told[0]


async def forge(server, run):
    """Log a sample of ``run`` again under another number, its second sequence's token changed."""
    first = (await records(server, run))[0]
    async with samples_of(server, run) as (samples, _):
        seal = await samples.seal(run)
    content = decoder(SampleContent).decode(seal.open(first.content))
    sequences = list(content.sequences)
    tokens = bytearray(sequences[1].tokens)
    tokens[4 * 5] ^= 1
    sequences[1] = msgspec.structs.replace(sequences[1], tokens=bytes(tokens))
    content = seal.seal(encode(msgspec.structs.replace(content, sequences=tuple(sequences))))
    request = msgspec.structs.replace(
        first.request, seq=999, request_id=ids.future_id(first.request.sampler_id, 999)
    )
    forged = msgspec.structs.replace(first, request=request, content=content)
    async with bus_of(server) as bus:
        await bus.samples.append(SampleAddress(run, request.sampler_id, 999), encode(forged))
    return request.request_id


def test_a_changed_token_is_named(logging_client, logging_server):
    forged = sampled(logging_client, logging_server, versions=1)
    request_id = asyncio.run(forge(logging_server, forged))
    ran = tinsmith(logging_server, forged, "--sampling-only")

    assert ran.returncode == 1, ran.stderr
    assert f"DIVERGED at sample {request_id}, sequences[1].tokens[5]" in ran.stdout


def test_a_file_takes_samples_along(logging_server, run, tmp_path):
    file = tmp_path / "run.tslog"
    exported = tinsmith(logging_server, run, file, "--samples", command="log export")
    verified = tinsmith(logging_server, file, command="log verify")
    ran = tinsmith(logging_server, file, "--sampling-only", "--json")

    assert (exported.returncode, verified.returncode) == (0, 0), exported.stderr + verified.stdout
    assert "4 samples" in verified.stdout
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["samples_compared"] == 4


def test_by_default_samples_are_logged_by_digests_and_said_to_be(server, client):
    model = new_model(client)
    sampler = model.save_weights_and_get_sampling_client().result()
    sampler.sample(PROMPT, 1, T.SamplingParams(max_tokens=4)).result()
    (found,) = logged(server, model.model_id, 1)
    ran = tinsmith(server, model.model_id, "--sampling-only")

    assert found.content is None
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "logged by their digests only" in ran.stderr


async def digest_here(server, run, data):
    """As docs/replay.md tells how to prove an answer that was kept."""
    async with samples_of(server, run) as (samples, whole):
        return (await samples.seal(whole)).digest(data)


def test_a_kept_answer_is_proved_by_its_digests(server, client):
    model = new_model(client)
    sampler = model.save_weights_and_get_sampling_client().result()
    (kept,) = sampler.sample(PROMPT, 1, T.SamplingParams(max_tokens=4)).result().sequences
    (found,) = logged(server, model.model_id, 1)
    (sequence,) = found.digests.sequences
    bytes_of = {
        sequence.tokens: np.array(kept.tokens, "<i4").tobytes(),
        sequence.logprobs: np.array(kept.logprobs, "<f4").tobytes(),
        found.digests.prompt: np.array([5, 6, 7, 8], "<i4").tobytes(),
    }

    for digest, data in bytes_of.items():
        assert asyncio.run(digest_here(server, model.model_id, data)) == digest


def test_options_that_count_ops_are_refused_for_samples(server):
    assert tinsmith(server, "x", "--sampling", "--follow").returncode == 2
    ran = tinsmith(server, "x", "--sampling-only", "--from", "3")

    assert "--from, --to: they count ops" in ran.stderr


async def without_a_log_of_samples(server):
    async with bus_of(server) as bus:
        await bus._connection[1].delete_stream(SAMPLE_LOG_STREAM)


def test_a_sampler_killed_before_it_has_logged_leaves_exactly_one_record(tmp_path, model_folder):
    """The answer is there; while the log is not, the sampler is killed, and another logs it."""
    server = start(tmp_path, model_folder=model_folder, extra=FULL)
    clients = connect(server)
    model = new_model(next(clients))
    sampler = model.save_weights_and_get_sampling_client().result()
    asyncio.run(without_a_log_of_samples(server))
    answered = sampler.sample(PROMPT, 2, T.SamplingParams(max_tokens=6, seed=1)).result()
    server.kill("sampler")  # the one that is started in its place makes the log anew
    (found,) = logged(server, model.model_id, 1)
    ran = tinsmith(server, model.model_id, "--sampling-only", "--json")
    clients.close()
    stop(server)

    assert [one.length for one in found.digests.sequences] == [
        len(one.tokens) for one in answered.sequences
    ]
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["samples"] == 1
