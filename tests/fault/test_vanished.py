"""A client that dies without a word: its session ends, and nobody works for it any more."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.fault.cluster import KEY, until
from tests.integration.conftest import MODEL

from tinsmith import ids
from tinsmith.messages.table import HELD, RUNS, SAMPLES, SESSIONS

SHARE = 24
SAMPLES_ASKED = 40
CLIENT = """\
import sys
import warnings

warnings.simplefilter("ignore")
import tinker
from tinker import types as T

service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
model = service.create_lora_training_client(sys.argv[3], rank=8).result()
print(model.get_info().model_id, flush=True)
sampler = service.create_sampling_client(base_model=sys.argv[3]).result()
params = T.SamplingParams(max_tokens=480, stop=[])
prompt = T.ModelInput.from_ints([5, 6, 7])
asked = [sampler.sample(prompt, 64, params) for _ in range(int(sys.argv[4]))]
[future.result() for future in asked]
"""


@pytest.mark.timeout(900)
def test_a_client_that_dies_leaves_no_model_and_no_samples_behind(new_cluster):
    cluster = new_cluster(gateway=f"session_timeout_s = 120\nsampling_share = {SHARE}")
    gateway, trainer, sampler = cluster.start("gateway", "trainer", "sampler")
    command = [sys.executable, "-c", CLIENT, gateway.url, KEY, MODEL, str(SAMPLES_ASKED)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            model_id = client.stdout.readline().strip()
            until(lambda: len(queued(cluster, HELD)) >= SAMPLES_ASKED - SHARE - 1, "samples")
        finally:
            client.kill()
    session_id = ids.session_of(model_id)
    until(lambda: session(cluster, session_id).status == "expired", "its end", patience_s=400)
    until(lambda: not queued(cluster, HELD) | queued(cluster, SAMPLES), "no samples")
    until(lambda: trainer.events("model released"), "the end of its model")
    until(lambda: stopped(sampler), "the end of what was being drawn")

    assert session(cluster, session_id).detail == "no sign of life for 120 s"
    assert cluster.ask(lambda bus: bus.table(RUNS).get(ids.token(model_id))) is not None
    assert sum(cancelled["count"] for cancelled in gateway.events(CANCELLED)) > 0


CANCELLED = "samples cancelled whose sessions have ended"


def queued(cluster, queue):
    return cluster.ask(lambda bus: bus.subjects(queue))


def session(cluster, session_id):
    return cluster.ask(lambda bus: bus.table(SESSIONS).get(session_id))


def stopped(sampler):
    """Whether the engine has given up a request that it was working on."""
    said = (event["error"] for event in sampler.events("request refused"))
    return any("was cancelled" in error for error in said)
