"""A user's whole run on services that have the least permissions, with the broker's TLS."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
from tests.deploy.installation import KEY, MASTER_KEY, Installation, standard_output
from tests.deploy.shipped import USERS, password
from tests.integration.conftest import CLIENT_WARNINGS, MODEL, connect
from tests.integration.conftest import model_folder as model_folder
from tests.integration.steps import PROBE, X, Y, new_model, probe, step
from tinker import types as T

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    *(pytest.mark.filterwarnings(entry) for entry in CLIENT_WARNINGS),
]


@pytest.fixture(scope="module")
def installation(tmp_path_factory, model_folder, tls):
    folder = tmp_path_factory.mktemp("installation")
    built = Installation(folder, model_folder, tls, model="full = true")
    try:
        built.prepare()
        yield built
    finally:
        built.close()


@contextmanager
def session(server):
    clients = connect(server)
    yield next(clients)
    next(clients, None)  # says that it is over: what it has is released, and cancelled


def asked(server, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"X-API-Key": KEY, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.base_url}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def train_and_sample(client, installation, trainer):
    """Everything that needs a trainer and a sampler; the run's id and a checkpoint's path."""
    model = new_model(client)
    step(model)
    saved = model.save_state("kept").result().path
    sampler = model.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(PROBE.model_input, 2, T.SamplingParams(max_tokens=4, seed=3))
    assert len(drawn.result().sequences) == 2
    before = probe(model)

    trainer.kill()  # another takes the model over, and removes what the first has left
    installation.start("trainer")
    assert np.array_equal(probe(model), before)
    step(model)
    model.load_state(saved).result()
    assert np.array_equal(probe(model), before)
    return model.get_info().model_id, saved


def train_whole(client):
    """All weights, and a sampler that follows them."""
    model = client.create_lora_training_client(f"{MODEL}:full").result()
    model.forward_backward([X, Y], "cross_entropy").result()
    model.optim_step(T.AdamParams(learning_rate=1e-3)).result()
    sampler = model.save_weights_and_get_sampling_client().result()
    assert len(sampler.compute_logprobs(PROBE.model_input).result()) == PROBE.model_input.length


class Stay(urllib.request.HTTPRedirectHandler):
    """Where an answer points to is what is wanted."""

    def redirect_request(self, *_):
        return None


def signed_link(server, saved):
    run, _, name = saved.removeprefix("tinker://").partition("/")
    url = f"{server.base_url}/api/v1/training_runs/{run}/checkpoints/{name}/archive"
    request = urllib.request.Request(url, headers={"X-API-Key": KEY})
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.build_opener(Stay).open(request, timeout=120)
    with answer.value as told:
        assert told.code == 302
        return told.headers["Location"]


def https(installation, tls):
    """Another gateway answers with a certificate of its own."""
    files = {"tls_cert": tls.cert, "tls_key": tls.key}
    (gateway,) = installation.start("gateway", **files)
    assert gateway.url.startswith("https://")
    context = ssl.create_default_context(cafile=tls.ca)
    request = urllib.request.Request(
        f"{gateway.url}/api/v1/get_server_capabilities", headers={"X-API-Key": KEY}
    )
    with urllib.request.urlopen(request, timeout=120, context=context) as answer:
        assert MODEL in answer.read().decode()


def manage(client, server, saved):
    """Every kind of change of a checkpoint; a signed link to its bytes."""
    rest = client.create_rest_client()
    link = signed_link(server, saved)
    with urllib.request.urlopen(link, timeout=60) as archive:
        assert archive.read(16)
    rest.publish_checkpoint_from_tinker_path(saved).result()
    copied = rest.copy_weights(saved, "copied").result()
    assert copied
    rest.delete_checkpoint_from_tinker_path(saved).result()
    return link


def converse(server):
    """What needs a tokenizer's answer, and the news of tokens."""
    said = [{"role": "user", "content": "Hi"}]
    chat = {"model": MODEL, "max_tokens": 3, "messages": said}
    told = json.loads(asked(server, "/v1/chat/completions", chat))
    assert told["usage"]["completion_tokens"] > 0
    streamed = asked(server, "/v1/chat/completions", {**chat, "stream": True})
    assert b"[DONE]" in streamed


def test_a_whole_run_needs_no_more_than_the_roles_and_no_secret_reaches_a_log(installation, tls):
    services = ("gateway", "trainer", "sampler", "checkpointer")
    begun = [installation.begin(service) for service in services]
    begun.append(installation.begin("trainer", model=f"{MODEL}:full"))
    gateway, trainer, *_ = [installation.started(*one) for one in begun]
    server = installation.server(gateway)
    with session(server) as client:
        run, saved = train_and_sample(client, installation, trainer)
        train_whole(client)
        link = manage(client, server, saved)
    converse(server)
    https(installation, tls)
    made = standard_output(["keys", "create", "alice"], installation.environ).strip()
    assert made.startswith("tml-")
    for command in (["log", "verify", run], ["replay", run]):
        code, said = installation.audit(*command)
        assert code == 0, said
    shown = standard_output(["config", "show"], installation.environ)

    assert installation.violations() == []
    signature = link.rpartition("/")[0].rpartition(".")[2]
    assert len(signature) >= 32
    secrets = [KEY, made, MASTER_KEY, signature, *map(password, USERS)]
    printed = {**installation.printed(), "config show": shown}
    assert len(printed) >= 8
    assert sum(map(len, printed.values())) > 2000
    leaked = [(file, s) for file, text in printed.items() for s in secrets if s in text]
    assert leaked == []
    assert not any(re.search(r"tml-[0-9a-f]{16}", text) for text in printed.values())
