"""A sampler in a second region, behind a leaf node, for everybody in the first."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from tests.deploy.installation import Installation
from tests.deploy.regions import cluster, leaf_node, links, prepare, running, until
from tests.deploy.test_whole_run import converse, session
from tests.integration.bus.link import Link
from tests.integration.conftest import CLIENT_WARNINGS
from tests.integration.conftest import model_folder as model_folder
from tests.integration.steps import PROBE, new_model, probe, step
from tinker import types as T

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(600),
    *(pytest.mark.filterwarnings(entry) for entry in CLIENT_WARNINGS),
]


class TwoRegions(Installation):
    """As ``Installation``, with samplers behind a leaf node."""

    def __init__(self, folder, model_folder, hub, leaf):
        super().__init__(folder, model_folder, leaf.tls)
        self.broker, self._hub, self._leaf = hub[0], hub, leaf

    @property
    def environ(self):
        place = self._leaf.place if self._user == "sampler" else self.broker.place
        return super().environ | {"TINSMITH_NATS_URL": place, "TINSMITH_BUS__REPLICAS": "3"}

    def prepare(self):
        """As the operator does it, once; the broker runs."""
        assert self.audit("prepare") == (0, "")

    def violations(self):
        """What any server has refused anybody."""
        said = [line for one in (*self._hub, self._leaf) for line in one.said.splitlines()]
        return [line for line in said if "iolation" in line]


class Line:
    """A ``Link`` that passes on while the test waits: in a thread."""

    def __init__(self, port):
        self._port = port
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self):
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with Link.to(f"nats://127.0.0.1:{self._port}") as self._link:
            self._ready.set()
            await self._end.wait()
        passing = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*passing, return_exceptions=True)

    def __enter__(self):
        self._thread.start()
        self._ready.wait()
        self.port = int(self._link.url.rpartition(":")[2])
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def cut(self):
        """Nothing gets through until it heals."""
        self._loop.call_soon_threadsafe(self._link.swallow)
        self._loop.call_soon_threadsafe(self._link.cut)

    def heal(self):
        self._loop.call_soon_threadsafe(self._link.heal)
        # What was begun meanwhile has waited for too long to be of use.
        self._loop.call_soon_threadsafe(self._link.cut)


@contextmanager
def regions(folder, model_folder, tls):
    """Services, and the line between the regions."""
    with cluster(folder, tls) as hub, Line(hub[1].leaf_port) as line:
        asyncio.run(prepare(hub[0], folder))  # as soon as they have a leader
        with running(leaf_node(folder, tls, [line.port])) as leaf:
            installation = TwoRegions(folder, model_folder, hub, leaf)
            try:
                installation.prepare()
                yield installation, line, leaf
            finally:
                installation.close()


def draw(sampler):
    return sampler.sample(PROBE.model_input, 1, T.SamplingParams(max_tokens=4, seed=3))


def tokens(drawing):
    return drawing.result().sequences[0].tokens


def published(model):
    """A sampling client of the model as it is, and whether it is as the trainer has it."""
    sampler = model.save_weights_and_get_sampling_client().result()
    theirs = sampler.compute_logprobs(PROBE.model_input).result()
    assert np.allclose(theirs[1:], probe(model)[:-1], atol=1e-4)
    return sampler


def test_samples_come_through_a_leaf_node_and_again_when_its_link_is_back(
    tmp_path, tls, model_folder
):
    with regions(tmp_path, model_folder, tls) as (installation, line, leaf):
        gateway, *_ = installation.start("gateway", "trainer", "sampler", "checkpointer")
        server = installation.server(gateway)
        with session(server) as client:
            model = new_model(client)
            step(model)
            sampler = published(model)
            before = tokens(draw(sampler))
            converse(server)  # the sampler answers requests of the gateway

            line.cut()
            asyncio.run(until(lambda: not links(leaf)))
            waiting = draw(sampler)
            step(model)  # nobody here needs the other region
            assert not links(leaf)
            line.heal()
            assert tokens(waiting) == before
            assert tokens(draw(published(model)))
        assert installation.violations() == []
