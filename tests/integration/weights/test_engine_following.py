"""The torch engine follows a lineage: swapped between answers, proven, and repaired."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
from tests.unit.sampler.examples import prompt, row
from tests.unit.sampler.oracles import Oracle
from tests.unit.sampler.test_engine_memory import bits_of
from transformers import AutoModelForCausalLM

from tinsmith import ids
from tinsmith.errors import VersionUnmet
from tinsmith.messages.weights import PublishedVersion
from tinsmith.testing import tiny_model
from tinsmith.weights.policy import Policy
from tinsmith.weights.publisher import Publisher, Wanted
from tinsmith.weights.specs import TensorSpec
from tinsmith_sampler.following import Follower
from tinsmith_sampler.model import TorchOptions
from tinsmith_sampler.standing import Standing

PATIENCE_S = 90.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and three models of its shape, as training would have made them."""
    folder = tmp_path_factory.mktemp("versions")
    return [tiny_model.build(folder / str(seed), seed=seed) for seed in range(4)]


class Lineage:
    """A publisher of one lineage."""

    def __init__(self, bus, folders):
        self.bus, self.folders = bus, folders
        self.id = f"{ids.new_session_id()}:train:0"
        self.publisher = None
        self.figures = {}  # of who follows

    async def publish(self, number):
        """Make the model in folder ``number`` the newest version."""
        bits = bits_of(self.folders[number], torch.float32)
        if self.publisher is None:
            model = AutoModelForCausalLM.from_pretrained(self.folders[number])
            shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
            specs = {name: TensorSpec("float32", shape) for name, shape in shapes.items()}
            wanted = Wanted(
                lineage_id=self.id,
                publisher_id="trainer",
                content="full",
                policy=Policy(full_below_bytes=0),
            )
            own = {name: one.copy() for name, one in bits.items()}
            self.publisher = await Publisher.open(self.bus.lineages, wanted, specs, own)
        done = await self.publisher.publish(bits)
        return PublishedVersion(lineage_id=self.id, version=done.version, root=done.root)

    @asynccontextmanager
    async def followed(self):
        options = TorchOptions(model_path=str(self.folders[0]), kv_tokens=4096)
        figures = self.figures
        follower = Follower(
            self.bus,
            options,
            self.id,
            replica="sampler-x",
            figures=figures,
            standing=Standing(figures),
        )
        await follower.start()
        try:
            yield follower
        finally:
            await follower.close()


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def check_draws(engine, folder):
    made = await engine.generate(row(prompt=prompt(9)))
    expected = Oracle(folder).logprobs(prompt(9), made.tokens)
    assert made.logprobs == pytest.approx(expected, abs=2e-5)


async def test_who_draws_ends_under_what_it_began_with(bus, folders):
    lineage = Lineage(bus, folders)
    first = await lineage.publish(1)
    async with lineage.followed() as follower:
        async with follower.hold(first) as engine:
            second = await lineage.publish(2)
            await until(lambda: follower._is_pausing)  # it is staged, and waits
            waiting = asyncio.create_task(draw(follower, second, folders[2]))
            await check_draws(engine, folders[1])
            assert engine.root == first.root
            assert not waiting.done()
        await waiting
        await until(lambda: lineage.figures["weights_version"] == 2)
        assert lineage.figures["weights_received_bytes"] > 0
        assert lineage.figures["weights_mismatches"] == 0
        with pytest.raises(VersionUnmet, match=r"exactly 1 .* serves 2"):
            async with follower.hold(first):
                pass


async def test_an_answer_from_memory_that_was_found_wrong_does_not_leave(bus, folders):
    lineage = Lineage(bus, folders)
    first = await lineage.publish(1)
    async with lineage.followed() as follower:
        receiver = follower._receiver
        with pytest.raises(VersionUnmet, match="hold other bits"):
            await draw_while_a_bit_flips(follower, first)
        await draw(follower, first, folders[1])  # repaired, and proven
        assert receiver.status().mismatches >= 1


async def draw(follower, version, folder):
    async with follower.hold(version) as engine:
        assert engine.root == version.root
        await check_draws(engine, folder)


async def draw_while_a_bit_flips(follower, version):
    receiver = follower._receiver
    async with follower.hold(version) as engine:
        flip(engine)
        receiver._unchecked = list(engine.places)
        receiver._news.set()
        await until(lambda: receiver.serving is None)


def flip(engine):
    """One bit of one weight, where it is computed with."""
    place = next(places[0] for name, places in engine.places.items() if "q_proj" in name)
    with torch.inference_mode():
        tensor = place.read()
        tensor.view(torch.int32)[0, 0] ^= 1 << 20
        place.write(tensor)


async def test_a_follower_that_comes_late_serves_the_newest_alone(bus, folders):
    lineage = Lineage(bus, folders)
    versions = [await lineage.publish(number) for number in (1, 2, 3)]
    async with lineage.followed() as follower:
        await draw(follower, versions[-1], folders[3])
        with pytest.raises(VersionUnmet):
            async with follower.hold(versions[0]):
                pass


async def test_a_root_that_is_not_the_lineages_is_refused(bus, folders):
    lineage = Lineage(bus, folders)
    first = await lineage.publish(1)
    forged = PublishedVersion(lineage_id=lineage.id, version=first.version, root="0" * 64)
    async with lineage.followed() as follower:
        with pytest.raises(VersionUnmet, match="look at the lineage"):
            async with follower.hold(forged):
                pass
