"""How fast rows are drawn: transformers' generate, our torch engine and SGLang, alone and served.

    python -m tests.bench.sampler [--rows N ...] [--rounds N] [--tiny] [--only SIDE ...]

One model in float32, the same prompts, as many new tokens from everyone (greedy, no end), one
number of threads, each side in processes of its own. ``torch`` and ``sglang`` are the engines
without a server; ``..._served`` is the client's ``sample_async``, once per row, through a whole
`tinsmith up`. One side after the other is started and takes turns with ``generate``, the baseline,
so that a busy machine disturbs both alike, and memory holds two models at most.

``cpu`` is CPU seconds of all processes of a side, the client's beside it. ``times_transformers``
is how much faster than generate in the same round, by wall time and by CPU time, which a busy
machine disturbs less; ``times_direct`` is the same figure over that of the engine alone.
``first_token_s`` is a call for one token of each row. ``agrees`` is the share of the tokens before
the first one that differs. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tests.bench import processes, shaped
from tests.bench.engines import ROOM, Alone
from tests.bench.running import Server

from tinsmith.testing import tiny_model
from tinsmith_sampler.sglang.launching import default_python

BASELINE = "transformers"
SIDES = ("torch", "torch_served", "sglang", "sglang_served")
SERVED = "_served"
TIMES = {"s": "times_transformers", "cpu_s": "times_transformers_by_cpu"}


class Served:
    """The client's way to an engine; ``pid`` is the parent of all processes of the server."""

    def __init__(self, server):
        import tinker

        self._service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
        self._client = self._service.create_sampling_client(base_model=shaped.NAME).result()
        self.pid = server.pid

    def close(self):
        """Else its heartbeats would look for the server for ever."""
        self._service.holder.close()

    def draw(self, prompts, tokens):
        """``tokens`` tokens after each of ``prompts``, all rows at once."""
        return asyncio.run(self._draw(prompts, tokens))

    async def _draw(self, prompts, tokens):
        from tinker import types

        params = types.SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, stop=[])
        asked = (
            self._client.sample_async(types.ModelInput.from_ints(prompt), 1, params)
            for prompt in prompts
        )
        return [list(one.sequences[0].tokens) for one in await asyncio.gather(*asked)]


@contextmanager
def opened(name, folder, args):
    """A side that is ready."""
    kind = name.removesuffix(SERVED)
    rows = max(args.rows)
    if kind == name:
        with Alone(kind, folder, threads=args.threads, rows=rows) as side:
            yield side
        return
    settings = {"TINSMITH_SAMPLER__ENGINE": kind, "TINSMITH_SAMPLER__MAX_ROWS": str(rows)}
    settings |= {f"TINSMITH_SAMPLER__{key.upper()}": str(value) for key, value in ROOM.items()}
    with (
        tempfile.TemporaryDirectory() as data,
        Server(
            Path(data),
            threads=args.threads,
            model=folder,
            services="gateway,sampler,checkpointer",
            settings=settings,
        ) as server,
    ):
        served = Served(server)
        try:
            yield served
        finally:
            served.close()


class Prompts:
    """Random tokens, no prompt twice: engines keep what they have computed.

    A new one begins with the first again, so that all sides get the same.
    """

    def __init__(self, folder, length):
        vocab = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
        self._random = np.random.default_rng(0)
        self._range = (min(100, vocab // 4), vocab - 8)
        self._length = length

    def next(self, rows):
        return self._random.integers(*self._range, (rows, self._length)).tolist()


def timed(side, prompts, tokens):
    began = time.perf_counter()
    cpu, client_cpu = processes.cpu_s(side.pid), time.process_time()
    drawn = side.draw(prompts, tokens)
    taken = {"s": time.perf_counter() - began, "client_cpu_s": time.process_time() - client_cpu}
    taken["cpu_s"] = processes.cpu_s(side.pid) - cpu
    if [len(row) for row in drawn] != [tokens] * len(prompts):
        sys.exit("a side drew fewer tokens than it was asked for")
    return taken | {"drawn": drawn}


def one_round(sides, prompts, rows, tokens):
    """What each side took for the same rows, in this order."""
    first, whole = prompts.next(rows), prompts.next(rows)
    taken = {}
    for name, side in sides:
        started = timed(side, first, 1)
        taken[name] = timed(side, whole, tokens) | {"first_token_s": started["s"]}
        told = {key: round(taken[name][key], 2) for key in ("s", "cpu_s", "first_token_s")}
        sys.stderr.write(f"{rows} rows, {name}: {json.dumps(told)}\n")
    return taken


def agreement(rows, others):
    """Share of the tokens before the first one that differs."""
    found = []
    for row, other in zip(rows, others, strict=True):
        pairs = enumerate(zip(row, other, strict=True))
        found.append(next((i for i, (a, b) in pairs if a != b), len(row)) / len(row))
    return statistics.fmean(found)


def summary(rounds, name, tokens):
    """The figures of one side for one number of rows; ``tokens`` were drawn in each round."""

    def median(key):
        return statistics.median(taken[name][key] for taken in rounds)

    found = {
        "tokens_per_s": round(tokens / median("s"), 1),
        "cpu_s_per_1000_tokens": round(1e3 * median("cpu_s") / tokens, 2),
        "first_token_s": round(median("first_token_s"), 3),
    }
    if name == BASELINE:
        return found
    if name.endswith(SERVED):
        found["client_cpu_s_per_1000_tokens"] = round(1e3 * median("client_cpu_s") / tokens, 2)
    for key, told in TIMES.items():
        ratios = sorted(taken[BASELINE][key] / taken[name][key] for taken in rounds)
        found[told] = round(statistics.median(ratios), 3)
        found[f"{told}_spread"] = [round(ratio, 3) for ratio in (ratios[0], ratios[-1])]
    return found | {"agrees_with_transformers": agreed(rounds, name, rounds, BASELINE)}


def against_direct(found, rounds, name):
    """The figures of a served engine over those of the engine alone."""
    direct = name.removesuffix(SERVED)
    ours, theirs = found[name], found[direct]
    return {
        "times_direct": round(ours[TIMES["s"]] / theirs[TIMES["s"]], 3),
        "times_direct_by_cpu": round(ours[TIMES["cpu_s"]] / theirs[TIMES["cpu_s"]], 3),
        "agrees_with_direct": agreed(rounds[name], name, rounds[direct], direct),
    }


def agreed(rounds, name, others, other):
    pairs = zip(rounds, others, strict=True)
    shares = [agreement(one[name]["drawn"], two[other]["drawn"]) for one, two in pairs]
    return round(statistics.fmean(shares), 4)


def chosen(args):
    """The names of the sides to measure; and why others are not."""
    names = [name for name in SIDES if name in args.only]
    python = default_python()
    if python.exists():
        return names, {}
    reason = f"{python} is not there: run `make sglang`"
    return (
        [name for name in names if not name.startswith("sglang")],
        {name: reason for name in names if name.startswith("sglang")},
    )


def beside_baseline(name, folder, args):
    """The rounds of one side and of the baseline, by the number of rows."""
    prompts = Prompts(folder, args.prompt)
    rounds = {rows: [] for rows in args.rows}
    with opened(BASELINE, folder, args) as baseline, opened(name, folder, args) as side:
        sides = [(BASELINE, baseline), (name, side)]
        for _, one in sides:
            one.draw(prompts.next(1), 4)  # warms up
        for number in range(args.rounds):
            order = sides if number % 2 == 0 else sides[::-1]
            for rows, taken in rounds.items():
                taken.append(one_round(order, prompts, rows, args.tokens))
    return rounds


def report(rounds, rows, tokens):
    """The figures of all sides for one number of rows."""
    of_rows = {name: taken[rows] for name, taken in rounds.items()}
    every = [one for taken in of_rows.values() for one in taken]
    found = {BASELINE: summary(every, BASELINE, rows * tokens)}
    for name, taken in of_rows.items():
        found[name] = summary(taken, name, rows * tokens)
        if name.endswith(SERVED) and name.removesuffix(SERVED) in of_rows:
            found[name] |= against_direct(found, of_rows, name)
    return found


def measure(args, folder, told):
    names, skipped = chosen(args)
    rounds = {name: beside_baseline(name, folder, args) for name in names}
    return {
        "model": told,
        "threads": args.threads,
        "cores": os.cpu_count(),
        "prompt_tokens": args.prompt,
        "new_tokens": args.tokens,
        "rounds": args.rounds,
        "skipped": skipped,
        "rows": {rows: report(rounds, rows, args.tokens) for rows in args.rows},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a row")
    parser.add_argument("--threads", type=int, default=1, help="of every side")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of SmolLM2-135M")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE",
                        help="besides transformers: " + ", ".join(SIDES))  # fmt: skip
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.tiny:
            folder, told = tiny_model.build(Path(scratch) / "tiny"), "tiny, float32"
        else:
            folder, is_real = shaped.folder()
            told = shaped.told(is_real)
        found = measure(args, str(folder), told)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
