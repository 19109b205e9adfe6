"""Fifty saves while trainer, checkpointer and broker are killed: whole checkpoints, or none."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fault.cluster import replace_killed
from tests.integration.auditing import bus_of
from tests.integration.conftest import connect, start, stop
from tests.integration.steps import new_model, step

from tinsmith.bus.views import View
from tinsmith.messages.table import CHECKPOINTS

SAVES = 50
KILLS = 8
SERVICES = ("trainer", "checkpointer", "broker")
RESULT_PATIENCE_S = 180.0


class Pace:
    """Lets as many saves begin as the kills have got to, and waits with a kill for saves."""

    def __init__(self):
        self._begun = self._kills = 0
        self._changed = threading.Condition()

    def save_begins(self):
        with self._changed:
            self._changed.wait_for(lambda: self._begun < self._kills * SAVES // KILLS)
            self._begun += 1
            self._changed.notify_all()

    def kill_begins(self, after):
        """Wait until that many saves of its share have begun."""
        with self._changed:
            self._kills += 1
            self._changed.notify_all()
            wanted = (self._kills - 1) * SAVES // KILLS + after
            self._changed.wait_for(lambda: self._begun >= wanted)


def save_all(model, pace):
    """Names and futures of all saves, some of them on their way at the same time."""
    saves = []
    for number in range(SAVES):
        pace.save_begins()
        if number % 5 == 0:
            step(model)
        name = f"save-{number}"
        if number % 3 == 2:
            saves.append((name, model.save_weights_for_sampler(name)))
        else:
            saves.append((name, model.save_state(name)))
    return saves


def ended(future):
    """The path that was saved, or why it was not."""
    try:
        return future.result(timeout=RESULT_PATIENCE_S).path, None
    except TimeoutError:
        pytest.fail("a save has not ended")
    except Exception as exc:  # noqa: BLE001 - whatever the client makes of a refusal
        return None, exc


async def verified(server):
    """The paths of all checkpoints, each part of which is there with its digest."""
    async with bus_of(server) as bus:
        checkpoints = View(bus.table(CHECKPOINTS), lambda _: "")
        watch = await checkpoints.watch()
        await watch.close()
        for checkpoint in checkpoints:
            for ref in checkpoint.parts.values():
                await bus.blobs.get(ref)
        return {checkpoint.path for checkpoint in checkpoints}


@pytest.mark.timeout(600)
def test_killed_at_random_each_save_is_whole_or_failed(tmp_path, model_folder):
    rng = random.Random(51)
    server = start(tmp_path, model_folder=model_folder, extra="[trainer]\nsnapshot_steps = 4\n")
    clients = connect(server)
    client = next(clients)
    try:
        model, reader = new_model(client, seed=1), new_model(client, seed=2)
        with ThreadPoolExecutor(1) as pool:
            pace = Pace()
            running = pool.submit(save_all, model, pace)
            killed = []
            for _ in range(KILLS):
                pace.kill_begins(after=rng.randrange(1, SAVES // KILLS))
                killed.append(rng.choice(SERVICES))
                replace_killed(server, killed[-1])
            outcomes = {name: ended(future) for name, future in running.result(300)}
        saved = {path for path, _ in outcomes.values() if path}
        listed = asyncio.run(verified(server))
        for path in sorted(path for path in listed if "/weights/" in path):
            reader.load_state(path).result(timeout=RESULT_PATIENCE_S)
        samplers = [path for path in sorted(listed) if "/sampler_weights/" in path]
        for path in samplers[:: max(len(samplers) // 4, 1)]:
            sampled(client, path)
    finally:
        clients.close()
        stop(server)

    assert saved == listed, (killed, outcomes)
    assert len(saved) == SAVES, (killed, [why for _, why in outcomes.values() if why])


def sampled(client, path):
    from tinker import types as T

    sampler = client.create_sampling_client(model_path=path).result()
    prompt = T.ModelInput.from_ints([5, 6, 7])
    answer = sampler.sample(prompt, 1, T.SamplingParams(max_tokens=2, temperature=0.0))
    assert answer.result(timeout=RESULT_PATIENCE_S).sequences
