"""What an operator sees of a running server: metrics, readiness, traces, and ids in logs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from contextlib import contextmanager

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.conftest import connect, start, stop
from tests.integration.steps import X, Y, new_model, step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PATIENCE_S = 90.0


class Collector:
    """An OTLP collector on a thread of its own."""

    def __init__(self):
        self.spans = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()])
        self._thread.start()
        self._ready.wait()

    async def _run(self):
        self._over = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()

    async def _take(self, request):
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            (name,) = (
                a.value.string_value
                for a in resource.resource.attributes
                if a.key == "service.name"
            )
            for scope in resource.scope_spans:
                self.spans += [(name, span) for span in scope.spans]
        return web.Response()

    def close(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def collector():
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory, model_folder, collector):
    """A server that tells all it can."""
    extra = f"""
[logs]
level = "debug"
format = "json"
[tracing]
endpoint = "{collector.url}"
[gateway]
service_stale_s = 3
"""
    running = start(tmp_path_factory.mktemp("watched"), model_folder=model_folder, extra=extra)
    yield running
    stop(running)


@pytest.fixture(scope="module")
def worked(watched):
    """The same, after a training step, a save and a sample; the ids of what was asked for."""
    from tinker import types as T

    with contextmanager(connect)(watched) as client:
        model = new_model(client)
        step(model, (X, Y))
        sampler = model.save_weights_and_get_sampling_client().result()
        prompt = T.ModelInput.from_ints([5, 6, 7])
        sampler.sample(prompt, 1, T.SamplingParams(max_tokens=4)).result()
        yield watched, model.model_id


def metrics_urls(server):
    return json.loads((server.folder / "ready.json").read_text())["metrics"]


def got(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def figures(server, label):
    """Name -> sum over all its lines."""
    found = defaultdict(float)
    _, text = got(f"{metrics_urls(server)[label]}/metrics")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
            if kind := sample.labels.get("op") or sample.labels.get("route"):
                found[sample.name, kind] += sample.value
    return found


def until(condition, what=""):
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return result


def test_every_process_tells_where_its_metrics_are(worked):
    server, _ = worked

    urls = metrics_urls(server)

    assert set(urls) == {"gateway", "trainer", "sampler", "checkpointer"}
    targets = json.loads((server.folder / "data/run/prometheus.json").read_text())
    assert {f"http://{one['targets'][0]}" for one in targets} == set(urls.values())
    for url in urls.values():
        assert got(f"{url}/healthz") == (200, '{"status":"ok"}')
        assert got(f"{url}/readyz")[0] == 200


def test_figures_of_a_step_a_save_and_a_sample_are_told(worked):
    server, _ = worked

    trainer = figures(server, "trainer")
    sampler = figures(server, "sampler")
    gateway = figures(server, "gateway")

    assert trainer["tinsmith_trainer_ops_total", "ForwardBackward"] == 1
    assert trainer["tinsmith_trainer_ops_total", "SaveWeightsForSampler"] == 1
    assert trainer["tinsmith_trainer_tokens_total"] >= 50
    assert trainer["tinsmith_trainer_commit_seconds_count"] >= 3
    assert trainer["tinsmith_trainer_models"] == 1
    assert sampler["tinsmith_sampler_drawn_tokens_total"] == 4
    assert sampler["tinsmith_sampler_prompt_tokens_total"] == 3
    assert sampler["tinsmith_sampler_first_token_seconds_count"] == 1
    assert sampler["tinsmith_sampler_adapters"] == 1
    assert gateway["tinsmith_http_requests_total", "/api/v1/forward_backward"] >= 1
    assert gateway["tinsmith_futures_answered_total"] >= 4
    assert gateway["tinsmith_bus_publish_seconds_count"] >= 4
    assert figures(server, "checkpointer")["tinsmith_checkpointer_committed_bytes_total"] > 0
    until(lambda: figures(server, "trainer")["tinsmith_trainer_busy_seconds_total"] > 0)
    until(lambda: figures(server, "gateway")["tinsmith_workers"] == 2)
    until(lambda: figures(server, "gateway")["tinsmith_sessions_active"] == 1)


def test_one_trace_leads_through_gateway_trainer_and_checkpointer(worked, collector):
    def through(name):
        """Services of the trace that a request to this route began."""
        roots = {s.trace_id for _, s in collector.spans if s.name == f"POST /api/v1/{name}"}
        return {service for service, span in collector.spans if span.trace_id in roots}

    training = {"tinsmith-gateway", "tinsmith-trainer"}
    until(lambda: through("forward_backward") == training)
    until(lambda: through("asample") == {"tinsmith-gateway", "tinsmith-sampler"})
    until(lambda: through("save_weights_for_sampler") == training | {"tinsmith-checkpointer"})

    (root,) = (s for _, s in collector.spans if s.name == "POST /api/v1/forward_backward")
    inner = {s.name: s for _, s in collector.spans if s.trace_id == root.trace_id}
    assert set(inner) == {root.name, "trainer.execute", "trainer.commit"}
    assert inner["trainer.execute"].parent_span_id == root.span_id


def test_a_clients_own_trace_is_gone_on_with(worked, collector):
    server, _ = worked
    trace_id = os.urandom(16)
    headers = {"traceparent": f"00-{trace_id.hex()}-{'1' * 16}-01"}
    request = urllib.request.Request(f"{server.base_url}/api/v1/healthz", headers=headers)

    with urllib.request.urlopen(request, timeout=30):
        pass

    until(lambda: trace_id in {span.trace_id for _, span in collector.spans})


def test_the_id_of_a_request_is_in_the_lines_of_every_service_that_had_it(worked):
    server, model_id = worked

    def lines():
        said = (server.folder / "server.log").read_text().splitlines()
        return [json.loads(line) for line in said if line.startswith("{")]

    def services_of(request_id):
        return {line["service"] for line in lines() if line.get("request_id") == request_id}

    until(lambda: services_of(f"{model_id}:1") == {"gateway", "trainer"})
    (sampled,) = (line["request_id"] for line in lines() if line["event"] == "sample done")
    assert services_of(sampled) == {"gateway", "sampler"}


def test_without_a_trainer_the_gateway_says_so_and_recovers(worked):
    server, _ = worked
    pid = server.pids["trainer"]
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: got(f"{server.base_url}/readyz")[0] == 503)
        status, body = got(f"{metrics_urls(server)['gateway']}/readyz")
    finally:
        os.kill(pid, signal.SIGCONT)

    assert status == 503
    assert "no trainer is running" in json.loads(body)["detail"]
    assert json.loads(body)["models"]["tiny/llama"] == {
        "trainer": "none running",
        "sampler": "1 running",
    }
    until(lambda: got(f"{server.base_url}/readyz")[0] == 200)


def test_a_broker_that_dies_is_counted_and_everybody_recovers(worked):
    server, _ = worked
    urls = metrics_urls(server)
    os.kill(server.pids["broker"], signal.SIGKILL)  # and is started again at once

    until(lambda: all(figures(server, label)["tinsmith_bus_reconnects_total"] for label in urls))
    until(lambda: all(got(f"{url}/readyz")[0] == 200 for url in urls.values()))
