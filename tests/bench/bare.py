"""The yardstick: what a researcher would write without a server, in a process of its own.

    python -m tests.bench.bare FOLDER RANK THREADS

Reads a JSON line with the rows of a batch, makes one padded training step with transformers, peft
and torch.optim, and answers with a JSON line: seconds (wall and CPU), loss and peak memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time


class Bare:
    """The other process; use as a context manager."""

    def __init__(self, folder, *, rank, threads=1):
        self._command = [sys.executable, "-m", "tests.bench.bare", folder, rank, threads]

    def __enter__(self):
        self._process = subprocess.Popen(
            list(map(str, self._command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask([])
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()

    def step(self, rows):
        """One step on ``rows``, lists of token ids whose last one is only a target."""
        return self._ask([list(map(int, row)) for row in rows])

    def _ask(self, rows):
        self._process.stdin.write(json.dumps(rows) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def main(folder, rank, threads):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(int(threads))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=int(rank), lora_alpha=32, target_modules=targets))
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad),
        lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0,
    )  # fmt: skip
    for line in sys.stdin:
        rows = json.loads(line)
        began, cpu = time.perf_counter(), time.process_time()
        loss = step(model, optimizer, rows) if rows else 0.0
        told = {
            "s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
            "loss": loss,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def step(model, optimizer, rows):
    import torch
    import torch.nn.functional as F

    longest = max(map(len, rows)) - 1
    inputs = torch.zeros((len(rows), longest), dtype=torch.int64)
    targets = torch.full((len(rows), longest), -100)
    for b, row in enumerate(rows):
        inputs[b, : len(row) - 1] = torch.tensor(row[:-1])
        targets[b, : len(row) - 1] = torch.tensor(row[1:])
    mask = (targets != -100).long()
    logits = model(input_ids=inputs, attention_mask=mask, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


if __name__ == "__main__":
    main(*sys.argv[1:])
