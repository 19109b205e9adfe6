"""A lineage of a small model on a real broker, and engines of SGLang that follow it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tinsmith import ids
from tinsmith.messages.weights import PublishedVersion
from tinsmith.weights.policy import Policy
from tinsmith.weights.publisher import Publisher, Wanted
from tinsmith.weights.specs import TensorSpec
from tinsmith_sampler.following import Follower
from tinsmith_sampler.model import TorchOptions
from tinsmith_sampler.sglang.whole_engine import SglangWholeEngine
from tinsmith_sampler.standing import Standing

DELTAS = Policy(full_below_bytes=0, full_every=10**6, full_share=1e9, fold=0)


class Trained:
    """A model that changes by steps, published as a trainer does."""

    def __init__(self, bus, folder, policy=DELTAS):
        self._bus, self._policy = bus, policy
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.lineage_id = f"{ids.new_session_id()}:train:0"
        self._rng = torch.Generator().manual_seed(1)
        self._publisher = None

    def bits(self):
        return {
            name: one.detach().reshape(-1).view(torch.int32).numpy().view(np.uint32).copy()
            for name, one in self.model.named_parameters()
        }

    def step(self, share=0.02):
        """Move a share of all weights by a hundredth of their size or so."""
        with torch.no_grad():
            for one in self.model.parameters():
                moves = torch.rand(one.shape, generator=self._rng) < share
                noise = torch.randn(one.shape, generator=self._rng)
                one.add_(moves * noise * 0.01 * one.abs().mean())

    def restore(self, bits):
        with torch.no_grad():
            for name, one in self.model.named_parameters():
                words = torch.from_numpy(bits[name].view(np.int32))
                one.copy_(words.view(torch.float32).view(one.shape))

    async def publish(self):
        if self._publisher is None:
            shapes = {name: tuple(one.shape) for name, one in self.model.named_parameters()}
            specs = {name: TensorSpec("float32", shape) for name, shape in shapes.items()}
            wanted = Wanted(
                lineage_id=self.lineage_id,
                publisher_id="trainer",
                content="full",
                policy=self._policy,
            )
            self._publisher = await Publisher.open(self._bus.lineages, wanted, specs, self.bits())
        done = await self._publisher.publish(self.bits())
        return PublishedVersion(lineage_id=self.lineage_id, version=done.version, root=done.root)

    async def stepped(self, share=0.02):
        self.step(share)
        return await self.publish()

    def logprobs(self, prompt, tokens):
        """What each of ``tokens`` has after the prompt and those before it."""
        whole = torch.tensor([[*map(int, prompt), *map(int, tokens)]])
        with torch.no_grad():
            logits = self.model(whole).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])
        return found[:, 0].numpy()


def engine(model, server):
    """Not started; ``server`` as ``sglang.server`` has them."""
    return SglangWholeEngine(str(model), lambda _: server, max_rows=8, max_rank=16)


@asynccontextmanager
async def following(bus, lineage_id, engine, model):
    """A follower that has started."""
    figures = {}
    follower = Follower(
        bus,
        TorchOptions(model_path=str(model)),
        lineage_id,
        replica="sampler-x",
        figures=figures,
        standing=Standing(figures),
        engine=engine,
    )
    await follower.start()
    try:
        yield follower
    finally:
        await follower.close()
