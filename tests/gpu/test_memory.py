"""Memory of a device: given back with what is dropped, and no more of it than was foreseen."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.gpu.engines import adapted, learn, whole
from tests.unit.trainer.examples import cross_entropy, random_datum

from tinsmith.messages.ops import WHOLE, LoraShape, OptimStep

pytestmark = pytest.mark.gpu
STEP = OptimStep(learning_rate=1e-3)


def held(device: str) -> int:
    """Bytes of live tensors, each storage once: as the allocator counts them, or on a CPU as
    they are found.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    tensors = [one for one in gc.get_objects() if type(one) in {torch.Tensor, torch.nn.Parameter}]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def lived(engine, shape) -> None:
    """The whole life of a model, and a gradient at its end that no step has spent."""
    engine.create("n", shape)
    for _ in range(2):
        engine.forward_backward("n", _op())
        engine.optim_step("n", STEP)
    engine.forward_backward("n", _op())
    engine.drop("n")


def _op():
    return cross_entropy(*(random_datum(length, seed=length) for length in (90, 64)))


def test_an_adapter_that_is_dropped_leaves_nothing(folders, device):
    engine = adapted(folders["llama"], device)
    lived(engine, LoraShape(rank=64))  # what is made once, for good
    before = held(device)
    lived(engine, LoraShape(rank=64))

    assert held(device) == before


def test_a_whole_model_that_is_dropped_leaves_nothing(folders, device):
    engine = whole(folders["llama"], device)
    engine.drop("m")
    lived(engine, WHOLE)
    before = held(device)
    lived(engine, WHOLE)

    assert held(device) == before


def test_an_engine_that_is_let_go_leaves_nothing(folders, device):
    def used():
        engine = adapted(folders["llama"], device)
        learn(engine)
        engine.optim_step("m", STEP)
        return weakref.ref(engine._adapters.get("m").weights)

    used()
    before = held(device)
    weights = used()

    assert held(device) == before
    assert weights() is None


def test_a_pass_takes_no_more_than_was_foreseen(folders, device):
    if device != "cuda":
        pytest.skip("needs a GPU: only its allocator tells the most that was in use")
    engine = adapted(folders["llama"], device, tokens=64)
    data = (random_datum(2000, seed=1),)
    learn(engine, data)
    before = held(device)
    torch.cuda.reset_peak_memory_stats()
    learn(engine, data)
    most = torch.cuda.max_memory_allocated() - before

    # The logits of the output layer's chunks come on top: of all targets, in float32, twice over.
    logits = 4 * 2 * 2000 * engine.info.vocab_size
    assert most < 1.25 * engine._room.bytes_of(2000, with_gradient=True) + 2 * logits
