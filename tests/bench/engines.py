"""What samples without a server, in a process of its own: transformers, or one of our engines.

    python -m tests.bench.engines transformers|torch|sglang FOLDER THREADS ROWS

Reads JSON lines, each with prompts and how many tokens to draw, and answers each with a JSON line
of the tokens drawn. Greedy, and never ended by a token, so that everyone draws as many.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from tinsmith.config import ModelConfig
from tinsmith.messages.sampling import SamplingParams
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engine import Row

# On the CPU; with SGLang, room for adapters that nobody loads takes gigabytes.
ROOM = {"device": "cpu", "max_adapters": 1, "max_lora_rank": 8, "cache_tokens": 16_384}
GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


class Alone:
    """The other process; use as a context manager. ``pid`` holds inside."""

    def __init__(self, kind, folder, *, threads, rows):
        """At most ``rows`` rows are drawn at the same time."""
        self._command = [sys.executable, "-m", "tests.bench.engines", kind, folder, threads, rows]

    def __enter__(self):
        self._process = subprocess.Popen(
            list(map(str, self._command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self._answer()
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()

    def draw(self, prompts, tokens):
        """``tokens`` tokens after each of ``prompts``, all rows at once."""
        self._process.stdin.write(json.dumps([prompts, tokens]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(map(str, self._command))} ended; what it wrote stands above")
        return json.loads(line)


class Generate:
    """What a researcher would write: a batch for ``generate``, padded on the left."""

    def __init__(self, folder, threads):
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # Without an end of its own: what is not set in a call is taken from here.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    async def draw(self, prompts, tokens):
        import torch

        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        drawn = self._model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(seen),
            max_new_tokens=tokens,
        )
        return drawn[:, longest:].tolist()

    async def close(self):
        pass


class Engine:
    """One of our engines, without a bus."""

    def __init__(self, engine):
        self._engine = engine
        self._count = 0

    async def draw(self, prompts, tokens):
        rows = [self._row(prompt, tokens) for prompt in prompts]
        drawn = await asyncio.gather(*map(self._engine.generate, rows))
        return [one.tokens.tolist() for one in drawn]

    def _row(self, prompt, tokens):
        self._count += 1
        return Row(
            request_id=str(self._count), index=0, prompt=np.array(prompt, np.int32), adapter=None,
            params=GREEDY, seed=0, max_tokens=tokens,
        )  # fmt: skip

    async def close(self):
        await self._engine.close()


def torch_engine(folder, threads, rows):
    from tinsmith_sampler.model import TorchOptions
    from tinsmith_sampler.torch_engine import TorchEngine

    tokens = ROOM["cache_tokens"]
    return TorchEngine(
        TorchOptions(model_path=folder, threads=threads, max_rows=rows, kv_tokens=tokens)
    )


def sglang_engine(folder, threads, rows, data):
    from tinsmith_sampler.sglang import assembly

    config = SamplerConfig(engine="sglang", threads=threads, max_rows=rows, **ROOM)
    model = ModelConfig(name="bench/model", path=folder)
    return assembly.sglang_engine(model, config, data, {})


async def opened(kind, folder, threads, rows, data):
    if kind == "transformers":
        return Generate(folder, threads)
    if kind == "torch":
        engine = torch_engine(folder, threads, rows)
    else:
        engine = sglang_engine(folder, threads, rows, data)
    await engine.start()
    return Engine(engine)


async def main(kind, folder, threads, rows):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes elsewhere
    with tempfile.TemporaryDirectory() as data:
        side = await opened(kind, folder, int(threads), int(rows), Path(data))
        try:
            answer = []
            while True:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
                if not (line := await asyncio.to_thread(sys.stdin.readline)):
                    return
                answer = await side.draw(*json.loads(line))
        finally:
            await side.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main(*sys.argv[1:]))
