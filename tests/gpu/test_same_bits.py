"""The same log gives the same bits: twice from the start, and when it is replayed, twice."""

from __future__ import annotations

import pytest
from tests.gpu.engines import DATA, adapted, learn, whole
from tests.unit.trainer.examples import cross_entropy, random_datum
from tests.unit.trainer.recorded import RUN, Recorder
from tests.unit.trainer.test_isolation import policy_datum

from tinsmith.cli.replay import Options
from tinsmith.config import Config, ModelConfig
from tinsmith.messages import ops
from tinsmith_trainer.replay import replay
from tinsmith_trainer.state import digest

pytestmark = pytest.mark.gpu
STEP = ops.OptimStep(learning_rate=1e-2)
LONG = tuple(random_datum(length, seed=length) for length in (300, 700, 500))


def record(folder, **form):
    """A run with two losses, rows of many lengths, and a saved state in its middle."""
    run = Recorder(folder, microbatch_tokens=1024, **form)
    run.do(ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=8, seed=3)))
    run.do(cross_entropy(*DATA))
    run.do(STEP)
    run.save_state()
    run.do(cross_entropy(*LONG))
    rollouts = tuple(policy_datum(length, length) for length in (17, 50, 64))
    run.do(ops.ForwardBackward(data=rollouts, loss_fn="importance_sampling"))
    run.do(STEP)
    run.do(cross_entropy(*DATA, forward_only=True))
    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_log_is_replayed_bit_for_bit_twice(folders, device, dtype):
    book = record(folders["llama"], device=device, dtype=dtype).book()
    model = ModelConfig(name="tiny", path=str(folders["llama"]), dtype=dtype)
    for _ in range(2):
        summary = await replay(RUN, book, Options(target=""), Config(models=(model,)))

        assert summary.divergence is None
        assert summary.warnings == ()
        assert summary.states_compared >= 3


@pytest.mark.parametrize(
    ("make", "family", "form"),
    [
        (adapted, "qwen3_moe", {"dtype": "float32"}),
        (adapted, "gemma2", {"dtype": "bfloat16"}),
        (adapted, "llama", {"dtype": "bfloat16", "quantization": "nf4"}),
        (whole, "llama", {"dtype": "bfloat16"}),
    ],
)
def test_two_runs_of_the_same_ops_are_equal_in_every_bit(folders, device, make, family, form):
    told = []
    for _ in range(2):
        engine, answers = make(folders[family], device, **form), []
        for data in (DATA, LONG):
            answers.append(learn(engine, data))
            answers.append(engine.optim_step("m", ops.OptimStep(learning_rate=1e-3)))
        told.append((answers, digest(engine.state("m"))))

    assert told[0] == told[1]
