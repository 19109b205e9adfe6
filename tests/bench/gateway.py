"""What the front door takes: the real gateway, with one worker and with two, on a real broker.

    python -m tests.bench.gateway [--against FOLDER] [--polls N] [--rounds N] [--workers N ...]

One JSON object on standard output. Trainer and sampler are played by this process, which also
makes the load, on the same cores. The named baselines, measured in the same run, are one worker,
a bare aiohttp server that answers the same bytes without a broker, and, with ``--against``, the
gateway of another checkout. Each round measures all of them in turn; what is told are medians.
Times in milliseconds; ``cpu`` is what the gateway's own processes computed for one request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.bench import front

from tinsmith import ids, lifeline
from tinsmith.blobs import BlobStore
from tinsmith.broker import Broker
from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.messages.registry import ServedModel
from tinsmith.messages.sampling import SampleDone
from tinsmith.messages.services import SampleReady, ServiceAlive
from tinsmith.messages.table import OPS, SAMPLE_READY, SAMPLES, SERVED, SERVICE_ALIVE
from tinsmith.paths import DataDir

MODEL = "bench/model"
KEY = "tml-bench"
CONFIG = f"""\
[gateway]
port = 0
api_keys = ["{KEY}"]
max_unfinished = 1000000
{{share}}
[logs]
level = "warning"
"""
POSTS, CONNECTIONS = 2000, 32
RESULTS_PER_S = 100
SESSIONS = 50  # each sends a heartbeat every second, ten times as often as the client
LARGE_BYTES, LARGE_POSTS = 5_000_000, 12
PROBE_S = 0.01
READY_S = 60.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, help="another checkout, as the baseline")
    parser.add_argument("--polls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = DataDir(Path(folder))
        data.prepare()
        broker = Broker(data.nats, data.run)
        broker.start()
        try:
            found = asyncio.run(measured(asked, broker.url, data))
        finally:
            broker.kill()
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


async def measured(asked, nats_url, data):
    kinds = {f"workers_{n}": (None, n) for n in asked.workers}
    if asked.against is not None:
        kinds = {"against": (asked.against.resolve(), 1), **kinds}
    rounds = {name: [] for name in ("bare_aiohttp", *kinds)}
    blobs = BlobStore.open("", default=data.blobs)
    async with Bus.connect(BusConfig(url=nats_url), name="bench", blobs=blobs) as bus:
        await bus.ensure()
        await announce(bus)
        pinging = asyncio.create_task(ping(bus))
        for _ in range(asked.rounds):
            rounds["bare_aiohttp"].append({"posts_per_s": await posts_per_s_of_bare()})
            for name, (tree, workers) in kinds.items():
                with gateway(nats_url, data, tree, workers) as (url, process):
                    rounds[name].append(await Load(bus, url, process, asked.polls).run())
        pinging.cancel()
    found = {name: medians(taken) for name, taken in rounds.items()}
    about = {"cores": os.cpu_count(), "polls": asked.polls, "rounds": asked.rounds}
    return about | found | {"ratios": ratios(found)}


def medians(rounds):
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


def ratios(found):
    """How many times as much, or as long, as with the baseline."""
    first, *more = [name for name in found if name.startswith("workers")]
    pairs = [(name, first) for name in more]
    pairs += [(first, base) for base in ("against", "bare_aiohttp") if base in found]
    return {
        f"{name} / {base}": {
            key: round(found[name][key] / found[base][key], 2)
            for key in found[base]
            if found[base][key]
        }
        for name, base in pairs
    }


async def announce(bus):
    base = {"name": MODEL, "vocab_size": 50_000, "context_length": 1 << 20, "tokenizer_id": "t"}
    for role in ("trainer", "sampler"):
        key = f"{ids.pool_token(MODEL)}-{role}"
        await bus.table(SERVED).put(key, ServedModel(role=role, **base))


async def ping(bus):
    """The services are there."""
    while True:
        for service in ("trainer", "sampler"):
            alive = ServiceAlive(
                service=service, instance=service, version="0", base_models=(MODEL,)
            )
            await bus.emit(SERVICE_ALIVE, alive)
        await asyncio.sleep(2)


@contextlib.contextmanager
def gateway(nats_url, data, tree, workers):
    """A gateway's address and its process; ``tree`` is another checkout to take it from."""
    config = data.root / "bench.toml"
    config.write_text(CONFIG.format(share="" if tree else "sampling_share = 1000000"))
    ready, ready_end = os.pipe()
    environ = os.environ | {"TINSMITH_NATS_URL": nats_url, "TINSMITH_DATA_DIR": str(data.root)}
    environ |= {lifeline.READY_VARIABLE: str(ready_end), "TINSMITH_CONFIG": str(config)}
    if tree is not None:
        services = sorted(map(str, (tree / "services").iterdir()))
        environ["PYTHONPATH"] = os.pathsep.join([str(tree / "libs"), *services])
    options = [] if workers == 1 else ["--workers", str(workers)]
    profile = os.environ.get("BENCH_PROFILE")
    python = ["-m", "cProfile", "-o", profile] if profile else ["-P"]
    process = subprocess.Popen(
        [sys.executable, *python, "-m", "tinsmith", "gateway", *options],
        env=environ,
        pass_fds=(ready_end,),
        cwd=data.root,
    )
    os.close(ready_end)
    try:
        with os.fdopen(ready) as pipe:
            can_read, _, _ = select.select([pipe], [], [], READY_S)
            line = pipe.readline() if can_read else ""
        if not line:
            sys.exit("the gateway did not start")
        yield json.loads(line)["ready"]["url"], process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


async def posts_per_s_of_bare():
    async with front.bare() as url:
        bodies = [front.step("model", n) for n in range(POSTS)]
        return await posts_per_s(url, "optim_step", bodies)


async def posts_per_s(url, path, bodies):
    """Over some connections, each of which waits for its answer."""
    waiting = list(reversed(bodies))

    async def send():
        async with front.Connection.to(url, KEY) as connection:
            while waiting:
                status, body = await connection.post(path, waiting.pop())
                assert status == 200, body

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(send())
    return round(len(bodies) / (time.perf_counter() - began))


class Load:
    """What one gateway has to take."""

    def __init__(self, bus, url, process, polls):
        self._bus = bus
        self._url = url
        self._process = process
        self._polls = polls

    async def run(self):
        async with front.Connection.to(self._url, KEY) as connection:
            self._sessions = [await front.new_session(connection) for _ in range(SESSIONS)]
            self._model = await front.new_model(connection, self._sessions[0], MODEL)
            self._sampler = await front.new_sampler(connection, self._sessions[0], MODEL)
        found = await self._posts()
        found |= await self._long_polls()
        found |= await self._large()
        await self._bus.withdraw(OPS, model="*", seq="*")
        return found

    async def _posts(self):
        bodies = [front.step(self._model, n) for n in range(1, POSTS + 1)]
        before = cpu_s(self._process)
        rate = await posts_per_s(self._url, "optim_step", bodies)
        return {"posts_per_s": rate, "post_cpu": self._cpu_since(before, POSTS)}

    async def _long_polls(self):
        bodies = [front.draw(self._sampler, n) for n in range(self._polls)]
        before = cpu_s(self._process)
        samples_per_s = await posts_per_s(self._url, "asample", bodies)
        sample_cpu = self._cpu_since(before, self._polls)
        done, answered = {}, {}
        all_held = front.Held(self._polls)
        async with asyncio.TaskGroup() as tasks:
            polls = [
                tasks.create_task(self._poll(seq, answered, all_held)) for seq in range(self._polls)
            ]
            await all_held.wait()
            before = cpu_s(self._process)
            beats = [tasks.create_task(self._beat(session)) for session in self._sessions]
            await self._finish(done)
            await asyncio.wait(polls)
            wake_up_cpu = self._cpu_since(before, self._polls)
            for beat in beats:
                beat.cancel()
        await self._bus.withdraw(SAMPLES, pool="*", share="*", sampler="*", seq="*")
        waited = [answered[seq] - done[seq] for seq in done]
        return {
            "asample_per_s": samples_per_s,
            "asample_cpu": sample_cpu,
            "wake_up_cpu": wake_up_cpu,
            "wake_up_p50": percentile(waited, 50),
            "wake_up_p99": percentile(waited, 99),
            "heartbeat_p99": percentile(self._beaten, 99),
        }

    def _cpu_since(self, before_s, requests):
        return round(1e3 * (cpu_s(self._process) - before_s) / requests, 3)

    async def _poll(self, seq, answered, all_held):
        async with front.Connection.to(self._url, KEY) as connection:
            body = {"request_id": ids.future_id(self._sampler, seq), "allow_metadata_only": True}
            all_held.add()
            while (found := await connection.post("retrieve_future", front.json_of(body)))[
                0
            ] == 408:
                pass
            assert found[0] == 200, found
            answered[seq] = time.perf_counter()

    async def _finish(self, done):
        """Results at an even rate, in no order, as a sampler stores and tells of them."""
        for seq in random.sample(range(self._polls), self._polls):
            request_id = ids.future_id(self._sampler, seq)
            result = SampleDone(request_id=request_id, sequences=())
            await self._bus.results.put_first(self._sampler, seq, result)
            done[seq] = time.perf_counter()
            await self._bus.emit(SAMPLE_READY, SampleReady(request_id=request_id))
            await asyncio.sleep(1 / RESULTS_PER_S)

    async def _beat(self, session):
        self._beaten = []
        async with front.Connection.to(self._url, KEY) as connection:
            while True:
                await asyncio.sleep(random.uniform(0.5, 1.5))
                began = time.perf_counter()
                body = {"session_id": session, "type": "session_heartbeat"}
                status, _ = await connection.post("session_heartbeat", front.json_of(body))
                assert status == 200
                self._beaten.append(time.perf_counter() - began)

    async def _large(self):
        """Training data of several megabytes, one after another, while others ask after health."""
        body = front.large_batch(self._model, LARGE_BYTES)
        taken, probed = [], []
        async with asyncio.TaskGroup() as tasks:
            probing = tasks.create_task(self._probe(probed))
            async with front.Connection.to(self._url, KEY) as connection:
                for n in range(LARGE_POSTS):
                    began = time.perf_counter()
                    batch = front.numbered(body, POSTS + 1 + n)
                    status, answer = await connection.post(
                        "forward_backward", batch, content_type="application/x-protobuf"
                    )
                    assert status == 200, answer
                    taken.append(time.perf_counter() - began)
            probing.cancel()
        return {
            "large_post_p50": percentile(taken, 50),
            "large_healthz_p50": percentile(probed, 50),
            "large_healthz_p99": percentile(probed, 99),
        }

    async def _probe(self, probed):
        async with front.Connection.to(self._url, KEY) as connection:
            while True:
                began = time.perf_counter()
                await connection.get("/healthz")
                probed.append(time.perf_counter() - began)
                await asyncio.sleep(PROBE_S)


def cpu_s(process):
    """CPU seconds so far of a gateway and its workers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ticks = 0
    for pid in (process.pid, *children):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def percentile(seconds, percent):
    """In milliseconds."""
    if len(seconds) < 2:
        return round(1e3 * statistics.fmean(seconds), 2)
    return round(1e3 * float(np.percentile(seconds, percent)), 2)


if __name__ == "__main__":
    main()
