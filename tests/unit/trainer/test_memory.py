"""What a pass keeps in memory, and what is refused because it would not fit."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch
from tests.unit.trainer.examples import cross_entropy, random_datum
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tinsmith import memory
from tinsmith.errors import NoRoom
from tinsmith.messages.ops import LoraShape
from tinsmith_trainer import base_model, head
from tinsmith_trainer.engine import TrainingEngine

GIB = 1 << 30


def build(folder, **options):
    base = base_model.load(str(folder), name="tiny")
    engine = TrainingEngine(base, microbatch_tokens=64, **options)
    engine.create("m", LoraShape(rank=4))
    return engine


def kept(engine, op):
    """Bytes that autograd keeps of each tensor during ``op``."""
    sizes = []

    def keep(tensor):
        if tensor.grad_fn is not None or tensor.ndim > 2:  # and not weights
            sizes.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward_backward("m", op)
    return sum(sizes)


def test_a_forward_pass_keeps_nothing(tiny_llama):
    engine = build(tiny_llama)

    assert kept(engine, cross_entropy(random_datum(50))) > 0
    assert kept(engine, cross_entropy(random_datum(50), forward_only=True)) == 0


def test_an_adapter_of_the_unembedding_needs_no_backward_pass(tiny_llama):
    engine = build(tiny_llama)
    engine.drop("m")
    engine.create("m", LoraShape(rank=4, train_attn=False, train_mlp=False))

    assert kept(engine, cross_entropy(random_datum(50))) == 0
    assert engine._adapters.get("m").gradient.abs().max() > 0


def test_the_backward_pass_ends_at_the_first_adapted_layer(tiny_llama):
    """What comes before it has no gradient; what comes after it has one."""
    engine = build(tiny_llama)
    layers = engine._passes._base.backbone.layers
    needs = []
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: needs.append((*args, *kwargs.values())[0].requires_grad),
            with_kwargs=True,
        )
    engine.forward_backward("m", cross_entropy(random_datum(50)))

    assert needs == [False] + [True] * (len(layers) - 1)


class Widest(TorchDispatchMode):
    """Notes the most rows of any tensor that is as wide as the vocabulary."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            is_wide = isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.width,)
            if is_wide and tensor.untyped_storage().data_ptr() not in self.weights:
                self.rows = max(self.rows, tensor.numel() // self.width)
        return made

    weights: frozenset[int] = frozenset()


def test_logits_of_all_tokens_never_exist_at_once(tiny_llama, monkeypatch):
    monkeypatch.setattr(head, "_CHUNK_LOGITS", {"cpu": 1})
    engine = build(tiny_llama)
    with Widest(engine.info.vocab_size) as widest:
        engine.forward_backward("m", cross_entropy(random_datum(600)))

    assert widest.rows == head._CHUNK_TOKENS


def test_checkpointing_gives_the_same_bits_and_keeps_less(any_folder):
    plain, checkpointed = build(any_folder), build(any_folder, checkpointing=True)
    op = cross_entropy(random_datum(60, seed=1), random_datum(40, seed=2))

    assert plain.forward_backward("m", op) == checkpointed.forward_backward("m", op)
    gradients = [each._adapters.get("m").gradient for each in (plain, checkpointed)]
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0
    assert plain._room.bytes_of(9000, with_gradient=True) > checkpointed._room.bytes_of(
        9000, with_gradient=True
    )


def test_the_measured_growth_tells_what_longer_passes_keep(any_folder):
    engine = build(any_folder)
    predicted = engine._room._kept.at(700)

    assert predicted == pytest.approx(engine._passes.kept_bytes(700), rel=0.1)


def test_a_datum_that_alone_exceeds_memory_is_refused_with_figures(tiny_llama, monkeypatch):
    engine = build(tiny_llama)
    engine.forward_backward("m", cross_entropy(random_datum(20)))
    gradient = engine._adapters.get("m").gradient
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 20)

    with pytest.raises(NoRoom) as caught:
        engine.forward_backward("m", cross_entropy(random_datum(10), random_datum(1500)))

    told = str(caught.value)
    assert told.startswith("data[1].model_input: 1500 tokens in one pass take about 0.0")
    assert "cpu has 0.00 GiB free, enough for about" in told
    assert "shorten or split the datum" in told
    assert engine._adapters.get("m").gradient is gradient


def test_what_needs_no_pass_longer_than_configured_is_never_refused(tiny_llama, monkeypatch):
    engine = build(tiny_llama)
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)

    engine.forward_backward("m", cross_entropy(*[random_datum(64)] * 5))


LONG = """
import resource, sys
from pathlib import Path
import torch
from tests.unit.trainer.examples import cross_entropy, random_datum
from tinsmith.messages.ops import LoraShape
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model
from tinsmith_trainer.engine import TrainingEngine

torch.set_num_threads(1)
folder = tiny_model.build(Path(sys.argv[1]), context_length=32768)
engine = TrainingEngine(base_model.load(str(folder), name="tiny"), microbatch_tokens=1024)
engine.create("m", LoraShape(rank=8))
engine.forward_backward("m", cross_entropy(random_datum(32768, vocab=250)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sequences_of_32k_tokens_take_less_than_4_gib(tmp_path):
    command = [sys.executable, "-c", LONG, str(tmp_path / "long")]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert peak < 4 * GIB


def test_nothing_of_a_pass_outlives_it(tiny_llama):
    engine = build(tiny_llama, checkpointing=True)
    seen = []
    layer = engine._passes._base.backbone.layers[0]
    layer.register_forward_hook(
        lambda _, args, out: seen.append(weakref.ref(out if torch.is_tensor(out) else out[0]))
    )
    engine.forward_backward("m", cross_entropy(random_datum(30)))

    assert seen
    assert all(reference() is None for reference in seen)
