"""Scoring again what was drawn: the right tokens, the right weights, and nothing else touched."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.trainer.examples import cross_entropy, datum, logprobs, random_datum

from tinsmith.errors import InvalidRequest, NotSupported, ServerError
from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith.messages.sampling import SamplePicked
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.rescoring import Continuation, Rescorer
from tinsmith_trainer.state import digest

TEXT = np.random.default_rng(0).integers(0, 400, 30)
DRAWN = 12


def picked(tokens=TEXT, drawn=DRAWN):
    return SamplePicked(
        request_id="r",
        index=0,
        tokens=np.asarray(tokens, "<i4").tobytes(),
        logprobs=np.arange(drawn, dtype="<f4").tobytes(),
    )


def continuation(most_tokens=64, **options):
    return Continuation(picked(**options), vocab_size=448, most_tokens=most_tokens)


@pytest.fixture
def trained(engine):
    """An engine with a model ``a`` that has made a step, and a gradient since."""
    engine.create("a", LoraShape(rank=4, seed=1))
    engine.forward_backward("a", cross_entropy(random_datum(20)))
    engine.optim_step("a", OptimStep(learning_rate=1e-2))
    engine.forward_backward("a", cross_entropy(random_datum(20, seed=1)))
    return engine


def files(engine):
    return to_files(engine.snapshot("a"), with_optimizer=False)


def forward(engine):
    """The same tokens by an op."""
    asked = cross_entropy(datum(TEXT[:-1], TEXT[1:]), forward_only=True)
    return logprobs(engine.forward_backward("a", asked))[0][-DRAWN:]


def test_present_weights_give_what_a_forward_op_gives(trained):
    found = Rescorer(trained).present("a", continuation())

    assert found.tobytes() == forward(trained).tobytes()


def test_a_models_files_give_the_same_bits_as_the_model(trained):
    rescorer = Rescorer(trained)
    rescorer.load("v", files(trained))
    is_present = rescorer.is_present("a")
    before = rescorer.same(continuation())
    trained.optim_step("a", OptimStep(learning_rate=1e-2))

    assert (is_present, rescorer.is_present("a")) == (True, False)
    assert rescorer.same(continuation()).tobytes() == before.tobytes()
    assert (rescorer.present("a", continuation()) != before).any()


def test_without_files_it_is_the_base_model(trained):
    rescorer = Rescorer(trained)
    rescorer.load("", {})
    base = rescorer.same(continuation())
    trained.drop("a")
    trained.create("a", LoraShape(rank=4))  # a fresh adapter does nothing

    assert np.abs(base - forward(trained)).max() < 1e-5


def test_scoring_changes_neither_state_nor_gradient(trained):
    state, gradient = digest(trained.state("a")), trained.tenant("a").gradient.clone()
    rescorer = Rescorer(trained)
    rescorer.load("v", files(trained))
    rescorer.same(continuation())
    rescorer.present("a", continuation())

    assert digest(trained.state("a")) == state
    assert (trained.tenant("a").gradient == gradient).all()
    assert all(pair.A_RI.grad is None for pair in trained.tenant("a").pairs.values())


def test_a_model_that_is_gone_is_not_scored(engine):
    assert Rescorer(engine).present("a", continuation()) is None


def test_of_a_long_text_the_beginning_is_scored(trained):
    rescorer = Rescorer(trained)
    whole = rescorer.present("a", continuation())
    cut = continuation(most_tokens=20)

    assert cut.logprobs.tolist() == [0, 1, 2]  # targets 18 to 20 of the text
    assert np.abs(rescorer.present("a", cut) - whole[:3]).max() < 1e-5


@pytest.mark.parametrize(("most", "scored"), [(29, 12), (18, 1), (17, 0), (5, 0)])
def test_what_is_scored_ends_where_the_pass_does(most, scored):
    assert len(continuation(most_tokens=most).logprobs) == scored


@pytest.mark.parametrize("tokens", [[], [5] * DRAWN, [448] * 20, [-1] * 20])
def test_what_nobody_can_have_drawn_is_refused(tokens):
    with pytest.raises(ServerError, match="no continuation"):
        continuation(tokens=tokens)


def test_files_of_another_model_are_refused_and_nothing_is_loaded(trained):
    rescorer = Rescorer(trained)
    with pytest.raises(InvalidRequest):
        rescorer.load("v", files(trained) | {"adapter_model.safetensors": b"?"})

    assert not rescorer.has("v")


def test_a_trainer_of_a_whole_model_has_no_room_for_another(tiny_llama):
    whole = TrainingEngine(base_model.load(str(tiny_llama), name="tiny:full"))

    with pytest.raises(NotSupported):
        whole.scratch({"config.json": b""})
